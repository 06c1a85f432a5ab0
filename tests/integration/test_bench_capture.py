from __future__ import annotations

from benchmarks.adaptation.served import captured
from tests.unit.benchmarks.adaptation.conftest import made_up, small_lab


def test_with_capture_every_request_is_written_and_without_it_none(tmp_path):
    lab = small_lab(tmp_path)
    asked = lab.studio.asked(made_up(3), 120)
    found, counters = captured(lab, lab.fresh("eagle"), lab.recorded("tiny", asked), 2, lambda step: None)
    assert counters == {"written": 3 * 3, "dropped": 0}  # a warming turn and two, of the way that captures
    assert len(found.one.speeds) == len(found.other.speeds) == 2
    assert min(found.one.speeds + found.other.speeds) > 0
