"""Exported drafters in vLLM's own server, compared with vLLM alone and with our engine and the same chains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import osd
from benchmarks.engines import BenchError
from benchmarks.peers.environments import PeerError, last_error
from benchmarks.peers.measure import AnsweredPrompt
from benchmarks.peers.roster import LOOKUP, PeerModels
from benchmarks.streams import answers_of
from benchmarks.vllm.recall import PLAIN, VllmResult, WayAnswers
from benchmarks.vllm.server import VllmServer, installed
from osd.cli.report import say
from osd.drafting import formats
from osd.drafting.trainable import Trainable
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry

FORMATS = {exported.kind: name for name, exported in formats.FORMATS.items()}
"""Format that vLLM reads, by kind of drafter."""
CLOSE = 0.03
"""Largest difference to our engine's acceptance rate."""
FOLLOWING = (
    *("--worker-extension-cls", "osd.vllm.worker.Osd"),
    *("--middleware", "osd.vllm.middleware.OsdMiddleware"),
)
"""Arguments with which vLLM follows the registry in OSD_VLLM_REGISTRY."""

_DOMAIN = "general"
_SWAP_SECONDS = 120.0


@dataclass(frozen=True)
class ExportedDrafter:
    """Drafter as version 2 of a ``registry``; version 1 has random weights.

    ``first`` and ``second`` are vLLM's ``--speculative-config`` for the exports of the two versions.
    """

    registry: Path
    first: Mapping[str, object]
    second: Mapping[str, object]

    @property
    def depth(self) -> int:
        """Tokens of a chain."""
        return int(str(self.second["num_speculative_tokens"]))

    def activate(self, version: int) -> None:
        """Put a version into service."""
        PointerFiles(self.registry).update(_DOMAIN, lambda _: Rollout(version, None, 0.0, time.time()))


def export(drafter: Trainable, target: Path, folder: Path) -> ExportedDrafter:
    """Export a drafter of the target in ``target`` below ``folder``, and a version with random weights.

    Raises:
        BenchError: vLLM has no format for this drafter.
    """
    if drafter.kind not in FORMATS:
        raise BenchError(f"vLLM loads no {drafter.kind} drafter, only {', '.join(FORMATS)}")
    name, registry, configs = FORMATS[drafter.kind], Registry(folder / "registry"), []
    learnt = {name: weight.clone() for name, weight in drafter.weights().items()}
    try:
        for weights in (_random_weights(learnt), learnt):
            drafter.load_weights(weights)
            number = registry.publish(_DOMAIN, drafter.weights(), drafter.config(), {})
            out = folder / str(number)
            formats.write(drafter, name, formats.ExportOrigin(_DOMAIN, number, str(target), target, LOOKUP), out)
            configs.append(formats.vllm_config(drafter, name, out, LOOKUP))
    except formats.FormatError as error:
        raise BenchError(str(error)) from None
    exported = ExportedDrafter(registry.root, *configs)
    exported.activate(1)
    return exported


def _random_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random floating-point weights; integer tensors, such as the ids of the vocabulary, are unchanged."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.02 * torch.randn(weight.shape, generator=generator) if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }


def measure_engine(engine: Engine, prompts: Sequence[AnsweredPrompt]) -> WayAnswers:
    """Answer the prompts with our engine, one at a time."""
    answers, seconds, counts = [], [], SpeculationCounts()
    greedy = SamplingParams(temperature=0)
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt.prompt, prompt.length, greedy, ignore_eos=True, capture=False)
        start = time.perf_counter()
        (answer,) = answers_of(engine, [request]).values()
        seconds.append(time.perf_counter() - start)
        answers.append(answer.tokens)
        counts.add(answer.counts)
    return WayAnswers(f"osd {osd.__version__}", answers, seconds, counts.drafted, counts.accepted)


