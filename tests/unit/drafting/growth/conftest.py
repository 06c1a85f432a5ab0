from tests.unit.verification.conftest import small_blocks as small_blocks
