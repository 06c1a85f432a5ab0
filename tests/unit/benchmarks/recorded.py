"""A small experiment on made-up prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from benchmarks.learning.experiment import Experiment, ExperimentSize
from osd.cli.app import app
from osd.config import (
    ChainSettings,
    EagleSettings,
    EngineSettings,
    Settings,
    TargetSettings,
    TrainerSettings,
    drafter_of,
)
from osd.traffic.prompt import Prompt
from tests.tiny import make_tiny


def made_up(count: int, name: str = "tiny", seed: int = 0) -> list[Prompt]:
    random = np.random.default_rng(seed)
    texts = ["".join(map(chr, random.integers(97, 123, size=random.integers(4, 24)))) for _ in range(count)]
    return [Prompt(f"{name}-{index}", name, (text,)) for index, text in enumerate(texts)]


def small_experiment(home: Path, kind: str = "eagle") -> Experiment:
    settings = Settings(
        home=home,
        target=TargetSettings(source=str(make_tiny(home / "tiny")), dtype="float32"),
        engine=EngineSettings(slots=4, context=160, prefill_chunk=16, threads=1),
        drafter=EagleSettings(vocabulary=200),
        growth=ChainSettings(depth=3, governed=False),
        trainer=TrainerSettings(
            min_records=4, steps_per_candidate=20, held_out=0.2, learning_rate=3e-3, unroll=2, precision="float32"
        ),
    )
    return Experiment.of(
        settings, ExperimentSize(records=24, unseen=8, tokens=12, longest=120), [drafter_of(kind, settings.drafter)]
    )


def command(experiment: Experiment, tmp_path: Path, *arguments: object) -> Result:
    """Run ``osd bench`` with these arguments and the settings of the experiment."""
    config = tmp_path / "osd.yaml"
    config.write_text(experiment.settings.model_dump_json(exclude_none=True))
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--config", str(config)])


def osd(target: Path, home: Path, *arguments: object, settings: Iterable[str] = ()) -> Result:
    """Run ``osd`` with these arguments for a target in float32 on one thread."""
    chosen = [f"target.source={target}", "target.dtype=float32", f"home={home}", "engine.threads=1", *settings]
    return CliRunner().invoke(app, [*map(str, arguments), *(part for setting in chosen for part in ("--set", setting))])


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> Path:
    path.write_text("\n".join(json.dumps({"id": p.id, "domain": p.domain, "messages": p.opening()}) for p in prompts))
    return path


def stream_file(tmp_path: Path) -> Path:
    """Write a file of 32 made-up prompts."""
    return write_prompts(tmp_path / "tiny.jsonl", made_up(32))
