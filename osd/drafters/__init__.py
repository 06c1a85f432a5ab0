"""Drafters by name, and the first version of each from a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from osd.config import DrafterSettings
from osd.drafters.acceptance_head import WithAcceptanceHead, has_head, without_head
from osd.drafters.base import Drafter, DrafterError
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.eagle.initial import eagle_from_config, eagle_from_target
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.trainable import Trainable
from osd.target.model import load_model

DRAFTERS: dict[str, type[Trainable]] = {"eagle": Eagle, "language_model": LanguageModel}

__all__ = ["DRAFTERS", "Drafter", "DrafterError", "Trainable", "from_config", "initial"]


def initial(settings: DrafterSettings, target_dir: Path, home: Path) -> Trainable:
    """Make the drafter that a domain starts with.

    Raises:
        DrafterError: the settings do not fit the target.
    """
    target = load_model(target_dir, "float32", "cpu")
    if settings.kind == "eagle":
        return eagle_from_target(target, settings.vocabulary)
    if settings.kind == "none":
        raise DrafterError("drafter.kind none is no drafter")
    if settings.source is None:
        return LanguageModel.first_layers(target, settings.layers)
    return _own_model(settings.source, target, home)


def _own_model(source: str, target: nn.Module, home: Path) -> LanguageModel:
    from osd.target.load import resolve

    drafter = LanguageModel(load_model(resolve(source, home), "float32", "cpu"), shared=False)
    mine, theirs = drafter.model.config.vocab_size, target.config.vocab_size  # type: ignore[union-attr]
    if mine != theirs:
        raise DrafterError(f"drafter.source has {mine} tokens, but the target has {theirs}; they must be the same")
    return drafter


def from_config(config: dict[str, Any], target_dir: Path) -> Trainable:
    """Make the module that a version's ``config.json`` describes; its weights come next.

    Raises:
        DrafterError: the kind is unknown or the configuration does not fit the target.
    """
    if has_head(config):
        return WithAcceptanceHead(from_config(without_head(config), target_dir))
    kind = config.get("kind")
    if kind not in DRAFTERS:
        raise DrafterError(f"drafter kind {kind!r} is not one of {', '.join(sorted(DRAFTERS))}")
    # eagle only looks at the target's embedding and head: what is not converted is not read
    target = load_model(target_dir, "auto" if kind == "eagle" else "float32", "cpu")
    try:
        return eagle_from_config(config, target) if kind == "eagle" else LanguageModel.build(config, target)
    except (KeyError, TypeError) as error:
        raise DrafterError(f"config.json does not describe a {kind} drafter: {error}") from None
