"""Targets, drafters and engines for measurements."""

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
"""Tokens per sequence in measurements that choose the context themselves."""

DRAFTS = ("skip_layers", *TRAINED_SETTINGS, "registry")
"""Names of the drafters for ``--draft``.

``skip_layers`` is the target without some middle layers, which often agrees with the target untrained (Zhang et al.,
"Draft & Verify", ACL 2024). A trained kind means an untrained drafter. ``registry`` is the newest version of the
domain."""

RECALLING = ("recall", "mixed")
"""Drafters with a memory, which need an engine: recall, and recall mixed with an untrained ``eagle``."""

_SKIPPED = (0.4, 0.54)  # layers that skip_layers leaves out, as shares of the depth


class BenchError(CommandError):
    """Error of a measurement that its options, prompts or settings do not allow; the message is one line."""


def check_draft(draft: str, recalling: bool = False) -> None:
    """End the command if ``draft`` is not in ``DRAFTS``, or with ``recalling`` not in ``RECALLING`` either."""
    choice = (*DRAFTS, *RECALLING) if recalling else DRAFTS
    if draft not in choice:
        fail(f"--draft must be one of {', '.join(choice)}, not {draft}")


def check_slots(settings: Settings, streams: int) -> None:
    """End the command if the engine has fewer slots than ``streams``."""
    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")


@contextmanager
def loading() -> Generator[None]:
    """Load models and prompts on one core without progress bars, and end the command if loading fails."""
    one_core()  # loading starts its own threads
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


def encode_short(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Prompt], longest: int, source: str, count: int = 1
) -> list[tuple[int, ...]]:
    """Return the ids of prompts of at most ``longest`` tokens, or end the command if there are fewer than ``count``."""
    encoded = encode(tokenizer, texts, longest)
    if len(encoded) < count:
        fail(f"--prompts: {source} has {len(encoded)} prompts of at most {longest} tokens, not {count}")
    return encoded


@dataclass(frozen=True)
class ModelPair:
    """Target with free slots, a drafter's session with as many slots, and their tokenizer."""

    target: SlotModel
    session: AutoregressiveSession
    tokenizer: PreTrainedTokenizerBase
    draft: str


def load_pair(settings: Settings, draft: str, *, slots: int, context: int, nodes: int) -> ModelPair:
    """Load the configured target, and a drafter from ``DRAFTS``, for ``slots`` sequences of ``context`` tokens.

    Drafts have at most ``nodes`` nodes.

    Raises:
        BenchError: the drafter does not exist, or works only inside an engine.
        osd.target.files.TargetError: the target cannot be loaded.
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
    return ModelPair(target, session, load_tokenizer(directory), name)


def check_alone(drafter: Drafter) -> None:
    """Check that a drafter can be timed without an engine.

    Raises:
        BenchError: the drafter adds rows to the target's forward.
    """
    if drafter.needs.riders:
        raise BenchError(f"--draft {drafter.kind} adds rows to the target's forward and has no call of its own to time")


def without_prefix_cache(settings: Settings) -> Settings:
    """Return the settings without the prefix cache, so that a repeated prompt is read again."""
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"prefix_cache": False})})


def engine_with(settings: Settings, directory: Path, drafter: Drafter) -> Engine:
    """Return a replica's engine on the target in ``directory``, without trials and not started."""
    from osd.engine.build import InitialDrafter, make_engine

    settings = settings.model_copy(update={"economy": EconomySettings(measure=0)})
    return make_engine(settings, directory, load_tokenizer(directory), InitialDrafter(drafter, 1), None)


def plain_engine(settings: Settings) -> tuple[Engine, Path]:
    """Return an engine without a drafter, not started, and the directory of its target.

    Raises:
        osd.target.files.TargetError: the target cannot be loaded.
    """
    from osd.engine.build import make_engine

    directory = target_directory(settings)
    return make_engine(settings, directory, load_tokenizer(directory), None, None), directory


def find_drafter(settings: Settings, draft: str, directory: Path) -> tuple[Drafter, str]:
    """Return the drafter called ``draft`` in ``DRAFTS`` or ``RECALLING``, and its description.

    Raises:
        BenchError: the drafter does not exist or cannot be loaded.
    """
    if draft == "recall":
        return Recall(), draft
    if draft == "mixed":
        trained, name = find_drafter(settings, "eagle", directory)
        return Mixed(trained), f"recall with {name}"
    if draft == "registry":
        registry = Registry(storage_of(settings))
        numbers = [info.number for info in registry.list(settings.domain) if not info.problem]
        if not numbers:
            raise BenchError(
                f"domain {settings.domain} has no drafter version in {settings.registry.url or settings.registry_dir}"
            )
        try:
            version = registry.load(settings.domain, numbers[-1])
            drafter = drafting.from_config(version.config, directory)
            drafter.load_weights(version.weights)
        except (VersionError, drafting.DrafterError) as error:
            raise BenchError(f"version {numbers[-1]} of {settings.domain} cannot be loaded: {error}") from None
        return drafter, f"{settings.domain} version {numbers[-1]}"
    if draft == "skip_layers":
        return _skip_layers(directory)
    if draft not in DRAFTS:
        raise BenchError(f"--draft must be one of {', '.join(DRAFTS)}, not {draft}")
    chosen = drafter_of(draft, settings.drafter)
    try:
        drafter = drafting.initial(chosen, directory, settings.cache_dir)
    except drafting.DrafterError as error:
        raise BenchError(str(error)) from None
    description = chosen.source or f"first {chosen.layers} layers" if chosen.kind == "language_model" else "untrained"
    return drafter, f"{draft}, {description}"


def _skip_layers(directory: Path) -> tuple[Drafter, str]:
    target = load_model(directory, "float32", "cpu")
    layers = decoder_layers(target)
    start, end = (round(share * len(layers)) for share in _SKIPPED)
    end = min(max(end, start + 1), len(layers) - 1)
    kept_layers = [layer for index, layer in enumerate(layers) if not start <= index < end]
    drafter = LanguageModel.first_layers(target, len(kept_layers))
    for copy, layer in zip(decoder_layers(drafter.model), kept_layers, strict=True):
        copy.load_state_dict(layer.state_dict())
    return drafter, f"the target without layers {start} to {end - 1}"


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], longest: int) -> list[tuple[int, ...]]:
    """Return the ids of each prompt's first turn as the service encodes it; drop prompts above ``longest`` tokens."""
    encoded = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt.opening(), add_generation_prompt=True, return_dict=False)
        if 2 <= len(ids) <= longest:
            encoded.append(tuple(ids))
    return encoded


def autoregressive(session: Session) -> AutoregressiveSession:
    """Check that a session can expand single nodes, and return it.

    Raises:
        DrafterError: the drafter proposes whole drafts only.
    """
    if not isinstance(session, AutoregressiveSession):
        raise drafting.DrafterError("this drafter proposes whole drafts only and cannot expand single nodes")
    return session
