"""Fixtures of the tests in real vLLM processes: models, a registry, Redis, and a server of each model runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers.roster import PeerModels
from benchmarks.vllm.exports import FOLLOWING
from benchmarks.vllm.server import VllmServer
from osd.drafting import formats
from osd.drafting.eagle.drafter import Eagle
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from osd.target.model import load_model
from tests.tiny import make_tiny
from tests.vllm.environment import interpreter, variables

DEPTH = 3


class VllmWorld:
    """Target, an export of version 1 of its drafter, and a registry with two versions."""

    def __init__(self, home: Path) -> None:
        self.home, self.target, self.export = home, home / "target", home / "export"
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        make_tiny(self.target, layers=6, vocab_size=320, tie_word_embeddings=False, **heads)
        model = load_model(self.target, "float32", "cpu")
        drafter = Eagle.from_target(model, 200)
        self.taps = drafter.shape.taps
        self.registry = Registry(home / "registry")
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                for weight in drafter.trained().values():
                    weight.add_(0.05 * torch.randn_like(weight))
            number = self.registry.publish("general", drafter.weights(), drafter.config(), {})
            if number == 1:
                origin = formats.ExportOrigin("general", 1, "tiny", self.target, DEPTH)
                formats.write(drafter, "speculators", origin, self.export)
        self.activate(1)

    def activate(self, version: int) -> None:
        """Bring a version into service."""
        PointerFiles(self.registry.root).update("general", lambda _: Rollout(version, None, 0.0, 1.0))

    def server(self, kind: str, redis_url: str, *arguments: str, **environment: str) -> VllmServer:
        """Return a server with the model runner ``kind``, little memory for keys and values, and short chunks."""
        models = PeerModels(self.target, "float32", 256, 1, 8, None, self.target, None)
        settings = {"OSD_VLLM_REGISTRY": str(self.registry.root), "OSD_REDIS_URL": redis_url}
        chunks = ["--block-size", "32", "--num-gpu-blocks-override", "12", "--max-num-batched-tokens", "64"]
        return VllmServer(
            interpreter(),
            models,
            variables(kind) | settings | environment,
            {"method": "eagle3", "model": str(self.export), "num_speculative_tokens": DEPTH},
            [*FOLLOWING, "--enable-prefix-caching", *chunks, *arguments],
        )


@pytest.fixture(scope="session")
def vllm_world(tmp_path_factory: pytest.TempPathFactory) -> VllmWorld:
    """Models for all tests."""
    return VllmWorld(tmp_path_factory.mktemp("vllm"))
