"""Targets, drafters and engines that are measured."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from osd import drafting
from osd.cli.common import CommandError, fail
from osd.cli.signals import stop_signals
from osd.config import TRAINED_SETTINGS, EconomySettings, Settings, drafter_of
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Drafter
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Runtime, Session
from osd.engine.engine import Engine
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry, VersionError
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.device import one_core
from osd.runtime.model import SlotModel
from osd.target.files import TargetError
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic.prompt import Prompt, TrafficError

CONTEXT = 512
"""Tokens of a sequence where a measurement chooses them itself."""

DRAFTS = ("skip_layers", *TRAINED_SETTINGS, "registry")
"""Drafters by name: the target without some middle layers, which is often right untrained (Zhang et al., "Draft &
Verify", ACL 2024); a fresh drafter of a kind; or the newest version of the configured domain."""

RECALLING = ("recall", "mixed")
"""Drafters with a memory, which only an engine has: recall, and recall with a fresh ``eagle``."""

_SKIPPED = (0.4, 0.54)  # which layers skip_layers leaves out, as shares of the depth


class BenchError(CommandError):
    """A measurement cannot be made; the message is one line that says why."""


def check_draft(draft: str, recalling: bool = False) -> None:
    """End the command when ``draft`` is none of ``DRAFTS``, or with ``recalling`` of ``RECALLING``."""
    choice = (*DRAFTS, *RECALLING) if recalling else DRAFTS
    if draft not in choice:
        fail(f"--draft must be one of {', '.join(choice)}, not {draft}")


def check_slots(settings: Settings, streams: int) -> None:
    """End the command when the engine has fewer slots than streams."""
    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")


@contextmanager
def loading() -> Generator[None]:
    """Load models and prompts on one core, without progress bars; what cannot be loaded ends the command."""
    one_core()  # loading makes threads of its own
    logging.disable_progress_bar()
    try:
        yield
    except (TargetError, TrafficError, drafting.DrafterError, VersionError) as error:
        fail(error)


@contextmanager
def running(engine: Engine) -> Generator[None]:
    """Run an engine inside the context."""
    with stop_signals():
        engine.start()
        try:
            yield
        finally:
            engine.stop()


def short_enough(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Prompt], longest: int, source: str, count: int = 1
) -> list[tuple[int, ...]]:
    """Return the token ids of prompts of at most ``longest`` tokens, or end the command when fewer than ``count``."""
    asked = encode(tokenizer, texts, longest)
    if len(asked) < count:
        fail(f"--prompts: {source} has {len(asked)} prompts of at most {longest} tokens, not {count}")
    return asked


@dataclass(frozen=True)
class Pair:
    """A target with free slots, a drafter's session over as many, and the tokenizer of both."""

    target: SlotModel
    session: AutoregressiveSession
    tokenizer: PreTrainedTokenizerBase
    draft: str


def load_pair(settings: Settings, draft: str, *, slots: int, context: int, nodes: int) -> Pair:
    """Load the configured target and a drafter.

    Args:
        settings: ``target``, ``drafter``, ``domain`` and ``home`` are read.
        draft: one of ``DRAFTS``.
        slots: sequences at the same time.
        context: tokens of one sequence.
        nodes: of the largest draft.

    Raises:
        BenchError: there is no such drafter, or it drafts in an engine alone.
        osd.target.load.TargetError: the target cannot be had.
    """
    directory = target_directory(settings)
    drafter, name = find_drafter(settings, draft, directory)
    check_alone(drafter)
    target = SlotModel(
        load_model(directory, settings.target.dtype, settings.target.device),
        weights=settings.target.weights,
        slots=slots,
        context=context,
        scratch=nodes + 1,
        taps=drafter.needs.taps,
    )
    session = autoregressive(drafter.session(Runtime(slots, context, nodes + 1, target.device, target=target)))
    return Pair(target, session, load_tokenizer(directory), name)


def check_alone(drafter: Drafter) -> None:
    """Check that a drafter's calls can be timed without an engine.

    Raises:
        BenchError: it rides in the forward of a round.
    """
    if drafter.needs.riders:
        raise BenchError(f"--draft {drafter.kind} rides in the target's forward: it has no call that could be timed")


