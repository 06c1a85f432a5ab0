"""Check of a model for ``osd doctor MODEL``: files, architecture, tokenizer, and a forward against transformers.

With ``engine.kind=vllm`` it checks the files and what a drafter needs, because vLLM checks the rest at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from deploy.doctor.findings import Finding
from osd.config import Settings, TargetSettings
from osd.runtime.model import SlotModel, runs_own_code
from osd.target.comparison import check_forward
from osd.target.context import describe_context
from osd.target.ends import check_sizes, load_ends
from osd.target.files import TargetError
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model, load_served

_PLACES = 64


def model_findings(settings: Settings, source: str) -> Iterator[Finding]:
    """Yield each finding on the model ``source`` as soon as it is known; the first failure is the last finding."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    target = settings.target.model_copy(update={"source": source})
    check = "files"
    try:
        settings = settings.model_copy(update={"target": target})
        directory = target_directory(settings)
        if settings.engine.kind == "vllm":
            yield Finding(check, "ok", f"{_describe_files(directory)}; vLLM checks the architecture at its start")
            if settings.drafts:
                check = "drafter"
                yield Finding(check, "ok", _describe_ends(directory))
            return
        yield Finding(check, "ok", f"{_describe_files(directory)}; osd supports the architecture")
        check = "tokenizer"
        yield Finding(check, "ok", _describe_tokenizer(directory))
        yield Finding("context", "ok", describe_context(settings, directory))
        check = "forward"
        yield Finding(check, "ok", _compare(directory, target))
    except TargetError as error:
        yield Finding(check, "failure", str(error))


def _describe_files(directory: Path) -> str:
    files = list(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return f"safetensors: {len(files)}, {size / (1 << 20):,.0f} MiB"


def _describe_ends(directory: Path) -> str:
    load_ends(directory)
    config = check_sizes(directory)
    sizes = f"{config.num_hidden_layers} layers of {config.hidden_size:,} numbers, {config.vocab_size:,} tokens"
    return f"embedding and head can be read: {sizes}"


def _describe_tokenizer(directory: Path) -> str:
    tokenizer = load_tokenizer(directory)
    return f"{len(tokenizer):,} tokens; answers end with {tokenizer.eos_token or 'no token of its own'}"


def _compare(directory: Path, settings: TargetSettings) -> str:
    served = load_served(directory, settings.dtype, settings.device)
    own_code = runs_own_code(served)
    target = SlotModel(served, slots=2, context=_PLACES, scratch=8)
    model = served if own_code else load_model(directory, settings.dtype, settings.device)
    check_forward(target, model)
    return f"the logits of {type(model).__name__} are those of transformers"
