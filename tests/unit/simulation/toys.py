"""Replicas with artificial step costs, and their settings."""

from __future__ import annotations

import numpy as np
import simpy

from osd.config import Scenario, Settings
from osd.simulation.arrivals import SimulatedRequest
from osd.simulation.decoding import DecodingReplica
from osd.simulation.draft_curve import draft_curve


class Toy:
    """Costs of ``base`` seconds per step, ``row`` seconds per row and ``read`` seconds per prompt token."""

    cores, hidden_width, version_bytes, tokens_per_second = 1, 500, 1e6, 1000.0

    def __init__(self, base: float = 1e-9, row: float = 0.0, read: float = 0.0) -> None:
        self.base, self.row, self.read = base, row, read

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        return self.base + self.row * streams * (1 + nodes) + self.read * reading

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        return most


PLAIN_CURVE = draft_curve(0, 5, 1.0)


def replica(env, costs, finished=lambda request: None, slots=1, queue=1 << 30, curves=(PLAIN_CURVE,), chunk=1 << 20):
    return DecodingReplica(env, costs, slots, chunk, queue, curves, finished)


def serve(costs, requests, **options):
    """Return the replica after it has answered all requests, and each request with the time of its last token."""
    env, ended = simpy.Environment(), []
    server = replica(env, costs, lambda request: ended.append((request, env.now)), **options)

    def arrive():
        for request in requests:
            yield env.timeout(request.due - env.now)
            server.submit(request)

    env.process(arrive())
    env.run()
    server.catch_up()
    return server, ended


def poisson(rate: float, count: int, answer: int, prompt: int = 1, seed: int = 0) -> list[SimulatedRequest]:
    times = np.random.default_rng(seed).exponential(1 / rate, count).cumsum()
    return [SimulatedRequest(due, prompt, answer, 0) for due in times.tolist()]


def settings(replicas: int = 4, **changed) -> Settings:
    tree = {"serving": {"replicas": replicas, "max_queue": 1024}, "engine": {"slots": 8}}
    return Settings.model_validate({**tree, **changed})


def scenario(**changed) -> Scenario:
    tree = {
        "seconds": 60, "replicas": 2,
        "arrivals": {"rate": 2.0, "swing": 0, "prompt": 20, "answer": 20},
        "domains": {"count": 3, "tokens": 20_000, "recall_tokens": 5000},
        "trainers": {"gate_seconds": 0.3},
    }  # fmt: skip
    for name, value in changed.items():
        merges = isinstance(value, dict) and "kind" not in value and name in tree
        tree[name] = {**tree[name], **value} if merges else value
    return Scenario.model_validate(tree)
