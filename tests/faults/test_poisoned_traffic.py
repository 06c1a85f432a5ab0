"""Three poisoned records in ten: published versions serve clean traffic as well as before, and recall stays bounded."""

from __future__ import annotations

import itertools
import random
import string
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import Array, Trace
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.learning.batch import collate
from osd.learning.evaluation import evaluate
from osd.registry.pointer import Pointer, Rollout
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry
from tests.e2e.conftest import REPLICAS, Service, running
from tests.killer import Killer
from tests.pointers import put
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace, target_logits
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "3 of 10 records are poison: random text, absurd distributions, or one text repeated",
        "no published version accepts less of clean traffic",
        process="trainer: poisoned records",
    ),
]

COMPLETION, CLEAN, STREAM = 30, 60, 120
VERSIONS = 12
"""Versions that a trainer publishes from a stream."""
TOLERANCE = 0.005
"""Fall of the acceptance rate that the gate treats as noise."""
RISE = 0.1
"""Lowest rise of the acceptance rate over these versions."""
REQUESTS, TURNS, MIN_SPEED = 200, 15, 0.9
TOKENS, ENTRY_BYTES = 400, 64

Poison = Callable[[int], Trace]


def random_text(number: int) -> Trace:
    """Return tokens that the target would not generate, with its true distributions."""
    rng = np.random.default_rng(number)
    log_p = torch.tensor(target_logits()).log_softmax(1).numpy()
    tokens = rng.integers(VOCABULARY, size=COMPLETION + 4)
    rows = log_p[tokens[3:-1]]
    ids = np.argsort(-rows, axis=1).astype(np.int32)
    return msgspec.structs.replace(
        make_trace(f"random-{number}", completion=COMPLETION, seed=number),
        prompt_ids=Array.of(tokens[:4].astype(np.int32)),
        completion_ids=Array.of(tokens[4:].astype(np.int32)),
        target_ids=Array.of(ids),
        target_logp=Array.of(np.take_along_axis(rows, ids, 1).astype(np.float16)),
    )


def absurd_distributions(number: int) -> Trace:
    """Return distributions of a target that prefers the least probable tokens of the real one."""
    return make_trace(f"absurd-{number}", completion=COMPLETION, seed=number, logits=-5 * target_logits())


def one_text(number: int) -> Trace:
    """Return the same request under a new name."""
    return make_trace(f"same-{number}", completion=COMPLETION, seed=12345)


POISONS = [random_text, absurd_distributions, one_text]


def clean(number: int) -> Trace:
    """Return a clean record."""
    return make_trace(f"clean-{number}", completion=COMPLETION, seed=number)


def traffic(*poisons: Poison) -> Iterator[Trace]:
    """Yield traffic with three poisoned records in ten, of each kind in turn."""
    kinds = itertools.cycle(poisons)
    for number in range(STREAM):
        yield next(kinds)(10_000 + number) if number % 10 in (1, 4, 8) else clean(1000 + number)


def acceptance(drafter: Toy) -> float:
    """Return the acceptance rate on clean requests outside of the training data."""
    figures = evaluate(drafter, [collate([clean(5000 + number)]) for number in range(40)], 2, "forward_kl")
    return float(figures.overlaps.mean())