def measure_vllm(
    models: PeerModels,
    cache: Path,
    scratch: Path,
    exports: Mapping[str, ExportedDrafter],
    prompts: Sequence[AnsweredPrompt],
) -> dict[str, WayAnswers]:
    """Answer the prompts with vLLM servers, one after another: alone, with each export, and following a registry.

    The last ones start with random weights, and the trained version is put into service while they run. vLLM finds our
    package through the empty folder ``scratch``.

    Raises:
        PeerError: vLLM cannot be installed, does not load an export, or does not run.
    """
    python, environment = installed(models, cache)
    scratch.joinpath("osd").symlink_to(Path(osd.__file__).parent)  # only this package, not its neighbours
    answers_by_way = {}

    def measure(way: str, server: VllmServer) -> None:
        server.complete(prompts[0].prompt, prompts[0].length)  # warm-up
        before = server.counts()
        say(f"{way}: {len(prompts)} prompts")
        results = [server.complete(prompt.prompt, prompt.length) for prompt in prompts]
        after = server.counts()
        seconds, answers = [elapsed for elapsed, _ in results], [ids for _, ids in results]
        drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
        answers_by_way[way] = WayAnswers(server.version, answers, seconds, drafted, accepted)

    for way, config in [(PLAIN, None), *((vllm_way(name), drafter.second) for name, drafter in exports.items())]:
        say(f"{way}: starting")
        with VllmServer(python, models, environment, config) as server:
            measure(way, server)
    for name, drafter in exports.items():
        say(f"{swapped_way(name)}: starting")
        follows = environment | {"PYTHONPATH": str(scratch), "OSD_VLLM_REGISTRY": str(drafter.registry)}
        with VllmServer(python, models, follows, drafter.first, FOLLOWING) as server:
            server.complete(prompts[0].prompt, prompts[0].length)
            drafter.activate(2)
            await_version(server, 2)
            measure(swapped_way(name), server)
    return answers_by_way


def await_version(server: VllmServer, version: int) -> None:
    """Wait until a vLLM that follows a registry drafts with a version.

    Raises:
        PeerError: the version is not loaded within two minutes.
    """
    end = time.monotonic() + _SWAP_SECONDS
    while server.scrape().sum("osd_draft_version") != version:
        if time.monotonic() > end:
            raise PeerError(
                f"version {version} is not loaded within {_SWAP_SECONDS:.0f} s: {last_error(server.output())}"
            )
        time.sleep(0.1)


def vllm_way(name: str) -> str:
    """Return the name of vLLM started with an export."""
    return f"vllm with {name}"


def swapped_way(name: str) -> str:
    """Return the name of vLLM that loaded an export while running."""
    return f"vllm with {name}, swapped in"


def engine_way(name: str) -> str:
    """Return the name of our engine with the same drafter."""
    return f"osd with {name}"


def rows(engine_answers: Mapping[str, WayAnswers], vllm_answers: Mapping[str, WayAnswers]) -> list[VllmResult]:
    """Return the figures of vLLM alone, then of each drafter in vLLM and in our engine."""
    plain = vllm_answers[PLAIN]
    results = [plain.row(PLAIN, plain)]
    for name, answers in engine_answers.items():
        ways = [way for way in (vllm_way(name), swapped_way(name)) if way in vllm_answers]
        results += [*(vllm_answers[way].row(way, plain) for way in ways), answers.row(engine_way(name), plain)]
    return results


def differences(results: Sequence[VllmResult], prompts: int) -> list[str]:
    """Return messages about answers that differ from vLLM's and acceptance that differs from our engine's."""
    by_way, messages = {row.way: row for row in results}, list[str]()
    for row in results:
        if row.same < prompts:
            messages.append(
                f"{row.way} gave {prompts - row.same} of {prompts} answers that {PLAIN} alone does not give"
            )
    for engine in results:
        name = engine.way.removeprefix(engine_way(""))
        for row in (by_way[way] for way in (vllm_way(name), swapped_way(name)) if way in by_way):
            if abs(row.acceptance - engine.acceptance) > CLOSE:
                text = f"{row.way} accepts {row.acceptance:.3f} of its drafts"
                messages.append(f"{text}, and {engine.way} {engine.acceptance:.3f}")
    return messages
