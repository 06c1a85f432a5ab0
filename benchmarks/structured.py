"""What it costs to hold answers to a JSON Schema: the same prompts with free answers and with held ones, in turns."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.pair import BenchError, encode
from benchmarks.report import columns
from benchmarks.streams import Arrivals, settled, together, updates_of
from osd.engine.constraint import Constraint
from osd.engine.engine import Engine
from osd.engine.forcing import FORCED
from osd.engine.grammar import Grammar
from osd.engine.request import Request, SamplingParams
from osd.metrics import SourceCounts, SpeculationCounts
from osd.recall.memory import BEHIND
from osd.speculation.masks import forbid
from osd.traffic.prompt import Prompt

WAYS = ((False, False), (True, False), (False, True), (True, True))
"""Whether answers are held to the schema, and whether they are drafted."""


def _record(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these and nothing else."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


_NAME = {"type": "string", "minLength": 1, "maxLength": 40}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 99}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat record": _record(
        name=_NAME,
        age={"type": "integer", "minimum": 0, "maximum": 120},
        email={"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,12}\\.(com|org)$"},
        city=_NAME,
        member={"type": "boolean"},
    ),
    "nested invoice": _record(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        customer=_record(name=_NAME, city=_NAME),
        lines={
            "type": "array",
            "items": _record(item=_NAME, quantity=_COUNT, price={"type": "number", "minimum": 0}),
            "minItems": 1,
            "maxItems": 4,
        },
        paid={"type": "boolean"},
    ),
    "enum classifier": _record(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        topic={"enum": ["delivery", "price", "quality", "service", "other"]},
        language={"enum": ["de", "en", "es", "fr", "it"]},
        urgent={"type": "boolean"},
    ),
}  # fmt: skip
"""What such answers are used for."""

_FIRST = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luis")
_LAST = ("Smith", "Keller", "Rossi", "Dubois", "Novak", "Haddad", "Berg", "Costa", "Olsen", "Tanaka")
_CITIES = ("Lyon", "Porto", "Graz", "Oslo", "Turin", "Leeds", "Ghent", "Malaga", "Aarhus", "Boston")
_GOODS = ("oak chair", "desk lamp", "steel shelf", "wool rug", "paper bin", "wall clock", "glass vase", "tea pot")
_SAID = (
    "arrived two weeks late and nobody answered my calls", "looks even better than in the pictures",
    "costs more than in the shop next door", "broke on the second day", "does what it should",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """``blocks`` of ``waves`` in each way, of ``streams`` answers of at most ``tokens`` tokens; one block warms up."""

    blocks: int
    waves: int
    streams: int
    tokens: int
    temperature: float


@dataclass(frozen=True)
class Way:
    """What one block's waves gave in one way while all streams decoded.

    ``tokens`` came in ``rounds`` of their sequences within ``seconds``, beside those that each began with. Of all
    drafted tokens that were accepted, ``forced`` were the grammar's and ``others`` a drafter's.
    """

    held: bool
    drafted: bool
    seconds: float
    tokens: int
    rounds: int
    forced: int
    others: int

    @property
    def speed(self) -> float:
        """Tokens a second, of all streams together."""
        return self.tokens / self.seconds

    @property
    def length(self) -> float:
        """Tokens a round."""
        return self.tokens / self.rounds


@dataclass(frozen=True)
class Block:
    """The same prompts in all ``WAYS``; a token's mask took ``mask`` seconds, timed alone."""

    schema: str
    number: int
    ways: list[Way]
    mask: float

    def way(self, held: bool, drafted: bool) -> Way:
        """One of them."""
        return next(way for way in self.ways if (way.held, way.drafted) == (held, drafted))

    def ratio(self, drafted: bool) -> float:
        """Tokens a second of answers that are held, to those of free ones."""
        return self.way(True, drafted).speed / self.way(False, drafted).speed


def prompt(schema: str, chance: random.Random) -> str:
    """A text that asks for what one of ``SCHEMAS`` describes."""
    name, city = f"{chance.choice(_FIRST)} {chance.choice(_LAST)}", chance.choice(_CITIES)
    if schema == "flat record":
        mail = f"{name.lower().replace(' ', '.')}@{city.lower()}.com"
        given = f"{name}, {chance.randrange(18, 90)} years old, from {city}, writes from {mail} and has been a member."
    elif schema == "nested invoice":
        goods = " and ".join(
            f"{chance.randrange(1, 20)} x {item} at {chance.randrange(5, 300)}.50"
            for item in chance.sample(_GOODS, chance.randrange(1, 4))
        )
        given = f"Invoice INV-{chance.randrange(1000, 10000)} to {name} in {city}: {goods}. It has been paid."
    else:
        given = f"{name} from {city} says: the {chance.choice(_GOODS)} {chance.choice(_SAID)}."
    # The names alone: small models say a schema again that they are shown, and a memory drafts all of that.
    names = ", ".join(SCHEMAS[schema]["required"])
    return f"{given}\nWrite this as a JSON object, on one line and without spaces around it, with the keys {names}."