def reading_anew(settings: Settings) -> Settings:
    """The same without the prefix cache: turns send the same prompts again, and each of them is to be read."""
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"prefix_cache": False})})


def engine_with(settings: Settings, directory: Path, drafter: Drafter) -> Engine:
    """An engine as a replica has it, but without trials, not started, on the target in ``directory``."""
    from osd.engine.build import InitialDrafter, make_engine

    settings = settings.model_copy(update={"economy": EconomySettings(measure=0)})
    return make_engine(settings, directory, load_tokenizer(directory), InitialDrafter(drafter, 1), None)


def plain_engine(settings: Settings) -> tuple[Engine, Path]:
    """An engine without a drafter, not started, and the directory of its target.

    Raises:
        osd.target.load.TargetError: the target cannot be had.
    """
    from osd.engine.build import make_engine

    directory = target_directory(settings)
    return make_engine(settings, directory, load_tokenizer(directory), None, None), directory


def find_drafter(settings: Settings, draft: str, directory: Path) -> tuple[Drafter, str]:
    """The drafter that one of ``DRAFTS`` or ``RECALLING`` means, and what to call it.

    Raises:
        BenchError: there is none.
    """
    if draft == "recall":
        return Recall(), draft
    if draft == "mixed":
        beside, name = find_drafter(settings, "eagle", directory)
        return Mixed(beside), f"recall with {name}"
    if draft == "registry":
        registry = Registry(storage_of(settings))
        whole = [info.number for info in registry.list(settings.domain) if not info.problem]
        if not whole:
            raise BenchError(
                f"domain {settings.domain} has no drafter version in {settings.registry.url or settings.registry_dir}"
            )
        try:
            version = registry.load(settings.domain, whole[-1])
            drafter = drafting.from_config(version.config, directory)
            drafter.load_weights(version.weights)
        except (VersionError, drafting.DrafterError) as error:
            raise BenchError(f"version {whole[-1]} of {settings.domain} cannot draft: {error}") from None
        return drafter, f"{settings.domain} version {whole[-1]}"
    if draft == "skip_layers":
        return _skipping(directory)
    if draft not in DRAFTS:
        raise BenchError(f"--draft must be one of {', '.join(DRAFTS)}, not {draft}")
    chosen = drafter_of(draft, settings.drafter)
    try:
        drafter = drafting.initial(chosen, directory, settings.home_dir)
    except drafting.DrafterError as error:
        raise BenchError(str(error)) from None
    what = chosen.source or f"first {chosen.layers} layers" if chosen.kind == "language_model" else "untrained"
    return drafter, f"{draft}, {what}"


def _skipping(directory: Path) -> tuple[Drafter, str]:
    target = load_model(directory, "float32", "cpu")
    theirs = decoder_layers(target)
    start, end = (round(share * len(theirs)) for share in _SKIPPED)
    end = min(max(end, start + 1), len(theirs) - 1)
    kept = [layer for index, layer in enumerate(theirs) if not start <= index < end]
    drafter = LanguageModel.first_layers(target, len(kept))
    for mine, layer in zip(decoder_layers(drafter.model), kept, strict=True):
        mine.load_state_dict(layer.state_dict())
    return drafter, f"the target without layers {start} to {end - 1}"


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], longest: int) -> list[tuple[int, ...]]:
    """Token ids of the first turn of each prompt that has at most ``longest`` tokens, as the service makes them."""
    encoded = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt.opening(), add_generation_prompt=True, return_dict=False)
        if 2 <= len(ids) <= longest:
            encoded.append(tuple(ids))
    return encoded


def autoregressive(session: Session) -> AutoregressiveSession:
    """Check that a session can be expanded node by node, and return it.

    Raises:
        DrafterError: It proposes whole drafts only.
    """
    if not isinstance(session, AutoregressiveSession):
        raise drafting.DrafterError("this drafter proposes whole drafts and cannot be asked node by node")
    return session
