"""Sweep the lookahead of a target with a smaller draft model: tokens/s and acceptance for each lookahead.

    python examples/lookahead_sweep.py EleutherAI/pythia-1.4b-deduped EleutherAI/pythia-160m-deduped

Each may be a model of the hub or a local folder, and the draft model may have another tokenizer than the target. It
uses the library without a service: an engine, and a policy for each lookahead. The lookahead affects only the speed;
the greedy answers are always the target's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.streams import answers_of
from osd import drafting
from osd.config import ChainSettings, ConfigError, Settings, load_settings
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.target.files import TargetError
from osd.target.load import load_tokenizer, target_directory

PROMPTS = (
    "The largest planets of the solar system, in order of their size, are",
    "def is_prime(n):\n    ",
    "Once upon a time there was a fisherman who",
    "In mathematics, a group is a set together with an operation that",
)


def engine_of(settings: Settings) -> Engine:
    """Return an engine with the draft model as its drafter, not started."""
    directory = target_directory(settings)
    drafter = drafting.initial(settings.drafter, directory, settings.cache_dir)
    return make_engine(settings, directory, load_tokenizer(directory), InitialDrafter(drafter, 1), None)


def measure(engine: Engine, lookahead: int, tokens: int) -> tuple[float, SpeculationCounts]:
    """Return tokens per second of one stream, prompts included, and the draft counts; lookahead 0 is plain decoding."""
    policy = Policy.of(ChainSettings(depth=lookahead, governed=False)) if lookahead else None
    counts, start = [], time.perf_counter()
    for number, prompt in enumerate(PROMPTS):
        ids = tuple(engine.tokenizer(prompt).input_ids)
        request = Request(
            str(number), ids, tokens, SamplingParams(temperature=0),
            ignore_eos=True, speculate=lookahead > 0, policy=policy,
        )  # fmt: skip
        counts += [answer.counts for answer in answers_of(engine, [request]).values()]
    return len(PROMPTS) * tokens / (time.perf_counter() - start), SpeculationCounts.sum(counts)


def sweep(engine: Engine, lookaheads: Sequence[int], tokens: int) -> Table:
    """Return a table with a row for plain decoding and one for each lookahead."""
    table = Table("lookahead", "tokens/s", "speed-up", "acceptance rate", "mean acceptance length")
    plain = 0.0
    for lookahead in (0, *lookaheads):
        measure(engine, lookahead, min(tokens, 8))  # warm-up
        speed, counts = measure(engine, lookahead, tokens)
        plain = plain or speed
        drafted = (f"{counts.acceptance_rate:.3f}", f"{counts.mean_acceptance_length:.2f}") if lookahead else ("", "")
        table.add_row(str(lookahead or "plain"), f"{speed:.1f}", f"{speed / plain:.2f}", *drafted)
    return table


def main() -> None:
    """Load both models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a model of the hub, or a folder")
    parser.add_argument("draft", help="a smaller model of the hub, or a folder")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="tokens of a draft")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="further settings, as for osd up"
    )
    options = parser.parse_args()
    overrides = [
        f"target.source={options.target}",
        "drafter.kind=language_model",
        f"drafter.source={options.draft}",
        "engine.slots=1",
        "engine.prefix_cache=false",  # each measurement reads the prompts again
        "growth.kind=chain",
        f"growth.depth={max(options.lookahead)}",
        *options.set,
    ]
    try:
        engine = engine_of(load_settings(None, overrides))
    except (ConfigError, TargetError, drafting.DrafterError) as error:
        sys.exit(str(error))
    engine.start()
    try:
        Console().print(sweep(engine, options.lookahead, options.tokens))
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
