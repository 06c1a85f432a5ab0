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
from benchmarks.learning.recording import Asked, Recording, RecordingError, RecordingSetup, record
from osd import drafting
from osd.capture.trace import Array, Trace
from osd.cli.common import fail
from osd.cli.report import say
from osd.cli.signals import stop_signals
from osd.config import TRAINED_SETTINGS, DrafterSettings, Settings, drafter_of
from osd.drafting import with_required_head
from osd.drafting.trainable import Trainable
from osd.engine.policy import Policy
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.target.model import load_config, load_model
from osd.traffic import load
from osd.traffic.prompt import Prompt

KINDS = tuple(TRAINED_SETTINGS)
"""The drafters that learn."""


def check_kinds(asked: list[str] | None) -> list[str]:
    """Return the drafters to measure, all of them where none is named, or end the command."""
    for kind in asked or ():
        if kind not in KINDS:
            fail(f"--drafter must be one of {', '.join(KINDS)}, not {kind}")
    return asked or list(KINDS)


@contextmanager
def open_experiment(
    settings: Settings,
    file: Path,
    readers: Sequence[DrafterSettings],
    records: int,
    unseen: int,
    tokens: int,
    minutes: float,
) -> Generator[tuple[Experiment, Stream]]:
    """Set up an experiment with drafters of ``readers``, and record its stream."""
    if settings.trainer.samples != "teacher":
        fail(f"trainer.samples is {settings.trainer.samples}, and recorded text is the target's: set it to teacher")
    with stop_signals():
        with loading():
            prompts = load(str(file))
            experiment = Experiment.of(settings, Size(records, unseen, tokens, minutes=minutes), readers)
        stream = experiment.stream(file.stem, prompts)
        several_cores(settings.engine.threads)
        yield experiment, stream


@dataclass(frozen=True)
class Size:
    """How much text an experiment takes of each stream.

    ``records`` arrive one after the other, and ``unseen`` more are only measured on; each answer has at most
    ``tokens`` tokens and each prompt at most ``longest``, or what ``engine.context`` leaves. Recording what is
    missing may take ``minutes``.
    """

    records: int
    unseen: int
    tokens: int
    longest: int = 320
    minutes: float = 10.0


@dataclass(frozen=True)
class Stream:
    """Recorded text: what arrives, in order, and what is only measured on."""

    name: str
    arriving: list[Trace]
    unseen: list[Trace]


@dataclass(frozen=True)
class Experiment:
    """A target whose text is recorded, and the settings of everything that drafts and learns."""

    settings: Settings
    setup: RecordingSetup
    size: Size

    @classmethod
    def of(cls, settings: Settings, size: Size, readers: Sequence[DrafterSettings]) -> Experiment:
        """Set up an experiment with drafters of ``readers``, and of others that read no more than these.

        Raises:
            osd.target.load.TargetError: the target cannot be had.
            osd.drafting.DrafterError: it is too small to be tapped.
        """
        return cls(settings, RecordingSetup.of(settings, size.tokens, readers), size)

    def stream(self, name: str, prompts: Sequence[Prompt]) -> Stream:
        """Record a stream, as far as that was not done before.

        Raises:
            RecordingError: there are too few prompts, or the time did not suffice.
        """
        traces = self.recorded(name, self.asked(name, prompts, self.size.records + self.size.unseen))
        return Stream(name, traces[: self.size.records], traces[self.size.records :])

    def asked(self, name: str, prompts: Sequence[Prompt], wanted: int) -> list[Asked]:
        """The first ``wanted`` distinct prompts that are short enough.

        Raises:
            RecordingError: there are too few, or no prompt is short enough.
        """
        context, tokens = self.settings.engine.context, self.size.tokens
        if tokens + 2 > context:
            raise RecordingError(f"engine.context {context} has no room for a prompt beside --tokens {tokens}")
        room = min(self.size.longest, context - tokens)
        found = self.setup.asked(prompts, room)[:wanted]
        if len(found) < wanted:
            raise RecordingError(f"{name} has {len(found)} prompts of at most {room} tokens, not {wanted}")
        return found

    def recorded(self, name: str, asked: Sequence[Asked]) -> list[Trace]:
        """The text after each prompt, in order."""
        recording = Recording(self.settings.home_dir, name, self.setup.take)
        if {one.id for one in asked} - recording.ids():

            def tell(done: int, total: int) -> None:
                if done % 20 == 0 or done == total:
                    say(f"{name}: {done} of {total} records")

            left = record(self.setup, recording, asked, 60 * self.size.minutes, tell)
            if left:
                raise RecordingError(
                    f"{name}: {left} of {len(asked)} records are still to be made; the same command goes on from there"
                )
        found = recording.read(one.id for one in asked)
        return [found[one.id] for one in asked]

    def fresh(self, kind: str) -> Trainable:
        """A drafter that has learned nothing yet, the same one every time."""
        chosen = drafter_of(kind, self.settings.drafter)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter = drafting.initial(chosen, self.setup.directory, self.settings.home_dir)
        return drafting.trainable(with_required_head(drafter, self.settings.growth))

    def read_by(self, drafter: Trainable, stream: Stream) -> Stream:
        """The stream with those states alone that a drafter reads.

        Raises:
            RecordingError: they were not recorded.
        """
        return Stream(stream.name, self.states_for(drafter, stream.arriving), self.states_for(drafter, stream.unseen))

    def states_for(self, drafter: Trainable, traces: Sequence[Trace]) -> list[Trace]:
        """The records with those states alone that a drafter reads, or with all where it reads none.

        Raises:
            RecordingError: they were not recorded.
        """
        given, read = self.setup.take.taps, drafter.needs.taps
        if read in ((), given):
            return list(traces)
        if not set(read) <= set(given):
            raise RecordingError(
                f"this {drafter.kind} drafter reads layers {list(read)}, but only {list(given)} are recorded: "
                "record the stream with the settings of this drafter"
            )
        columns = [given.index(tap) for tap in read]
        return [
            msgspec.structs.replace(trace, hidden=trace.hidden and _columns(trace.hidden, len(given), columns))
            for trace in traces
        ]

    def offline_acceptance(self, drafter: Trainable, *streams: Stream) -> OfflineAcceptance:
        """Measures drafters like this one on these streams."""
        traces = [trace for stream in streams for trace in (*stream.arriving, *stream.unseen)]
        policy = Policy.of(self.settings.growth, self.settings.verification)
        context, target = longest(traces), None
        needs = drafter.needs
        if needs.layers or needs.riders:
            model = load_model(self.setup.directory, self.setup.take.dtype, "cpu")
            scratch = policy.growth.max_nodes + 1 + needs.riders
            target = SlotModel(
                model, slots=SLOTS, context=context, scratch=scratch, embeddings=SLOTS * needs.embeddings
            )
        return OfflineAcceptance(drafter, self.setup.tokenizer, policy, context, self.size.tokens, target)

    def recipe(self, passes: float, interval: int, seed: int) -> Recipe:
        """How drafters learn here."""
        vocabulary = load_config(self.setup.directory).vocab_size
        return Recipe(self.settings.trainer, self.settings.growth.lookahead, vocabulary, passes, interval, seed=seed)


def _columns(hidden: Array, taps: int, chosen: Sequence[int]) -> Array:
    """Of the states [n, taps * hidden] of a record those of the ``chosen`` taps."""
    values = hidden.numpy()
    parts = values.reshape(len(values), taps, -1)[:, chosen]
    return Array.of(parts.reshape(len(values), -1), hidden.dtype)
