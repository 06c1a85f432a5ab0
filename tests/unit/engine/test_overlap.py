"""Accounting for a step while the device works on the next one: order, results, and idle time of the device."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from osd.capture.trace import Trace
from osd.config import ChainSettings
from osd.drafting import serving_taps
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import CommittedTokens
from osd.engine import loop
from osd.engine.completion import ControllerOptions
from osd.engine.constraint import GrammarConstraint
from osd.engine.engine import Engine
from osd.engine.grammar import GrammarCompiler, GrammarError
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import skip_unless_cpu
from tests.tiny import VOCABULARY, tokenizer
from tests.unit.engine.harness import GREEDY, Result, make_drafter, prompts, settings, weights_of, with_noise
from tests.unit.engine.test_completion import judging_drafter

pytestmark = skip_unless_cpu("without overlap an engine is on a CPU")

KINDS = ["none", "recall", "eagle", "early_exit"]


def seen_of(answer: Result) -> tuple[Any, ...]:
    """Return what the client sees of an answer, except the times."""
    logprobs = [(place.token, round(place.logprob, 3)) for place in answer.logprobs]
    accepted = answer.counts and answer.counts.accepted
    return answer.tokens, answer.text, answer.finish, logprobs, answer.sources, accepted


class WaitingModel(SlotModel):
    """Target on the path of a GPU that lets the caller wait."""

    @property
    def is_asynchronous(self) -> bool:
        return False


class Stepped:
    """Engine whose steps the test runs itself, with the overlap of a GPU or without it."""

    def __init__(self, directory: Path, kind: str, overlap: bool, traces: list[Trace] | None = None) -> None:
        chosen = settings(directory, slots=3, growth=ChainSettings(depth=3, governed=False), enabled=traces is not None)
        drafter = {"recall": Recall, "early_exit": lambda: judging_drafter(directory, 0.0)}.get(
            kind, lambda: make_drafter(kind, directory)
        )()
        model, taps = load_model(directory, "float32", "cpu"), ()
        self.committed: dict[int, list[int]] = defaultdict(list)  # tokens by slot, of all its requests
        if drafter is not None:
            make, taps = drafter.session, serving_taps(drafter, len(decoder_layers(model)))
            drafter.session = lambda runtime: self._recorded(make(replace(runtime, bucketed=True)))  # type: ignore[method-assign]
        self.target = (SlotModel if overlap else WaitingModel)(
            model, slots=3, context=128, scratch=chosen.engine.max_draft + 1, taps=taps, bucketed=True
        )
        self.engine = Engine(self.target, tokenizer(), chosen, drafter, 1, None if traces is None else traces.append)
        self.answers: dict[str, Result] = {}

    def _recorded(self, session: Any) -> Any:
        commit = session.commit

        def recorded(slot: int, kept: CommittedTokens) -> None:
            self.committed[slot] += kept.tokens
            commit(slot, kept)

        session.commit = recorded
        return session

    def submit(self, request: Request, seen: Callable[[Update], None] = lambda update: None) -> None:
        answer = self.answers[request.id] = Result()
        self.engine.submit(request, lambda update: (answer.add(update), seen(update)))  # type: ignore[arg-type]

    def run(self, before: Callable[[int], bool] = lambda step: False) -> None:
        """Run steps to the end of all requests; ``before`` acts before each and returns whether more requests come."""
        step = 0
        while before(step) or self.engine.loop.scheduler.sequences():
            self.engine.loop.step()
            step += 1
            assert step < 5000


def events(target_dir: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> list[str]:
    """Return the order of launches and accounts of three requests of different lengths."""
    order: list[str] = []
    for name in ("launch", "account"):
        work = getattr(loop, name)
        monkeypatch.setattr(loop, name, lambda *args, name=name, work=work: (order.append(name), work(*args))[1])
    stepped = Stepped(target_dir, "eagle", overlap)
    for number, prompt in enumerate(prompts([5, 9, 7])):
        stepped.submit(Request(str(number), tuple(prompt), 6 + 3 * number, GREEDY, ignore_eos=True))
    stepped.run()
    assert {answer.finish for answer in stepped.answers.values()} == {"length"}
    return order


def test_device_has_the_next_step_before_accounts(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = events(target_dir, monkeypatch, overlap=True)
    steps = order.count("launch")
    assert steps > 5
    assert order == ["launch", *["launch", "account"] * (steps - 1), "account"]


def test_forward_of_a_cpu_does_not_delay_accounts(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = events(target_dir, monkeypatch, overlap=False)
    assert order == ["launch", "account"] * order.count("launch")


class Clock:
    """Virtual time of a host and its device; only reports and forwards take time."""

    def __init__(self, forward: float) -> None:
        self.now = self.device = self.idle = 0.0
        self._forward = forward

    def launch(self) -> None:
        self.idle += max(self.now - self.device, 0.0)
        self.device = max(self.now, self.device) + self._forward

    def read(self) -> None:
        self.now = max(self.now, self.device)


@pytest.mark.parametrize("forward", [0.0018, 0.0068])
def test_device_does_not_idle_during_reports(target_dir: Path, monkeypatch: pytest.MonkeyPatch, forward: float) -> None:
    """Three clients take 0.5 ms each to get their tokens, as much as the shorter forward together."""
    clock = Clock(forward)
    launch, read = loop.launch, loop.read
    monkeypatch.setattr(loop, "launch", lambda *args: (clock.launch(), launch(*args))[1])
    monkeypatch.setattr(loop, "read", lambda *args: (clock.read(), read(*args))[1])

    def report(update: Update) -> None:
        clock.now += 0.0005

    stepped = Stepped(target_dir, "none", overlap=True)
    for number, prompt in enumerate(prompts([5, 9, 7])):
        stepped.submit(Request(str(number), tuple(prompt), 60, GREEDY, ignore_eos=True), report)
    stepped.run()
    assert clock.device > 0
    assert clock.idle < 0.05 * clock.device


def test_finished_request_survives_a_failed_launch(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(target_dir, "none", overlap=True)
    short, long = prompts([5, 6])
    stepped.submit(Request("short", tuple(short), 4, GREEDY, ignore_eos=True))
    stepped.submit(Request("long", tuple(long), 40, GREEDY, ignore_eos=True))
    launch, launches = loop.launch, []

    def fails_after_the_short_one(*args: Any) -> Any:
        launches.append(args[0])
        if not any(entry.sequence.request.id == "short" for entry in args[0].plan.sequences):
            raise MemoryError("no memory")
        return launch(*args)

    monkeypatch.setattr(loop, "launch", fails_after_the_short_one)
    stepped.run()
    assert stepped.answers["short"].finish == "length"
    assert len(stepped.answers["short"].tokens) == 4
    assert stepped.answers["long"].finish == "error"
    assert stepped.engine.counters().failed == 1


def test_step_is_counted_if_its_only_request_fails(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(target_dir, "none", overlap=True)
    (prompt,) = prompts([40])  # three chunks
    stepped.submit(Request("r", tuple(prompt), 4, GREEDY))
    scheduler, caught_up = stepped.engine.loop.scheduler, list[int]()

    def fails_after_a_chunk(s: Any) -> None:
        caught_up.append(s.fed)
        if s.fed:
            raise MemoryError("no memory")

    monkeypatch.setattr(scheduler, "catch_up", fails_after_a_chunk)
    stepped.run()
    assert caught_up == [0, 16]
    assert stepped.answers["r"].finish == "error"
    assert stepped.engine.counters().forwards == 1


@pytest.mark.parametrize("kind", ["none", "recall", "eagle"])
def test_tokens_after_a_late_stop_string_leave_no_mark(target_dir: Path, kind: str) -> None:
    (prompt,) = prompts([12])
    template = Request("free", tuple(prompt), 40, GREEDY, ignore_eos=True, capture=True, logprobs=1, sources=True)
    free = Stepped(target_dir, kind, overlap=False)
    free.submit(template)
    free.run()
    text = free.answers["free"].text
    seen: list[tuple[Any, ...]] = []
    for overlap in (False, True):
        traces: list[Trace] = []
        stepped = Stepped(target_dir, kind, overlap, traces)
        for turn in range(6):  # the last tokens of the text have different places in their drafts
            stepped.submit(replace(template, id=f"{turn}", stop=(text[9 + turn : 11 + turn],)))
            stepped.run()
        counters = stepped.engine.counters()
        tokens = [trace.completion_ids.numpy().tolist() for trace in traces]
        assert tokens == [answer.tokens for answer in stepped.answers.values()]
        assert {answer.finish for answer in stepped.answers.values()} == {"stop"}
        assert counters.completion_tokens == sum(map(len, tokens)) < 6 * 40
        answers = {name: seen_of(answer) for name, answer in stepped.answers.items()}
        seen.append((answers, tokens, dict(stepped.committed), counters.speculation()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_string_ends_a_text_before_its_grammar_fails(target_dir: Path, monkeypatch, overlap: bool):
    with closing(GrammarCompiler(tokenizer(), VOCABULARY, [257])) as grammars:
        grammar = grammars.compile("regex", "[a-z]{30}")
        request = Request("free", (1, 2, 3), 40, GREEDY, grammar=grammar)
        stepped = Stepped(target_dir, "none", overlap)
        stepped.submit(request)
        stepped.run()
        text = stepped.answers["free"].text
        stop = next(text[end - 3 : end] for end in range(6, 30) if text.index(text[end - 3 : end]) == end - 3)
        read, advance = list[int](), GrammarConstraint.advance

        def fails_at_the_stop_string(self: GrammarConstraint, token: int) -> None:
            read.append(token)
            if len(read) == text.index(stop) + 3:
                raise GrammarError("became too complex")
            advance(self, token)

        monkeypatch.setattr(GrammarConstraint, "advance", fails_at_the_stop_string)
        stepped.submit(replace(request, id="stopped", stop=(stop,)))
        stepped.run()
    assert stepped.answers["stopped"].finish == "stop"
    assert stepped.answers["stopped"].text == text[: text.index(stop)]


@pytest.mark.parametrize("kind", ["none", "recall"])
def test_tokens_before_a_cancellation_are_sent(target_dir: Path, kind: str) -> None:
    (prompt,) = prompts([12])
    answers = []
    for overlap in (False, True):
        stepped = Stepped(target_dir, kind, overlap)
        stepped.submit(Request("r", tuple(prompt), 60, GREEDY, ignore_eos=True))
        stepped.run(lambda step: stepped.engine.cancel("r") is not None if step == 7 else False)  # noqa: B023
        answers.append(stepped.answers["r"])
        assert answers[-1].finish == "cancelled"
        assert stepped.engine.counters().cancelled == 1
    assert seen_of(answers[0]) == seen_of(answers[1])
    assert len(answers[0].tokens) >= 6


@dataclass(frozen=True)
class Arrival:
    """Request, the step before which it arrives, and the steps until its client disconnects; -1 if it does not."""

    request: Request
    step: int
    patience: int = -1


def free_requests(count: int, seed: int, grammars: GrammarCompiler, kind: str) -> list[Request]:
    """Return random requests without stop strings, some of them several answers to one prompt.

    With drafts, sampled requests are repeatable, because recall's drafts depend on the requests that run together.
    Improbable tokens are not drawn: those requests also change the rounding of a forward, by which such draws differ.
    """
    chance, requests = random.Random(seed), list[Request]()  # noqa: S311 - not a secret
    grammar = grammars.compile("regex", r"([^=]{3}==={3}){4}")
    while len(requests) < count:
        (prompt,) = prompts([chance.choice([1, 5, 12, 40])], seed=chance.randrange(8))
        number, answers = len(requests), chance.choice([1, 1, 1, 3])
        temperature = chance.choice([0.0, 1.0])
        sampling = SamplingParams(
            temperature, min_p=0.02, seed=number, repeatable=kind != "none" or chance.random() < 0.5,
            **chance.choice([{}, {}, {"frequency_penalty": 0.4}, {"repetition_penalty": 1.2}, {"top_p": 0.9}]),
        )  # fmt: skip
        template = Request(
            "", tuple(prompt), chance.choice([1, 3, 20, 40]), sampling, min_tokens=chance.choice([0, 0, 6]),
            ignore_eos=chance.random() < 0.5, capture=chance.random() < 0.7, client=chance.choice("ab"),
            logprobs=chance.choice([None, None, 2]), priority=chance.choice([0, 0, 0, -1]),
        )  # fmt: skip
        if chance.random() < 0.2 and not answers > 1:
            template = replace(template, grammar=grammar, min_tokens=0, ignore_eos=False)
        elif kind == "early_exit":
            options = [None, ControllerOptions(0.4), ControllerOptions(0.7), ControllerOptions(0.5, 0.3, lossy=True)]
            template = replace(template, controller=chance.choice(options))
        requests += [
            replace(template, id=f"{number}-{n}", sampling=replace(sampling, seed=number + n)) for n in range(answers)
        ]
    return requests[:count]


def with_stops(requests: Sequence[Request], texts: dict[str, str], seed: int) -> list[Arrival]:
    """Return arrivals of the requests, many with a stop string of their own text, some with a client that leaves."""
    chance, arrivals, step = random.Random(seed), list[Arrival](), 0  # noqa: S311 - not a secret
    for request in requests:
        text, stopped = texts[request.id], request
        if text and chance.random() < 0.6:
            place = chance.randrange(len(text))
            stopped = replace(request, stop=(text[place : place + chance.choice([1, 2, 3])], "never in a text"))
        step += chance.choice([0, 1, 4])
        arrivals.append(Arrival(stopped, step, chance.choice([-1, -1, -1, -1, 2, 9])))
    return arrivals


def answered(directory: Path, kind: str, overlap: bool, arrivals: Sequence[Arrival]) -> tuple[Stepped, list[Trace]]:
    """Return the engine that has answered all requests, with swaps between their steps, and its traces."""
    traces: list[Trace] = []
    stepped, waiting = Stepped(directory, kind, overlap, traces), list(arrivals)
    leaving: dict[int, list[str]] = defaultdict(list)

    def before(step: int) -> bool:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            stepped.submit(arrival.request)
            if arrival.patience >= 0:
                leaving[step + arrival.patience].append(arrival.request.id)
        for name in leaving.pop(step, []):
            stepped.engine.cancel(name)
        if kind == "eagle" and step % 20 == 19:
            version = 2 + step // 20
            stepped.engine.stage(version, with_noise(weights_of("eagle", directory), 0.05, seed=version))
        return bool(waiting)

    stepped.run(before)
    return stepped, traces


def check_equality(directory: Path, kind: str, count: int, seed: int) -> Counter[str]:
    """Check that each answer is the same with and without overlap, and a beginning of it if its client left.

    Returns the numbers of ends by reason, of preemptions and of swaps.
    """
    first = kind if kind == "early_exit" else "none"
    with closing(GrammarCompiler(tokenizer(), VOCABULARY, [257])) as grammars:
        requests = free_requests(count, seed, grammars, kind)
        free, _ = answered(directory, first, False, [Arrival(request, 0) for request in requests])
        arrivals = with_stops(requests, {name: answer.text for name, answer in free.answers.items()}, seed)
        (plain, plain_traces), (overlapped, traces) = (
            answered(directory, kind, overlap, arrivals) for overlap in (False, True)
        )
    counters = overlapped.engine.counters()
    seen = Counter({"preemptions": counters.preemptions, "swaps": counters.swaps, "failed": counters.failed})
    for arrival in arrivals:
        name = arrival.request.id
        expected, answer = plain.answers[name], overlapped.answers[name]
        seen[str(answer.finish)] += 1
        if arrival.patience < 0:
            exact = [(each.tokens, each.text, each.finish) for each in (expected, answer)]
            assert exact[0] == exact[1], arrival
            logprobs = [[place.logprob for place in each.logprobs] for each in (expected, answer)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=2e-3), arrival  # they depend on rounding
        else:
            length = min(len(expected.tokens), len(answer.tokens))
            assert expected.tokens[:length] == answer.tokens[:length], arrival
    for engine, records in ((plain, plain_traces), (overlapped, traces)):
        recorded: dict[str, list[int]] = defaultdict(list)
        for trace in records:
            recorded[trace.request_id] += trace.completion_ids.numpy().tolist()
        assert len(recorded) > count / 6
        for name, tokens in recorded.items():
            assert tokens == engine.answers[name].tokens
    return seen


def check_coverage(seen: Counter[str], kind: str) -> None:
    """Check that the requests ended in every way, and met preemptions and swaps."""
    assert seen["failed"] == 0
    assert min(seen[way] for way in ("stop", "length", "cancelled", "preemptions")) > 0
    assert seen["swaps"] > 0 or kind != "eagle"


@pytest.mark.parametrize("kind", KINDS)
def test_overlap_does_not_change_answers(target_dir: Path, kind: str) -> None:
    check_coverage(check_equality(target_dir, kind, count=36, seed=3), kind)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_overlap_does_not_change_many_answers(target_dir: Path, kind: str) -> None:
    counts = [check_equality(target_dir, kind, count=48, seed=100 + seed) for seed in range(11)]
    check_coverage(sum(counts, Counter[str]()), kind)
