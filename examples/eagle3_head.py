"""Measure an EAGLE-3 head that was trained elsewhere, and import it as a drafter version.

    python examples/eagle3_head.py HEAD --target TARGET

HEAD is in the format of the speculators library, which vLLM serves without flags: a folder or a model of the hub, with
a ``config.json`` that has ``speculators_config``, and a ``model.safetensors``. TARGET is the model that the head was
trained for. The last line of the output explains how to put the version into service, where it learns from traffic like
any other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from benchmarks.streams import answers_of
from osd.cli.drafters import import_drafter
from osd.config import ConfigError, Settings, load_settings
from osd.drafting import DrafterError, formats
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.target.files import TargetError
from osd.target.load import load_tokenizer, target_directory

PROMPTS = (
    "The largest planets of the solar system, in order of their size, are",
    "def is_prime(n):\n    ",
    "Once upon a time there was a fisherman who",
)

ALONE = ("drafter.kind=eagle", "growth.kind=chain", "growth.governed=false")
"""The head drafts three tokens in each decoding step, without a governor and without recall."""


def drafts_of(settings: Settings, head: Path, tokens: int) -> SpeculationCounts:
    """Return the draft counts of a head, after its weights, names and shapes are checked."""
    directory = target_directory(settings)
    tokenizer = load_tokenizer(directory)
    _, drafter = formats.read(head, directory)
    engine = make_engine(settings, directory, tokenizer, InitialDrafter(drafter, 1), None)
    engine.start()
    try:
        requests = [
            Request(str(number), tuple(tokenizer(prompt).input_ids), tokens, SamplingParams(temperature=0))
            for number, prompt in enumerate(PROMPTS)
        ]
        return SpeculationCounts.sum(answer.counts for answer in answers_of(engine, requests).values())
    finally:
        engine.stop()


def main() -> None:
    """Measure the head, then import it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="a folder, or a model of the hub")
    parser.add_argument("--target", required=True, help="a model of the hub, or a folder")
    parser.add_argument("--tokens", type=int, default=96, help="limit of each answer")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="further settings, as for osd up"
    )
    options = parser.parse_args()
    overrides = [f"target.source={options.target}", *options.set]
    head = Path(options.head).expanduser()
    if not head.is_dir():
        head = Path(snapshot_download(options.head, allow_patterns=["config.json", "*.safetensors"]))
    try:
        counts = drafts_of(load_settings(None, [*overrides, *ALONE]), head, options.tokens)
    except (ConfigError, TargetError, DrafterError, formats.FormatError) as error:
        sys.exit(str(error))
    length = counts.mean_acceptance_length
    print(f"{counts.accepted} of {counts.drafted} drafted tokens accepted, mean acceptance length {length:.2f};")
    for depth, accepted in enumerate(counts.accepted_per_position, 1):
        print(
            f"  token {depth} of a draft accepted in {accepted / counts.rounds:.3f} of {counts.rounds} decoding steps"
        )
    import_drafter(head, overrides=overrides)


if __name__ == "__main__":
    main()
