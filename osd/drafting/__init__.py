"""Drafters by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from osd.config import DrafterSettings, GrowthSettings, Settings
from osd.drafting.acceptance_head import has_head, without_head
from osd.drafting.base import Drafter, DrafterError
from osd.drafting.dspark.drafter import DSpark
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.early_exit import EarlyExit
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.growth import make_growth
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.medusa import Medusa
from osd.drafting.mixed import Mixed
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.drafting.recall.drafter import Recall
from osd.drafting.token_select import TokenSelect
from osd.drafting.trainable import Trainable

_TRAINED = (DSpark, Eagle, EarlyExit, Falcon, Kangaroo, LanguageModel, Medusa, PromptTokens)
DRAFTERS: dict[str, type[Drafter]] = {drafter.kind: drafter for drafter in (*_TRAINED, Recall, TokenSelect)}

__all__ = [
    "DRAFTERS",
    "Drafter",
    "DrafterError",
    "Trainable",
    "from_config",
    "initial",
    "served",
    "serving_taps",
    "trainable",
    "with_required_head",
]


def initial(settings: DrafterSettings, target_dir: Path, cache: Path) -> Drafter:
    """Make the first drafter of a domain; raise DrafterError if the settings do not fit the target."""
    chosen = settings.distilled
    if chosen.kind not in DRAFTERS:
        raise DrafterError(f"drafter.kind is {chosen.kind!r}, which is no kind of drafter")
    return DRAFTERS[chosen.kind].initial(chosen, target_dir, cache)


def served(drafter: Drafter, settings: Settings) -> Drafter:
    """Return the serving drafter: with an acceptance head if the growth needs it, and mixed with recall if set."""
    drafter = with_required_head(drafter, settings.growth)
    return Mixed(drafter) if settings.drafter.mixes else drafter


def with_required_head(drafter: Drafter, growth: GrowthSettings) -> Drafter:
    """Return the drafter with an acceptance head if the growth policy needs one."""
    stop = make_growth(growth).stop
    if stop is not None and stop.above is not None and isinstance(drafter, Trainable) and drafter.acceptance is None:
        return drafter.add_head()
    return drafter


def serving_taps(drafter: Drafter, layers: int) -> tuple[int, ...]:
    """Return the target layers to tap for a drafter, followed by those of kinds that may replace it in service.

    There are none for a drafter without taps, which would not use the memory of the states.
    """
    taps = drafter.needs.taps
    usual = (tap for kind in DRAFTERS.values() for tap in kind.usual_taps(layers)) if taps else ()
    return taps + tuple(sorted(set(usual) - set(taps)))


def from_config(config: dict[str, Any], target_dir: Path) -> Drafter:
    """Make the drafter that the ``config.json`` of a version describes; its weights are loaded later.

    Raises:
        DrafterError: the kind is unknown or the configuration does not fit the target.
    """
    if has_head(config):
        return trainable(from_config(without_head(config), target_dir)).add_head()
    kind = config.get("kind")
    if kind not in DRAFTERS:
        raise DrafterError(f"drafter kind {kind!r} is not one of {', '.join(sorted(DRAFTERS))}")
    try:
        return DRAFTERS[kind].from_config(config, target_dir)
    except (KeyError, TypeError) as error:
        raise DrafterError(f"config.json does not describe a {kind} drafter: {error}") from None
    except MemoryError:
        raise DrafterError(f"config.json describes a {kind} drafter that exceeds the memory") from None


def trainable(drafter: Drafter) -> Trainable:
    """Return the drafter if the distiller can train it; raise DrafterError if it has no weights to train."""
    if not isinstance(drafter, Trainable):
        raise DrafterError(f"a {drafter.kind} drafter has no weights to train")
    return drafter
