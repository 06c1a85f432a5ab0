"""Traffic as token ids of the target, from prompts or from captured traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from osd.capture.trace import Trace
from osd.target.vocabulary import Vocabulary
from osd.traffic.prompt import Prompt


class PassageError(ValueError):
    """Error of too little traffic, or of traffic from another target; the message is one line."""


@dataclass(frozen=True)
class Passage:
    """Text of a request.

    Attributes:
        domain: domain of the request.
        text: the text.
        ids: ids [N] of the text in the target's vocabulary.
        likely: ids [M] that the target considered likely, with repetitions.
        mass: probability of each id of ``likely``, [M].
    """

    domain: str
    text: str
    ids: np.ndarray
    likely: np.ndarray
    mass: np.ndarray


def of_prompts(prompts: Sequence[Prompt], target: Vocabulary) -> list[Passage]:
    """Return the texts of prompts, without a chat template; the likely ids are the ids of the text.

    Raises:
        PassageError: fewer than two prompts have text.
    """
    texts = ["\n".join(filter(None, (prompt.system, *prompt.turns))) for prompt in prompts]
    passages: list[Passage] = []
    for prompt, text, ids in zip(prompts, texts, target.encode(texts), strict=True):
        passages.append(Passage(prompt.domain, text, ids, ids, np.ones(len(ids))))
    return _nonempty(passages)


def of_traces(traces: Iterable[Trace], target: Vocabulary) -> list[Passage]:
    """Return the answer of each request, with the ids that the target considered likely.

    Traces of a target other than the target of the first trace are ignored.

    Raises:
        PassageError: fewer than two requests have text, or an id is not in the target's vocabulary.
    """
    requests: dict[str, list[Trace]] = {}
    name: str | None = None
    for trace in traces:
        name = name or trace.target
        if trace.target == name:
            requests.setdefault(trace.request_id, []).append(trace)
    return _nonempty([_answer(segments, target) for segments in requests.values()])


def _answer(segments: list[Trace], target: Vocabulary) -> Passage:
    segments.sort(key=lambda trace: trace.segment)
    ids = np.concatenate([trace.completion_ids.numpy() for trace in segments])
    likely = np.concatenate([trace.target_ids.numpy().ravel() for trace in segments])
    mass = np.exp(np.concatenate([trace.target_logp.numpy().astype(np.float64).ravel() for trace in segments]))
    largest = int(max(ids.max(initial=0), likely.max(initial=0)))
    if largest >= target.size:
        raise PassageError(
            f"the traces are of the target {segments[0].target} and hold the id {largest}, but the first SOURCE, "
            f"{target.label}, has {target.size} ids: name the tokenizer of that target first"
        )
    text = target.tokenizer.decode(ids.tolist())
    return Passage(segments[0].domain, text, ids, likely, mass)


def _nonempty(passages: list[Passage]) -> list[Passage]:
    """Return the passages with tokens; a vocabulary is chosen on half of them, so at least two are needed."""
    nonempty = [passage for passage in passages if len(passage.ids)]
    if len(nonempty) < 2:
        raise PassageError(f"requests with text: {len(nonempty)}, and at least 2 are needed")
    return nonempty
