"""The target drafts over selected tokens and verifies over all of them: acceptance, reuse, mass and tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table as Grid
from torch import Tensor, nn

from benchmarks.pair import BenchError
from benchmarks.report import columns
from benchmarks.streams import decoding_rate, updates_of
from osd.drafters.token_select.session import TokenSelectSession
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.runtime.attention.reference import ReferenceAttention
from osd.runtime.attention.selection import TokenSelection
from osd.runtime.batch import following
from osd.runtime.device import one_core, several_cores


@dataclass(frozen=True)
class Drafting:
    """Greedy answers behind ``length`` tokens of a text, ``plain`` and ``drafted``, in tokens a second.

    Choices are kept from the cosine ``threshold`` on, and ``made`` is the share of those that were not kept ones.
    ``acceptance`` is accepted / drafted with selected tokens, and ``full_acceptance`` with all of them; ``mass`` is the
    mean share of full attention's mass on what is read. All answers are the ``same``.
    """

    length: int
    threshold: float
    plain: float
    drafted: float
    acceptance: float
    full_acceptance: float
    made: float
    mass: float
    same: bool


def measure(
    engine: Engine,
    model: nn.Module,
    text: Sequence[int],
    lengths: Sequence[int],
    thresholds: Sequence[float],
    tokens: int,
    report: Callable[[str], None],
) -> Iterator[Drafting]:
    """Answer behind each of the ascending ``lengths`` of ``text``; what was read before is not read again.

    ``model`` is the engine's target as transformers runs it.

    Raises:
        BenchError: the engine drafts otherwise.
    """
    session = None if engine.pool is None else engine.pool.own.session
    if not isinstance(session, TokenSelectSession):
        raise BenchError("only token_select drafts over selected tokens")
    selection, sizes = session.selection, session.selection.sizes
    for length in lengths:
        report(f"answers behind {length} tokens")
        prompt = text[:length]
        _answer(engine, "reading", prompt, 2, speculate=False)
        plain, goal, _ = _answer(engine, "plain", prompt, tokens, speculate=False)
        session.selection = selection.resized(replace(sizes, top=engine.settings.engine.context))
        _, everything, full = _answer(engine, "everything", prompt, tokens, speculate=True)
        mass = _mass(engine, model, selection.resized(sizes), prompt)
        for threshold in thresholds:
            session.selection = selection.resized(replace(sizes, threshold=threshold))
            drafted, found, acceptance = _answer(engine, "drafted", prompt, tokens, speculate=True)
            made, kept = session.selection.counts.tolist()
            same = goal == found == everything
            yield Drafting(length, threshold, plain, drafted, acceptance, full, made / max(made + kept, 1), mass, same)


def _answer(
    engine: Engine, name: str, prompt: Sequence[int], tokens: int, speculate: bool
) -> tuple[float, list[int], float]:
    """Tokens a second while it decodes, the answer, and the share of its draft that was accepted."""
    request = Request(
        name, tuple(prompt), tokens, SamplingParams(temperature=0.0), ignore_eos=True, speculate=speculate
    )
    arrivals: dict[str, list[tuple[float, int]]] = {name: []}
    answer: list[int] = []
    rate = 0.0
    for moment, update in updates_of(engine, [request]):
        arrivals[name].append((moment, len(update.token_ids)))
        answer += update.token_ids
        if update.counts is not None and update.counts.drafted:
            rate = update.counts.accepted / update.counts.drafted
    return decoding_rate(arrivals), answer, rate


class _Weighing(ReferenceAttention):
    """Full attention that sees which share of its weights lies on what a selection reads."""

    shares: list[float]
    weighed: TokenSelection

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """See ``AttentionBackend.attend``."""
        out = super().attend(layer, query, key, value, **how)
        place, keys = int(self._rows.stores[0]), self._cache.keys[layer, 0]
        far = self.weighed.far(layer, 0, place, query, self._rows.positions, keys)
        groups = query.shape[1] // key.shape[1]
        asked = query[0].float().unflatten(0, (-1, groups))
        weights = (asked @ keys[:, : place + 1].float().transpose(1, 2) * how["scale"]).softmax(-1).mean((0, 1))
        kept = weights.sum() if far is None else weights[far.places].sum() + weights[far.begin :].sum()
        self.shares.append(float(kept))
        return out


@torch.inference_mode()
def _mass(engine: Engine, model: nn.Module, selection: TokenSelection, prompt: Sequence[int]) -> float:
    """The mean over heads and layers of the share of attention's mass on what is read, behind the prompt."""
    target, place = engine.target, len(prompt) - 1
    rows = following(0, place, prompt[-1:])
    backend = _Weighing(rows, target.cache)
    backend.shares, backend.weighed = [], selection
    several_cores(engine.settings.engine.threads)
    model(input_ids=rows.token_ids[None], position_ids=rows.positions[None], use_cache=False, osd_attention=backend)
    one_core()
    return sum(backend.shares) / len(backend.shares)


def table(found: Sequence[Drafting]) -> Grid:
    """One row for each length."""
    grid = columns(
        "tokens", "threshold", "plain, tokens/s", "drafted", "times plain", "acceptance", "over everything", "ratio",
        "choices made", "mass kept", "same text",
    )  # fmt: skip
    for one in found:
        grid.add_row(
            str(one.length),
            f"{one.threshold:g}",
            f"{one.plain:.1f}",
            f"{one.drafted:.1f}",
            f"{one.drafted / one.plain:.2f}",
            f"{one.acceptance:.3f}",
            f"{one.full_acceptance:.3f}",
            f"{one.acceptance / one.full_acceptance:.2f}",
            f"{one.made:.0%}",
            f"{one.mass:.3f}",
            "yes" if one.same else "NO",
        )
    return grid


def pays(found: Sequence[Drafting]) -> str:
    """From which length on drafting is faster than plain decoding at some threshold, in a sentence."""
    lengths = sorted({one.length for one in found})
    best = {length: max(one.drafted / one.plain for one in found if one.length == length) for length in lengths}
    slower = [length for length, speed in best.items() if speed <= 1]
    faster = [length for length in best if length > max(slower, default=0)]
    return f"drafting pays from {min(faster)} tokens on" if faster else "drafting pays at no length that was measured"
