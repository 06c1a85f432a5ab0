"""Start of vLLM in a replica, with a stand-in for vLLM in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from osd.config import Settings, load_settings
from osd.registry.pointer_file import PointerFiles, Rollout
from serving.vllm.engine import arguments
from serving.vllm.exports import stable_exports
from serving.vllm.server import runtime_env, tries_canaries
from serving.vllm.variables import inherited, variables
from tests.standin import standin_python

START = """
import asyncio, json, sys
from pathlib import Path
from osd.config import load_settings
from serving.vllm.engine import start
for exports, *overrides in json.loads(sys.argv[1]):
    settings = load_settings(None, ["drafter.kind=eagle", "engine.kind=vllm", *overrides], {})
    try:
        running = asyncio.run(start(settings, "name", Path("target"), [Path(export) for export in exports]))
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print(running.has_priorities, running.app.state.args.speculative_config)
        running.engine.shutdown()
"""


def settings_of(home: Path, **values: Any) -> Settings:
    engine = {"kind": "vllm", "vllm": {"python": "/an env/bin/python", "args": "--max-model-len 64"}}
    return Settings.model_validate({"home": home, "drafter": {"kind": "eagle"}, "engine": engine, **values})


def export(folder: Path, version: int, broken: bool = False) -> Path:
    place = folder / "vllm" / "general" / str(version)
    place.mkdir(parents=True)
    if broken:
        (place / "broken").touch()
    return place


def test_arguments_name_target_drafter_and_osd(tmp_path: Path) -> None:
    options = arguments(settings_of(tmp_path), "name", Path("target"), Path("export"))
    assert options[:4] == ["--model", "target", "--served-model-name", "name"]
    drafts = json.loads(options[options.index("--speculative-config") + 1])
    assert drafts == {"method": "eagle3", "model": "export", "num_speculative_tokens": 3}
    assert options[options.index("--worker-extension-cls") + 1] == "osd.vllm.worker.Osd"
    assert options[-2:] == ["--max-model-len", "64"]
    plain = arguments(settings_of(tmp_path, drafter={"kind": "none"}), "name", Path("target"), None)
    assert {"--speculative-config", "--worker-extension-cls", "--middleware"}.isdisjoint(plain)


def test_gpus_of_a_replica_are_the_processes_of_its_vllm(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, target={"tensor_parallel": 2})
    options = arguments(settings, "name", Path("target"), None)
    assert options[options.index("--tensor-parallel-size") + 1] == "2"
    assert options[options.index("--distributed-executor-backend") + 1] == "mp"


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The drafter or the error of several starts of the stand-in, each in one line, and the log of their process."""
    folder = tmp_path_factory.mktemp("starts")
    python = standin_python(folder)
    broken, good, worse = export(folder, 2, broken=True), export(folder, 1), export(folder / "worse", 1, broken=True)
    cases = {
        "nothing": ([], ""),
        "only broken": ([broken, worse], ""),
        "unknown option": ([good], "--no-such 1"),
        "bad value": ([good], "--max-model-len 0"),
        "second": ([broken, good], "--scheduling-policy priority"),  # the only start in one process that can succeed
    }
    given = [
        (list(map(str, exports)), f"home={folder}", f"engine.vllm.python={python}", f"engine.vllm.args={args}")
        for exports, args in cases.values()
    ]
    done = subprocess.run([str(python), "-c", START, json.dumps(given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {**dict(zip(cases, done.stdout.splitlines(), strict=True)), "log": done.stderr}


def test_first_export_that_starts_is_used(starts: dict[str, str]) -> None:
    assert '/general/1"' in starts["second"]
    assert "vLLM does not start with the drafter" in starts["log"]


def test_scheduling_by_priority_is_read_from_vllm(starts: dict[str, str]) -> None:
    assert starts["second"].startswith("True ")


def test_start_without_any_good_export_fails_with_the_first_error(starts: dict[str, str]) -> None:
    assert starts["only broken"].startswith("OSError ")
    assert starts["only broken"].endswith("/vllm/general/2 is broken")
    assert "there is no exported drafter version" in starts["nothing"]


def test_refused_argument_is_named_in_one_line(starts: dict[str, str]) -> None:
    refusal = "VllmError vLLM refuses engine.vllm.args: "
    assert starts["unknown option"].startswith(f"{refusal}unrecognized arguments")
    assert starts["bad value"] == f"{refusal}max_model_len must be positive"


def test_exports_are_tried_from_the_stable_version_on(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert stable_exports(settings) == []
    for version in (1, 2, 4, 10):
        export(tmp_path, version)
    export(tmp_path, 3).rename(tmp_path / "vllm" / "general" / ".3.unfinished")
    PointerFiles(settings.registry_dir).update("general", lambda _: Rollout(4, None, 0.0, 1.0))
    assert [int(path.name) for path in stable_exports(settings)] == [4, 2, 1, 10]


def test_variables_carry_the_settings_that_capture_reads(tmp_path: Path) -> None:
    capture = {"top_k": 5, "states": "full", "keep_mb": None, "bytes_per_second": 4096, "stream": "s"}
    log = {"format": "json", "file": str(tmp_path / "log")}
    settings = settings_of(
        tmp_path, capture=capture, log=log, serving={"capture_default": False}, trainer={"held_out": 0.3}
    )
    url = "redis://:secret@127.0.0.1:1/0?prefix=p"
    environment = variables(settings, url, canary=False)
    read = load_settings(None, (), environment)
    assert read.capture == settings.capture
    assert read.log == settings.log
    assert read.trainer.held_out == 0.3
    assert read.serving.capture_default is False
    assert read.redis_url == url
    assert environment["OSD_VLLM_REGISTRY"] == str(tmp_path / "registry")
    assert environment["OSD_VLLM_CAPTURE"] == "1"
    assert environment["OSD_VLLM_CANARY"] == "0"
    assert variables(settings_of(tmp_path, capture={"enabled": False}), url, canary=True)["OSD_VLLM_CAPTURE"] == "0"


def test_settings_of_the_starting_process_are_not_inherited() -> None:
    assert inherited({"OSD_REDIS__PASSWORD_FILE": "x", "PATH": "y"}) == ["OSD_REDIS__PASSWORD_FILE"]


def test_runtime_environment_closes_vllms_administration(tmp_path: Path) -> None:
    environment = runtime_env(settings_of(tmp_path))
    assert environment["py_executable"] == "'/an env/bin/python'"  # a shell reads it
    assert environment["env_vars"]["VLLM_SERVER_DEV_MODE"] == "0"
    assert environment["env_vars"]["VLLM_API_KEY"] == ""
    assert "LD_PRELOAD" not in environment["env_vars"]


@pytest.mark.parametrize(
    ("share", "replicas", "canaries"),
    [(0.05, 1, 1), (0.05, 10, 1), (0.25, 4, 1), (0.3, 4, 2), (0.5, 3, 2), (0.0, 2, 0)],
)
def test_canaries_run_in_a_share_of_the_replicas(share: float, replicas: int, canaries: int, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, trainer={"canary_share": share}, serving={"replicas": replicas})
    trying = [tries_canaries(settings, rank) for rank in range(replicas)]
    assert trying == [True] * canaries + [False] * (replicas - canaries)
