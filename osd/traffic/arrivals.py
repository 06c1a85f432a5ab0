"""Arrival times of requests and limits of their answers: random times with one limit, or from a recorded trace."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from osd.traffic.prompt import TrafficError

_TIME, _PROMPT, _LENGTH = "TIMESTAMP", "ContextTokens", "GeneratedTokens"


@dataclass(frozen=True)
class Arrival:
    """Arrival of one request.

    Attributes:
        due: seconds after the start.
        tokens: limit of the answer's length, in tokens.
        prompt: length of the prompt in tokens, 0 if unknown.
    """

    due: float
    tokens: int
    prompt: int = 0


def poisson(rate: float, tokens: int, seed: int) -> Iterator[Arrival]:
    """Yield endless independent arrivals, ``rate`` per second on average, with exponential times between them.

    Every answer has the same limit of ``tokens``. The same ``seed`` gives the same times.
    """
    draws = random.Random(seed)  # noqa: S311 - arrival times, not secrets
    due = 0.0
    while True:
        due += draws.expovariate(rate)
        yield Arrival(due, tokens)


def read(path: Path) -> list[Arrival]:
    """Read a trace with the columns ``TIMESTAMP`` and ``GeneratedTokens``, in the format that Azure publishes.

    The column ``ContextTokens`` adds the lengths of prompts. The first request arrives at 0. Patel et al., "Splitwise:
    Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.

    Raises:
        TrafficError: the file cannot be read, has no such column or no row, or a row is wrong; names line and field.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for column in (_TIME, _LENGTH):
                if column not in (reader.fieldnames or ()):
                    raise TrafficError(f"{path} has no column {column}")
            has_prompts = _PROMPT in (reader.fieldnames or ())
            rows = [_row(row, has_prompts, f"{path}, line {reader.line_num}") for row in reader]
    except OSError as error:
        raise TrafficError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TrafficError(f"{path} is not CSV: {error}") from None
    if not rows:
        raise TrafficError(f"{path} holds no arrival")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [Arrival((moment - start).total_seconds(), tokens, prompt) for moment, tokens, prompt in rows]


def _row(row: dict[str, str], has_prompts: bool, where: str) -> tuple[datetime, int, int]:
    try:
        # A datetime has six decimals of a second, the trace seven.
        moment = datetime.fromisoformat((row[_TIME] or "")[:26])
    except ValueError:
        raise TrafficError(f"{where}, field {_TIME}: must be a date and time, not {row[_TIME]!r}") from None
    return moment, _tokens(row, _LENGTH, where), _tokens(row, _PROMPT, where) if has_prompts else 0


def _tokens(row: dict[str, str], field: str, where: str) -> int:
    text = (row[field] or "").strip()
    if not text.isdecimal() or int(text) < 1:
        raise TrafficError(f"{where}, field {field}: must be a whole number of at least 1, not {text!r}")
    return int(text)


def paced(arrivals: Sequence[Arrival], rate: float | None, longest: int) -> list[Arrival]:
    """Return the same arrivals at another average rate, with shorter limits for long answers.

    Args:
        arrivals: at least one arrival, in order of time, the first at 0.
        rate: average number of arrivals per second; all times are multiplied by one factor. None keeps the times.
        longest: maximum for the limit of an answer, in tokens. A larger limit is reduced to it; no arrival is removed.
    """
    span = arrivals[-1].due
    stretch = 1.0 if rate is None or not span else (len(arrivals) - 1) / rate / span
    return [replace(arrival, due=arrival.due * stretch, tokens=min(arrival.tokens, longest)) for arrival in arrivals]
