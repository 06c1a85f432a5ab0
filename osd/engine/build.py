"""An engine from settings: the target is loaded as the drafter needs it, and the engine stands around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from osd import drafting
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.drafting.base import Drafter, Needs
from osd.engine.engine import Engine
from osd.engine.tracing import StatesWanted, all_states
from osd.runtime.attention.selection import SelectionSizes
from osd.runtime.device import one_core
from osd.target.model import load_config
from osd.target.opening import load_target


@dataclass
class Start:
    """Drafter that an engine starts with: its version, 0 for one outside the registry, and the refused versions.

    Damaged or unreadable versions are not among the refused ones: they are tried again.
    """

    drafter: Drafter
    version: int
    refused: set[int] = field(default_factory=set)


def make_engine(
    settings: Settings,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    start: Start | None,
    writer: TraceWriter | None,
    label: str = "",
    states: StatesWanted = all_states,
) -> Engine:
    """Load the target from ``directory`` and make an engine around it; ``start`` None decodes plainly.

    Traces for ``writer`` name the target ``label``, and have hidden states where ``states`` wants them.
    """
    one_core()
    layers, needs = load_config(directory).num_hidden_layers, start.drafter.needs if start else Needs()
    taps = drafting.taps_beside(start.drafter, layers) if start else ()
    chosen = settings.target.attention.selected  # of a long context; None where the target itself reads all
    if start and not taps and settings.engine.domains > 1:
        # The router reads this layer where no drafter does.
        taps = (layers // 2,)
    target = load_target(
        settings.target,
        directory,
        slots=settings.engine.slots,
        context=settings.engine.context,
        scratch=settings.engine.max_draft + 1 + needs.riders,
        taps=taps,
        embeddings=settings.engine.slots * needs.embeddings,
        label=label,
        threads=settings.engine.threads,
        selection=chosen and SelectionSizes(chosen.initial, chosen.top, chosen.local, chosen.threshold, compact=True),
    )
    sink = writer.offer if writer else None
    if start is None:
        return Engine(target, tokenizer, settings, sink=sink)
    return Engine(target, tokenizer, settings, start.drafter, start.version, sink, states)
