"""Construction of an engine from settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from osd import drafting
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.drafting.base import Drafter, Needs
from osd.engine.engine import Engine
from osd.engine.tracing import StatesWeight, keep_all_states
from osd.runtime.attention.selection import SelectionSizes
from osd.runtime.device import one_core
from osd.target.context import context_of
from osd.target.model import load_config
from osd.target.opening import load_target


@dataclass
class InitialDrafter:
    """Drafter that an engine starts with; version 0 is outside the registry.

    ``refused`` are versions that do not fit. Damaged or unreadable versions are tried again and are not among them.
    """

    drafter: Drafter
    version: int
    refused: set[int] = field(default_factory=set)


def make_engine(
    settings: Settings,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    start: InitialDrafter | None,
    writer: TraceWriter | None,
    label: str = "",
    states_weight: StatesWeight = keep_all_states,
) -> Engine:
    """Load the target from ``directory`` as the drafter needs it, and return an engine that is not started.

    Without ``start`` it decodes plainly. Traces for ``writer`` name the target ``label``, with hidden states by
    ``states_weight``.
    """
    one_core()
    layers, needs = load_config(directory).num_hidden_layers, start.drafter.needs if start else Needs()
    taps = drafting.serving_taps(start.drafter, layers) if start else ()
    selected = settings.target.attention.selection  # None if the target attends to the whole context
    if start and not taps and settings.engine.domains > 1:
        # The router needs a tapped layer, even if no drafter does.
        taps = (layers // 2,)
    target = load_target(
        settings.target,
        directory,
        slots=settings.engine.slots,
        context=context_of(settings, directory),
        scratch=settings.engine.max_draft + 1 + needs.riders,
        taps=taps,
        embeddings=settings.engine.slots * needs.embeddings,
        label=label,
        threads=settings.engine.threads,
        selection=selected
        and SelectionSizes(selected.initial, selected.top, selected.local, selected.threshold, compact=True),
    )
    sink = writer.offer if writer else None
    if start is None:
        return Engine(target, tokenizer, settings, sink=sink)
    return Engine(target, tokenizer, settings, start.drafter, start.version, sink, states_weight)
