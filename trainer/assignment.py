"""Which trainer has which domain, by what domains are worth and by the room that trainers have."""

from __future__ import annotations

from collections.abc import Mapping

CLEAR = 1.25
"""The fullest trainer's load, beside what it could be, from which domains change places: each leaves its replay."""

_LEAST_ROOM = 0.01
"""Room of a trainer to which serving leaves nothing: it has domains only where all others are that full."""

_LEAST_GAIN = 1e-9
"""By which a move must lower it: more than what rounding does, so that moves come to an end."""


def weights(nets: Mapping[str, float | None]) -> dict[str, float]:
    """How much of a trainer each domain takes, from what its next slice of learning is expected to bring.

    Half of all weight is shared by that, as computing goes where it is worth most, and half equally, as a domain that
    is worth nothing now takes memory and reads its stream all the same. One of which nothing is expected yet, None,
    counts like the mean of the others.
    """
    known = [net for net in nets.values() if net is not None]
    mean = sum(known) / len(known) if known else 0.0
    worth = {domain: mean if net is None else net for domain, net in nets.items()}
    total = sum(worth.values())
    return {domain: (net / total if total else 1 / len(nets)) + 1 / len(nets) for domain, net in worth.items()}


def assign(held: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, str]:
    """Give each domain without a trainer to the one that is then least full, the heaviest domain first.

    Args:
        held: the trainer of each domain that has one; those of other trainers than ``room`` names have none.
        weight: of each domain.
        room: of each trainer, 0 to 1; how full one is, is the weight of its domains beside that.

    Raises:
        ValueError: there is no trainer.
    """
    if not room:
        raise ValueError("there is no trainer to give a domain to")
    given = {domain: held[domain] for domain in weight if held.get(domain) in room}
    full = _full(given, weight, room)
    for domain in sorted(weight.keys() - given.keys(), key=lambda domain: (-weight[domain], domain)):
        added = {name: full[name] + weight[domain] / _room(room, name) for name in room}
        name = min(sorted(room), key=added.__getitem__)
        given[domain], full[name] = name, added[name]
    return given


def balance(held: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, str]:
    """Move domains from fuller trainers to emptier ones where the fullest could be clearly less full, else none.

    Each move takes a domain from the fullest trainer, the one that leaves both sides least full. ``held`` gives
    every domain a trainer of ``room``; the arguments are those of ``assign``.
    """
    given = dict(held)
    full = _full(given, weight, room)
    anew = _full(assign({}, weight, room), weight, room)
    if max(full.values()) <= CLEAR * max(anew.values()):
        return given
    while True:
        fullest = max(sorted(room), key=full.__getitem__)
        moves = [
            (max(full[fullest] - weight[domain] / _room(room, fullest), full[to] + weight[domain] / _room(room, to)),
             domain, to)
            for domain, name in given.items() if name == fullest for to in room if to != fullest
        ]  # fmt: skip
        if not moves:
            return given
        fuller, domain, to = min(moves)
        if fuller > full[fullest] * (1 - _LEAST_GAIN):
            return given
        given[domain] = to
        full = _full(given, weight, room)


def _full(given: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, float]:
    full = dict.fromkeys(room, 0.0)
    for domain in sorted(given):
        full[given[domain]] += weight[domain] / _room(room, given[domain])
    return full


def _room(room: Mapping[str, float], name: str) -> float:
    return max(room[name], _LEAST_ROOM)