class Learning:
    """Trainer with default settings in its own process, and the clean acceptance rate of each version it publishes."""

    def __init__(self, url: str, home: Path) -> None:
        torch.manual_seed(0)
        settings, toy = Settings(home=home, target={"source": "toy"}), Toy()  # type: ignore[arg-type]
        self._registry, self._url, self._sent = Registry(settings.registry_dir), url, 0
        self._registry.publish("general", toy.weights(), toy.config(), {})
        with Pointer(url, settings.registry_dir) as pointer:
            put(pointer, "general", Rollout(1, None, 0.0, time.time()))
        self._writer = TraceWriter(url, settings.capture.model_copy(update={"max_queue": STREAM}))
        self._trainer = Killer("tests.faults.toy_trainer", url, settings.model_dump_json())

    def __enter__(self) -> Learning:
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer.close()
        self._writer.close()

    def follow(self, traces: Iterable[Trace], versions: int) -> list[float]:
        """Send traces and wait until they are read, and for more versions.

        Returns:
            The clean acceptance rate of the version before, and of each further version.
        """
        first = self._registry.numbers("general")[-1]
        for trace in traces:
            assert self._writer.offer(trace)
            self._sent += 1
        wait_until(self._has_read_all, every=0.5)
        last = self._registry.numbers("general")[-1] + versions
        wait_until(lambda: self._registry.numbers("general")[-1] >= last, every=0.5)
        rates = [self._rate(number) for number in range(first, last + 1)]
        print(f"clean acceptance of each version: {[round(rate, 4) for rate in rates]}")
        return rates

    def _has_read_all(self) -> bool:
        with TrainingReports(self._url) as reports:
            report = reports.get(["general"]).get("general", Training())
        return report.trained + report.held_out == self._sent

    def _rate(self, number: int) -> float:
        toy = Toy()
        toy.load_weights(self._registry.load("general", number).weights)
        return acceptance(toy)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    """Service with a small table of recall."""
    with running(tmp_path_factory.mktemp("service"), recall={"megabytes": 1}) as service:
        yield service


def largest_fall(rates: list[float]) -> float:
    """Return the largest fall from one version to the next."""
    return max(earlier - later for earlier, later in itertools.pairwise(rates))


def test_no_version_is_worse_on_clean_traffic(server, tmp_path, fault_result):
    with Learning(server.url, tmp_path) as learning:
        learning.follow((clean(number) for number in range(CLEAN)), 1)
        first, *_, last = rates = learning.follow(traffic(*POISONS), VERSIONS)
    assert largest_fall(rates) <= TOLERANCE
    assert last > first + RISE
    fault_result.lost = f"clean acceptance {first:.3f} before, {last:.3f} after {len(rates) - 1} versions"


@pytest.mark.fault(
    "3 of 10 records are false about the target, and a drafter starts with them",
    "it learns mostly true records; no version accepts much less of clean traffic than the version before",
    process="trainer: false records",
)
def test_drafter_learns_mostly_true_distributions(server, tmp_path, fault_result):
    """Requests cannot produce such records; without better data, three in ten have a proportional influence."""
    with Learning(server.url, tmp_path) as learning:
        first, *_, last = rates = learning.follow(traffic(absurd_distributions), VERSIONS)
    assert last > first + RISE
    assert largest_fall(rates) < 0.05
    fault_result.lost = f"clean acceptance {first:.3f} before, {last:.3f} after {len(rates) - 1} versions"


@pytest.mark.fault(
    "requests for random text, and for one text again and again, fill the table of recall",
    "recall keeps its size, and other requests keep their speed",
    process="replica: poisoned requests",
)
def test_recall_keeps_its_size_and_speed(service, eventually, fault_result):
    before, size = speed(service), service.metric("osd_recall_bytes")
    with ThreadPoolExecutor(REPLICAS) as pool:
        assert set(pool.map(partial(send_poison, service), range(REQUESTS))) == {200}
    limit = size / ENTRY_BYTES
    eventually(lambda: 0.9 * limit < service.metric("osd_recall_entries") <= limit)
    after = speed(service)
    print(f"tokens per second of clean requests: {before:.0f}, after the poison {after:.0f}")
    assert service.metric("osd_recall_bytes") == size
    assert after > MIN_SPEED * before
    fault_result.lost = "nothing"
    fault_result.errors = f"none; {after / before:.2f} of the tokens per second"


def send_poison(service: Service, number: int) -> int:
    """Send a request for random text, or in turn always the same one; return the status."""
    text = random_prompt(number) if number % 2 else "the same text"
    return service.complete(text, max_tokens=300, temperature=2 * (number % 2), seed=number).status_code


def random_prompt(number: int) -> str:
    """Return a random text."""
    return "".join(random.Random(number).choices(string.printable, k=200))  # noqa: S311


def speed(service: Service) -> float:
    """Return the highest tokens per second of clean requests, as other load only slows a request down."""
    rates = []
    for number in range(TURNS):
        began = time.monotonic()
        answer = service.complete(f"clean {number % 2}", max_tokens=TOKENS, ignore_eos=True)
        rates.append(answer.json()["usage"]["completion_tokens"] / (time.monotonic() - began))
    return max(rates)
