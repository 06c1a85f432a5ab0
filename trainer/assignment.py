"""Assignment of domains to trainers, by the value of the domains and the capacity of the trainers."""

from __future__ import annotations

from collections.abc import Mapping

CLEAR_FACTOR = 1.25
"""Factor of the largest load over the possible load above which domains move; a moved domain loses its replay."""

_MIN_ROOM = 0.01
"""Assumed capacity of a trainer without spare capacity; it gets domains only if all trainers are as busy."""

_MIN_GAIN = 1e-9
"""Smallest relative gain of a move; it is larger than rounding errors, so the moves end."""


def weights(nets: Mapping[str, float | None]) -> dict[str, float]:
    """Return the weight of each domain, the share of a trainer that it takes; the weights add up to 2.

    Half of all weight is divided in proportion to the expected gain of the next slice of training. The other half is
    divided equally, as a domain without gain takes memory and reads its stream too.

    Args:
        nets: the expected gain of each domain; None counts like the mean of the known gains.
    """
    known = [net for net in nets.values() if net is not None]
    mean = sum(known) / len(known) if known else 0.0
    gains = {domain: mean if net is None else net for domain, net in nets.items()}
    total = sum(gains.values())
    return {domain: (net / total if total else 1 / len(nets)) + 1 / len(nets) for domain, net in gains.items()}


def assign(held: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, str]:
    """Give each domain without a trainer to the trainer with the smallest load, the heaviest domain first.

    Args:
        held: the trainer of each domain; a trainer that is not in ``room`` does not count.
        weight: the weight of each domain.
        room: the capacity of each trainer, 0 to 1; its load is the weight of its domains / its capacity.

    Returns:
        The trainer of each domain.

    Raises:
        ValueError: there is no trainer.
    """
    if not room:
        raise ValueError("no trainer is available for the domains")
    assigned = {domain: held[domain] for domain in weight if held.get(domain) in room}
    load = _loads(assigned, weight, room)
    for domain in sorted(weight.keys() - assigned.keys(), key=lambda domain: (-weight[domain], domain)):
        added = {name: load[name] + weight[domain] / _room(room, name) for name in room}
        name = min(sorted(room), key=added.__getitem__)
        assigned[domain], load[name] = name, added[name]
    return assigned


def balance(held: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, str]:
    """Move domains from trainers with much load to others, if this lowers the largest load clearly.

    Each step moves a domain away from the trainer with the largest load. It chooses the move after which the larger
    load of the two trainers is smallest. The arguments are those of ``assign``; ``held`` names a trainer of ``room``
    for each domain.

    Returns:
        The trainer of each domain; the same as ``held`` when nothing moves.
    """
    assigned = dict(held)
    load = _loads(assigned, weight, room)
    ideal = _loads(assign({}, weight, room), weight, room)
    if max(load.values()) <= CLEAR_FACTOR * max(ideal.values()):
        return assigned
    while True:
        fullest = max(sorted(room), key=load.__getitem__)
        moves = [
            (max(load[fullest] - weight[domain] / _room(room, fullest), load[to] + weight[domain] / _room(room, to)),
             domain, to)
            for domain, name in assigned.items() if name == fullest for to in room if to != fullest
        ]  # fmt: skip
        if not moves:
            return assigned
        max_load, domain, other = min(moves)
        if max_load > load[fullest] * (1 - _MIN_GAIN):
            return assigned
        assigned[domain] = other
        load = _loads(assigned, weight, room)


def _loads(assigned: Mapping[str, str], weight: Mapping[str, float], room: Mapping[str, float]) -> dict[str, float]:
    load = dict.fromkeys(room, 0.0)
    for domain in sorted(assigned):
        load[assigned[domain]] += weight[domain] / _room(room, assigned[domain])
    return load


def _room(room: Mapping[str, float], name: str) -> float:
    return max(room[name], _MIN_ROOM)
