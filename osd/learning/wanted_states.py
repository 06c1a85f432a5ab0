"""Of how many records a trainer wants hidden states: all it can train on, and of further ones a few."""

from __future__ import annotations

AHEAD, SPARE = 32, 8
"""Records that were never trained on, as many as which a trainer may always have; of twice as many it needs few. The
second is for one that finds that training does not pay: should it come to pay, all new ones have states."""

LEAST, SELDOM = 0.1, 0.05
"""The share that is wanted whatever lies there, as traffic changes; the second where training does not pay."""

HELD_OUT = 0.5
"""The share of held-out records that is wanted where ``LEAST`` of the others is, and as much less where less is: those
that judge are best alike."""

LOOK_SECONDS = 5.0
"""After which those who write look again what is wanted."""


def states_wanted(fresh: float, pays: bool) -> float:
    """The share of records to train on whose states are wanted by whoever has so many that were never trained on.

    ``pays`` says whether training on them is expected to.
    """
    enough, least = (AHEAD, LEAST) if pays else (SPARE, SELDOM)
    return max(least, min(1.0, 2 - fresh / enough))


def states_chance(wanted: float, held_out: bool) -> float:
    """The chance that a record's states are written, by the share that is ``wanted`` of those to train on."""
    return max(wanted, HELD_OUT * min(wanted / LEAST, 1.0)) if held_out else wanted
