"""Recorded streams, drafters and offline acceptance for experiments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.engines import loading
from benchmarks.learning.learner import Recipe
from benchmarks.learning.offline_acceptance import SLOTS, OfflineAcceptance, longest
from benchmarks.learning.recording import Recording, RecordingError, RecordingPrompt, RecordingSetup, record
from osd import drafting
from osd.capture.trace import Array, Trace
from osd.cli.common import RunError, fail
from osd.cli.report import say
from osd.cli.signals import stop_signals
from osd.config import TRAINED_SETTINGS, DrafterSettings, Settings, drafter_of
from osd.drafting import with_required_head
from osd.drafting.trainable import Trainable
from osd.engine.policy import Policy
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.target.context import context_of
from osd.target.model import load_config, load_model
from osd.traffic import load
from osd.traffic.prompt import Prompt

KINDS = tuple(TRAINED_SETTINGS)
"""Kinds of drafters that are trained."""


def check_kinds(names: list[str] | None) -> list[str]:
    """Return the kinds to measure, all trained kinds if none is named, or end the command."""
    for kind in names or ():
        if kind not in KINDS:
            fail(f"--drafter must be one of {', '.join(KINDS)}, not {kind}")
    return names or list(KINDS)


@contextmanager
def open_experiment(
    settings: Settings,
    file: Path,
    readers: Sequence[DrafterSettings],
    records: int,
    unseen: int,
    tokens: int,
    minutes: float,
) -> Generator[tuple[Experiment, RecordedStream]]:
    """Load prompts, and yield an experiment with its recorded stream; end the command if loading fails.

    The stream is the target's answers with hidden states. Recordings stay in the home directory, so only answers that
    no earlier run recorded are generated.

    Args:
        settings: settings of target, drafters and training; ``trainer.samples`` must be ``teacher``.
        file: JSON lines file of prompts, or a built-in source; its stem names the recording.
        readers: settings of drafters; the hidden states that these drafters read are recorded.
        records: number of records that arrive for training.
        unseen: number of further records, for measurement only.
        tokens: limit of each answer, in tokens.
        minutes: time limit for generating answers, in minutes.

    Raises:
        RecordingError: there are too few short prompts.
        RunError: the time limit was reached.
    """
    if settings.trainer.samples != "teacher":
        fail(f"trainer.samples is {settings.trainer.samples}: recorded text needs trainer.samples=teacher")
    with stop_signals():
        with loading():
            prompts = load(str(file))
            experiment = Experiment.of(settings, ExperimentSize(records, unseen, tokens, minutes=minutes), readers)
        stream = experiment.stream(file.stem, prompts)
        several_cores(settings.engine.threads)
        yield experiment, stream


@dataclass(frozen=True)
class ExperimentSize:
    """Amount of text of each stream."""

    records: int  # records that arrive one after another
    unseen: int  # further records for measurement only
    tokens: int  # limit of each answer
    longest: int = 320  # limit of each prompt; engine.context may limit it further
    minutes: float = 10.0  # time limit for recording missing text


@dataclass(frozen=True)
class RecordedStream:
    """Recorded text: arriving records in order, and records for measurement only."""

    name: str
    arriving: list[Trace]
    unseen: list[Trace]


@dataclass(frozen=True)
class Experiment:
    """Target with recorded text, and the settings of all drafters and training."""

    settings: Settings
    setup: RecordingSetup
    size: ExperimentSize

    @classmethod
    def of(cls, settings: Settings, size: ExperimentSize, readers: Sequence[DrafterSettings]) -> Experiment:
        """Set up an experiment with drafters of ``readers``, or with drafters that read no further layers.

        Raises:
            osd.target.files.TargetError: the target cannot be loaded.
            osd.drafting.DrafterError: the target has too few layers.
        """
        return cls(settings, RecordingSetup.of(settings, size.tokens, readers), size)

    def stream(self, name: str, prompts: Sequence[Prompt]) -> RecordedStream:
        """Return a stream; record the part that is missing.

        Raises:
            RecordingError: there are too few prompts.
            RunError: the time limit was reached.
        """
        traces = self.record(name, self.select_prompts(name, prompts, self.size.records + self.size.unseen))
        return RecordedStream(name, traces[: self.size.records], traces[self.size.records :])

    def select_prompts(self, name: str, prompts: Sequence[Prompt], count: int) -> list[RecordingPrompt]:
        """Return the first ``count`` distinct prompts that are short enough.

        Raises:
            RecordingError: there are too few prompts, or ``engine.context`` is too small.
        """
        context, tokens = context_of(self.settings, self.setup.directory), self.size.tokens
        if tokens + 2 > context:
            raise RecordingError(f"engine.context {context} leaves no room for a prompt with --tokens {tokens}")
        room = min(self.size.longest, context - tokens)
        selected = self.setup.encode_prompts(prompts, room)[:count]
        if len(selected) < count:
            raise RecordingError(f"{name} has {len(selected)} prompts of at most {room} tokens, not {count}")
        return selected

    def record(self, name: str, prompts: Sequence[RecordingPrompt]) -> list[Trace]:
        """Return the recorded text after each prompt, in order; record the part that is missing.

        Raises:
            RunError: the time limit was reached.
        """
        store = Recording(self.settings.home_dir, name, self.setup.spec)
        if {prompt.id for prompt in prompts} - store.ids():

            def report(done: int, total: int) -> None:
                if done % 20 == 0 or done == total:
                    say(f"{name}: {done} of {total} records")

            missing = record(self.setup, store, prompts, 60 * self.size.minutes, report)
            if missing:
                raise RunError(
                    f"{name}: {missing} of {len(prompts)} records are missing; run the same command again to continue"
                )
        traces = store.read(prompt.id for prompt in prompts)
        return [traces[prompt.id] for prompt in prompts]

    def new_drafter(self, kind: str) -> Trainable:
        """Return an untrained drafter with the same weights each time."""
        chosen = drafter_of(kind, self.settings.drafter)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter = drafting.initial(chosen, self.setup.directory, self.settings.cache_dir)
        return drafting.trainable(with_required_head(drafter, self.settings.growth))

    def stream_for(self, drafter: Trainable, stream: RecordedStream) -> RecordedStream:
        """Return the stream with only the hidden states that a drafter reads.

        Raises:
            RecordingError: these states were not recorded.
        """
        return RecordedStream(
            stream.name, self.states_for(drafter, stream.arriving), self.states_for(drafter, stream.unseen)
        )

    def states_for(self, drafter: Trainable, traces: Sequence[Trace]) -> list[Trace]:
        """Return the records with only the hidden states that a drafter reads; unchanged if it reads none.

        Raises:
            RecordingError: these states were not recorded.
        """
        recorded, read = self.setup.spec.taps, drafter.needs.taps
        if read in ((), recorded):
            return list(traces)
        if not set(read) <= set(recorded):
            raise RecordingError(
                f"this {drafter.kind} drafter reads layers {list(read)}, but only {list(recorded)} are recorded: "
                "record the stream with the settings of this drafter"
            )
        columns = [recorded.index(tap) for tap in read]
        return [
            msgspec.structs.replace(trace, hidden=trace.hidden and _columns(trace.hidden, len(recorded), columns))
            for trace in traces
        ]

    def offline_acceptance(self, drafter: Trainable, *streams: RecordedStream) -> OfflineAcceptance:
        """Return a measurement of drafters like this one on these streams."""
        traces = [trace for stream in streams for trace in (*stream.arriving, *stream.unseen)]
        policy = Policy.of(self.settings.growth, self.settings.verification)
        context, target = longest(traces), None
        needs = drafter.needs
        if needs.layers or needs.riders:
            model = load_model(self.setup.directory, self.setup.spec.dtype, "cpu")
            scratch = policy.growth.max_nodes + 1 + needs.riders
            target = SlotModel(
                model, slots=SLOTS, context=context, scratch=scratch, embeddings=SLOTS * needs.embeddings
            )
        return OfflineAcceptance(drafter, self.setup.tokenizer, policy, context, self.size.tokens, target)

    def recipe(self, passes: float, interval: int, seed: int) -> Recipe:
        """Return the recipe with the experiment's trainer settings, draft depth and vocabulary."""
        vocabulary = load_config(self.setup.directory).vocab_size
        return Recipe(self.settings.trainer, self.settings.growth.lookahead, vocabulary, passes, interval, seed=seed)


def _columns(hidden: Array, taps: int, chosen: Sequence[int]) -> Array:
    """Return the states of the ``chosen`` taps from the states [n, taps * hidden] of a record."""
    values = hidden.numpy()
    parts = values.reshape(len(values), taps, -1)[:, chosen]
    return Array.of(parts.reshape(len(values), -1), hidden.dtype)
