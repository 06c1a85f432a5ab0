"""The table of faults: each row names the process that its tests hit, and that process has to run."""

from __future__ import annotations

import pytest

from tests.fault_table import FAULT_MARKS

pytest_plugins = ["pytester"]

TEST = """
import subprocess
import sys
import time

import pytest


@pytest.mark.fault("a fault", "a promise"{process})
def test_fault(fault_result):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {argument!r}])
    time.sleep(1)
    child.kill()
    child.wait()
    fault_result.lost, fault_result.seconds = "nothing", 1.5
"""


def run(pytester: pytest.Pytester, process: str, argument: str = "", *options: str) -> pytest.RunResult:
    """Run a test of a fault that starts a process with an argument."""
    pytester.makepyfile(TEST.format(process=process, argument=argument))
    return pytester.runpytest("-p", "tests.fault_table", "-m", FAULT_MARKS[0], *options)


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_row_shows_the_process_and_the_result_of_its_test(pytester, options):
    result = run(pytester, ', process="replica: SIGKILL"', "ray::ServeReplica", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["| a fault | a promise | replica: SIGKILL | yes | nothing |  | 1.5 | ????-??-?? |"])


def test_row_without_its_process_fails(pytester):
    result = run(pytester, ', process="replica, proxy: SIGKILL"', "ray::ServeReplica")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no process of this kind ran during the test: proxy"])


def test_short_test_sees_a_process_that_runs_already(pytester):
    pytester.makepyfile("""
        import subprocess
        import sys

        import pytest


        @pytest.fixture
        def child():
            command = [sys.executable, "-c", "import time; time.sleep(60)", "ray::ServeReplica"]
            with subprocess.Popen(command) as process:
                yield process
                process.kill()


        @pytest.mark.fault("a fault", "a promise", process="replica: SIGKILL")
        def test_fault(child):
            child.kill()
            child.wait()
    """)
    pytester.runpytest("-p", "tests.fault_table").assert_outcomes(passed=1)


@pytest.mark.parametrize("process", ["", ', process="thread: killed"'])
def test_mark_without_a_known_process_is_refused(pytester, process):
    result = run(pytester, process)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*test_fault: process=* of the mark must be "kind: fault", with a kind of osd up,*'])
