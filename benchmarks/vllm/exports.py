"""Exported drafters in vLLM's own server, compared with vLLM alone and with our engine that drafts the same chains."""

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
from benchmarks.peers.measure import Asked
from benchmarks.peers.roster import LOOKUP, Models
from benchmarks.streams import answers_of
from benchmarks.vllm.recall import PLAIN, Answered, Row
from benchmarks.vllm.server import Server, installed
from osd.cli.report import say
from osd.drafting import formats
from osd.drafting.trainable import Trainable
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry

FORMATS = {one.kind: name for name, one in formats.FORMATS.items()}
"""By kind of drafter the format that vLLM reads."""
CLOSE = 0.03
"""How far the acceptance rate may be from ours."""
FOLLOWING = (
    *("--worker-extension-cls", "osd.vllm.draft_weights.DraftWeights"),
    *("--middleware", "osd.vllm.rollout.RolloutFollower"),
)
"""What makes vLLM follow the registry that OSD_VLLM_REGISTRY names."""

_DOMAIN = "general"
_SWAP_SECONDS = 120.0


@dataclass(frozen=True)
class Export:
    """A drafter as version 2 of a ``registry``, behind a version without what it learnt.

    ``first`` and ``second`` are what vLLM is told to draft with the one or the other, as they were exported.
    """

    registry: Path
    first: Mapping[str, object]
    second: Mapping[str, object]

    @property
    def depth(self) -> int:
        """Tokens of a chain."""
        return int(str(self.second["num_speculative_tokens"]))

    def put(self, version: int) -> None:
        """Put a version in service."""
        PointerFiles(self.registry).update(_DOMAIN, lambda _: Rollout(version, None, 0.0, time.time()))


def export(drafter: Trainable, target: Path, folder: Path) -> Export:
    """Write a drafter below ``folder``, and one like it that knows nothing; whose target is in ``target``.

    Raises:
        BenchError: no format that vLLM reads has it.
    """
    if drafter.kind not in FORMATS:
        raise BenchError(f"vLLM loads no {drafter.kind} drafter, only {', '.join(FORMATS)}")
    name, registry, configs = FORMATS[drafter.kind], Registry(folder / "registry"), []
    learnt = {name: weight.clone() for name, weight in drafter.weights().items()}
    try:
        for weights in (_noise(learnt), learnt):
            drafter.load_weights(weights)
            number = registry.publish(_DOMAIN, drafter.weights(), drafter.config(), {})
            out = folder / str(number)
            formats.write(drafter, name, formats.ExportOrigin(_DOMAIN, number, str(target), target, LOOKUP), out)
            configs.append(formats.vllm_config(drafter, name, out, LOOKUP))
    except formats.FormatError as error:
        raise BenchError(str(error)) from None
    made = Export(registry.root, *configs)
    made.put(1)
    return made


def _noise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random numbers where there are real ones; which ids may be drafted stays."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.02 * torch.randn(weight.shape, generator=generator) if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }


def ours(engine: Engine, asked: Sequence[Asked]) -> Answered:
    """Our engine on the prompts, one at a time."""
    answers, seconds, counts = [], [], SpeculationCounts()
    greedy = SamplingParams(temperature=0)
    for number, one in enumerate(asked):
        request = Request(str(number), one.prompt, one.answer, greedy, ignore_eos=True, capture=False)
        begun = time.perf_counter()
        (answer,) = answers_of(engine, [request]).values()
        seconds.append(time.perf_counter() - begun)
        answers.append(answer.tokens)
        counts.add(answer.counts)
    return Answered(f"osd {osd.__version__}", answers, seconds, counts.drafted, counts.accepted)


def theirs(
    models: Models,
    home: Path,
    scratch: Path,
    exports: Mapping[str, Export],
    asked: Sequence[Asked],
) -> dict[str, Answered]:
    """Servers of vLLM on the prompts, one after the other: alone, started with each export, and following a registry.

    The last are started without what was learnt, which is put in service while they run.

    Args:
        models: what they decode with.
        home: where vLLM's environment is, or is made.
        scratch: an empty folder, through which vLLM finds our package.
        exports: drafters by name.
        asked: the prompts.

    Raises:
        PeerError: vLLM cannot be installed, does not load an export, or does not run.
    """
    python, environment = installed(models, home)
    scratch.joinpath("osd").symlink_to(Path(osd.__file__).parent)  # its neighbours are not for vLLM's environment
    found = {}

    def measure(way: str, server: Server) -> None:
        server.complete(asked[0].prompt, asked[0].answer)  # what is made once is not measured
        before = server.counts()
        say(f"{way}: {len(asked)} prompts")
        answered = [server.complete(one.prompt, one.answer) for one in asked]
        after = server.counts()
        seconds, answers = [spent for spent, _ in answered], [ids for _, ids in answered]
        drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
        found[way] = Answered(server.version, answers, seconds, drafted, accepted)

    for way, config in [(PLAIN, None), *((way_of(name), one.second) for name, one in exports.items())]:
        say(f"{way}: starting")
        with Server(python, models, environment, config) as server:
            measure(way, server)
    for name, one in exports.items():
        say(f"{swapped_of(name)}: starting")
        follows = environment | {"PYTHONPATH": str(scratch), "OSD_VLLM_REGISTRY": str(one.registry)}
        with Server(python, models, follows, one.first, FOLLOWING) as server:
            server.complete(asked[0].prompt, asked[0].answer)
            one.put(2)
            await_version(server, 2)
            measure(swapped_of(name), server)
    return found


def await_version(server: Server, version: int) -> None:
    """Return when a vLLM that follows a registry drafts with a version.

    Raises:
        PeerError: it does not within two minutes.
    """
    end = time.monotonic() + _SWAP_SECONDS
    while server.scrape().sum("osd_draft_version") != version:
        if time.monotonic() > end:
            raise PeerError(
                f"version {version} is not loaded within {_SWAP_SECONDS:.0f} s: {last_error(server.said())}"
            )
        time.sleep(0.1)


def way_of(name: str) -> str:
    """What vLLM that was started with an export is called."""
    return f"vllm with {name}"


def swapped_of(name: str) -> str:
    """What vLLM is called that was given it while it ran."""
    return f"vllm with {name}, swapped in"


def ours_of(name: str) -> str:
    """What our engine with the same drafter is called."""
    return f"osd with {name}"


def rows(mine: Mapping[str, Answered], others: Mapping[str, Answered]) -> list[Row]:
    """One for each way: vLLM alone, then each drafter there and in our engine."""
    plain = others[PLAIN]
    found = [plain.row(PLAIN, plain)]
    for name, answered in mine.items():
        ways = [way for way in (way_of(name), swapped_of(name)) if way in others]
        found += [*(others[way].row(way, plain) for way in ways), answered.row(ours_of(name), plain)]
    return found


def differences(found: Sequence[Row], prompts: int) -> list[str]:
    """What does not hold of so many prompts: answers that are not vLLM's own, acceptance that is not ours."""
    by_way, wrong = {row.way: row for row in found}, list[str]()
    for row in found:
        if row.same < prompts:
            wrong.append(f"{row.way} gave {prompts - row.same} of {prompts} answers that {PLAIN} alone does not give")
    for mine in found:
        name = mine.way.removeprefix(ours_of(""))
        for row in (by_way[way] for way in (way_of(name), swapped_of(name)) if way in by_way):
            if abs(row.acceptance - mine.acceptance) > CLOSE:
                said = f"{row.way} accepts {row.acceptance:.3f} of its drafts"
                wrong.append(f"{said}, and {mine.way} {mine.acceptance:.3f}")
    return wrong
