from __future__ import annotations

import time

import pytest

from benchmarks.adaptation import served
from benchmarks.adaptation.served import captured
from benchmarks.pair import BenchError
from osd.capture.trace import encode
from osd.capture.writer import TraceWriter
from tests.unit.benchmarks.adaptation.conftest import made_up, small_experiment

WRITE = 0.15  # seconds


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return small_experiment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def traces(experiment):
    return experiment.recorded("tiny", experiment.setup.asked(made_up(3), 120))


def test_with_capture_every_request_is_written_and_that_takes_its_time(experiment, traces, monkeypatch):
    def slowly(trace):
        time.sleep(WRITE)
        return encode(trace)

    monkeypatch.setattr("osd.capture.writer.encode", slowly)  # the thread that writes calls it
    capture = captured(experiment, experiment.fresh("eagle"), traces, 2, lambda step: None)
    found = capture.speeds
    assert capture.traces == {"written": 3 * 3, "dropped": 0}  # a warming turn and two, of the way that captures
    assert len(found.one.speeds) == len(found.other.speeds) == 2
    assert max(found.one.speeds) < 3 * experiment.size.tokens / (3 * WRITE)
    assert min(found.other.speeds) > 0


def test_records_that_get_lost_are_an_error(experiment, traces, monkeypatch):
    monkeypatch.setattr(served, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(TraceWriter, "offer", lambda writer, trace: True)
    with pytest.raises(BenchError, match="of 3 records"):
        captured(experiment, experiment.fresh("eagle"), traces, 1, lambda step: None)