def measure(
    engine: Engine, schema: str, plan: Plan, report: Callable[[str], None] = lambda step: None
) -> Iterator[Block]:
    """Answer each block of prompts in all ``WAYS``, another of which begins each time.

    No prompt comes in two blocks: what is drafted for is remembered.

    Args:
        engine: running, with a drafter and without the prefix cache.
        schema: of ``SCHEMAS``.
        plan: how much.
        report: told which block begins.

    Raises:
        RuntimeError: a request failed.
    """
    grammar = engine.grammars.compile("json", json.dumps(SCHEMAS[schema]))
    chance = random.Random(schema)  # noqa: S311 - no secret
    for number in range(plan.blocks + 1):
        report(f"{schema}: block {number} of {plan.blocks}")
        waves = [[_encoded(engine, prompt(schema, chance)) for _ in range(plan.streams)] for _ in range(plan.waves)]
        ways: list[Way] = []
        answers: list[list[int]] = []
        first = number % len(WAYS)
        for held, drafted in (*WAYS[first:], *WAYS[:first]):
            way, given = _answered(engine, waves, grammar if held else None, drafted, plan)
            ways.append(way)
            answers += given if held else []
        if number:
            yield Block(schema, number, ways, mask_seconds(grammar, answers))


def _encoded(engine: Engine, text: str) -> tuple[int, ...]:
    (ids,) = encode(engine.tokenizer, [Prompt("", "", (text,))], engine.settings.engine.context)
    return ids


def _answered(
    engine: Engine, waves: Sequence[Sequence[tuple[int, ...]]], grammar: Grammar | None, drafted: bool, plan: Plan
) -> tuple[Way, list[list[int]]]:
    """What came of the waves in one way, and the answers."""
    seconds, tokens, rounds, counts = 0.0, 0, 0, SpeculationCounts()
    answers: list[list[int]] = []
    for wave, prompts in enumerate(waves):
        settled(engine)
        requests = [
            Request(
                f"{wave} {stream}", ids, plan.tokens, SamplingParams(plan.temperature, seed=stream),
                capture=drafted, speculate=drafted, grammar=grammar,
            )
            for stream, ids in enumerate(prompts)
        ]  # fmt: skip
        given: dict[str, list[int]] = {request.id: [] for request in requests}
        arrivals: Arrivals = defaultdict(list)
        for moment, update in updates_of(engine, requests):
            given[update.request_id] += update.token_ids
            if update.token_ids:
                arrivals[update.request_id].append((moment, len(update.token_ids)))
            if update.counts:
                counts.add(update.counts)
        lasted, within = together(arrivals)
        seconds, tokens, rounds = seconds + lasted, tokens + sum(within), rounds + len(within)
        answers += given.values()
    if not tokens:
        raise BenchError("answers ended before all of a wave had begun: fewer --streams, or more --tokens")
    forced = sum(counts.by_source.get(source, SourceCounts()).accepted for source in (FORCED, BEHIND))
    return Way(grammar is not None, drafted, seconds, tokens, rounds, forced, counts.accepted - forced), answers


def mask_seconds(grammar: Grammar, answers: Sequence[Sequence[int]]) -> float:
    """Seconds a token of looking up what may follow, taking the rest from a row of logits, and going on."""
    row = torch.zeros(1, grammar.vocabulary)
    seconds, tokens = 0.0, 0
    for answer in answers:
        constraint = Constraint(grammar)
        for token in answer:
            begun = time.perf_counter()
            forbid(row, [0], [constraint], [()], None)
            if token not in grammar.ends:
                constraint.advance(token)
            seconds += time.perf_counter() - begun
            tokens += 1
    return seconds / tokens


def table(blocks: Sequence[Block]) -> Grid:
    """Medians over the blocks of one schema, with the least and the most; ratios are taken within a block."""
    grid = columns(blocks[0].schema, "free", "held to the schema", "held / free")
    for drafted, name in ((True, "with drafts"), (False, "plain")):
        speeds, lengths = (
            [Spread.of([value(block.way(held, drafted)) for block in blocks]) for held in (False, True)]
            for value in (lambda way: way.speed, lambda way: way.length)
        )
        ratio = Spread.of([block.ratio(drafted) for block in blocks])
        grid.add_row(f"{name}, tokens/s", *(speed.text(1, 1) for speed in speeds), ratio.text())
        if drafted:
            more = Spread.of([block.way(True, True).length / block.way(False, True).length for block in blocks])
            grid.add_row("tokens a round", *(length.text() for length in lengths), more.text())
    grid.add_row("mask, microseconds a token", "", Spread.of([block.mask for block in blocks]).text(1e6, 0), "")
    return grid
