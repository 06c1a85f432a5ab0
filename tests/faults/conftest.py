"""A service to be broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.up import Up, starting


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One for all tests of a file; ends with them."""
    with starting(tmp_path_factory.mktemp("service")) as up:
        yield up
