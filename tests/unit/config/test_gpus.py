"""GPUs of replicas and of training processes."""

from __future__ import annotations

import pytest

from osd.config import ConfigError, load_settings


def gpus(available: float, *overrides: str) -> tuple[float, float]:
    settings = load_settings(overrides=list(overrides), environ={})
    return settings.replica_gpus(available), settings.trainer_gpus(available)


@pytest.mark.parametrize(("available", "overrides", "expected"), [
    (0, (), (0, 0)),
    (1, (), (1, 0)),  # the replica uses the only GPU
    (2, (), (1, 1)),
    (1, ("serving.gpu_share=0.7", "trainer.gpu_share=0.3"), (0.7, 0.3)),
    (1, ("serving.gpu_share=0.5", "serving.replicas=2"), (0.5, 0)),
    (2, ("trainer.workers=2",), (1, 0)),
    (2, ("trainer.processes=2",), (1, 0)),
    (3, ("trainer.processes=2",), (1, 1)),
    (3, ("trainer.workers=2",), (1, 1)),
    (4, ("trainer.device=cpu",), (1, 0)),
    (4, ("target.device=cpu",), (0, 1)),
    (8, ("target.tensor_parallel=4", "serving.replicas=2"), (4, 0)),
    (9, ("target.tensor_parallel=4", "serving.replicas=2"), (4, 1)),
    (0, ("target.device=cuda", "trainer.device=cuda"), (1, 1)),  # a cluster may grow
    (0, ("target.device=cpu", "target.tensor_parallel=2"), (0, 0)),
])  # fmt: skip
def test_replicas_get_gpus_before_training(available: float, overrides: tuple[str, ...], expected: tuple[float, float]):
    assert gpus(available, *overrides) == expected


@pytest.mark.parametrize(("overrides", "message"), [
    (["serving.gpu_share=0.5", "target.device=cpu"], r"serving\.gpu_share .*must be 1 where target\.device is cpu"),
    (
        ["serving.gpu_share=0.5", "target.tensor_parallel=2"],
        r"must be 1 where target\.tensor_parallel is more than 1",
    ),
    (["serving.gpu_share=0"], r"serving\.gpu_share"),
    (
        ["trainer.gpu_share=0.5", "trainer.device=cpu"],
        r"trainer\.gpu_share .*counts only where trainer\.device is not cpu",
    ),
    (["trainer.gpu_share=0.5", "trainer.workers=2"], r"trainer\.gpu_share .*must be 1 where trainer\.workers"),
])  # fmt: skip
def test_unusable_gpu_share_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(overrides=overrides, environ={})
