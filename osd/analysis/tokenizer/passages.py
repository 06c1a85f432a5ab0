"""Traffic as token ids of the target: from prompts, or from what a service captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from osd.capture.trace import Trace
from osd.target.vocabulary import Vocabulary
from osd.traffic.prompt import Prompt


class PassageError(ValueError):
    """There is not enough traffic, or it is not of this target; the message is one line that says so."""


@dataclass(frozen=True)
class Passage:
    """The text of one request, and its ``ids`` [N] in the target's vocabulary.

    ``likely`` [M] are the ids that were to be expected there, an id as often as it likes, with the probability of each
    in ``mass`` [M].
    """

    domain: str
    text: str
    ids: np.ndarray
    likely: np.ndarray
    mass: np.ndarray


def of_prompts(prompts: Sequence[Prompt], target: Vocabulary) -> list[Passage]:
    """What the prompts say, without a chat template; what is expected is what is there.

    Raises:
        PassageError: there is one prompt only.
    """
    texts = ["\n".join(filter(None, (prompt.system, *prompt.turns))) for prompt in prompts]
    found: list[Passage] = []
    for prompt, text, ids in zip(prompts, texts, target.encode(texts), strict=True):
        found.append(Passage(prompt.domain, text, ids, ids, np.ones(len(ids))))
    return _enough(found)


def of_traces(traces: Iterable[Trace], target: Vocabulary) -> list[Passage]:
    """What the service answered, each request whole, and what the target held likely there.

    Traces of other targets than the first one's are passed over.

    Raises:
        PassageError: they are of one request only, or their ids are not in the target's vocabulary.
    """
    requests: dict[str, list[Trace]] = {}
    name: str | None = None
    for trace in traces:
        name = name or trace.target
        if trace.target == name:
            requests.setdefault(trace.request_id, []).append(trace)
    return _enough([_answer(segments, target) for segments in requests.values()])


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


def _enough(passages: list[Passage]) -> list[Passage]:
    """Those that have a token: at least two, one to choose a vocabulary by and one to try it on."""
    found = [passage for passage in passages if len(passage.ids)]
    if len(found) < 2:
        raise PassageError(f"requests with text: {len(found)}, and at least 2 are needed")
    return found
