"""Which thread of a process computes on several cores.

OpenMP keeps a team for every thread that ever used several cores, and when the teams together outnumber
the cores its threads sleep between two parallel regions instead of waiting awake: a forward then takes
twice as long. So one thread of a process, the engine's or the trainer's, computes on several cores, and
every other one says ``one_core`` before it touches a tensor.
"""

from __future__ import annotations

import os

import torch


def one_core() -> None:
    """Let the calling thread, and those that start after it, compute on one core."""
    torch.set_num_threads(1)


def several_cores(count: int) -> None:
    """Let the calling thread compute on ``count`` cores, 0 for all of the machine."""
    torch.set_num_threads(count or os.cpu_count() or 1)
