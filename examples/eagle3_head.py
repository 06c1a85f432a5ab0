"""Take an EAGLE-3 head that was trained elsewhere: see how it drafts here, and import it as a drafter version.

    python examples/eagle3_head.py HEAD --target TARGET

HEAD is what the speculators library writes, and what vLLM serves without flags: a folder, or a model of the hub, with a
``config.json`` that has ``speculators_config``, and a ``model.safetensors``. TARGET is the model that it was trained
for. The last line says how the version comes into service; from then on it learns from traffic like any other.
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
from osd.engine.build import Start, make_engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.target.load import TargetError, load_tokenizer, target_directory

PROMPTS = (
    "The largest planets of the solar system, in order of their size, are",
    "def is_prime(n):\n    ",
    "Once upon a time there was a fisherman who",
)

ALONE = ("drafter.kind=eagle", "growth.kind=chain", "growth.governed=false")
"""It drafts three tokens in each round, whether that pays or not, and nothing is recalled beside it."""


def drafts_of(settings: Settings, head: Path, tokens: int) -> SpeculationCounts:
    """What becomes of the drafts of a head, whose weights, names and shapes are checked before any is used."""
    directory = target_directory(settings)
    tokenizer = load_tokenizer(directory)
    _, drafter = formats.read(head, directory)
    engine = make_engine(settings, directory, tokenizer, Start(drafter, 1), None)
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
    """Draft with it, then import it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="a folder, or a model of the hub")
    parser.add_argument("--target", required=True, help="a model of the hub, or a folder")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer at most")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="further settings, as of osd up"
    )
    given = parser.parse_args()
    overrides = [f"target.source={given.target}", *given.set]
    head = Path(given.head).expanduser()
    if not head.is_dir():
        head = Path(snapshot_download(given.head, allow_patterns=["config.json", "*.safetensors"]))
    try:
        counts = drafts_of(load_settings(None, [*overrides, *ALONE]), head, given.tokens)
    except (ConfigError, TargetError, DrafterError, formats.FormatError) as error:
        sys.exit(str(error))
    print(f"{counts.accepted} of {counts.drafted} drafted tokens kept, {counts.mean_acceptance_length:.2f} a round;")
    for depth, accepted in enumerate(counts.accepted_per_position, 1):
        print(f"  token {depth} of a draft in {accepted / counts.rounds:.3f} of {counts.rounds} rounds")
    import_drafter(head, overrides=overrides)


if __name__ == "__main__":
    main()
