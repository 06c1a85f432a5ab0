"""Checks of a target's files before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_ADVICE = "name the checkpoint with full weights, or a .gguf file"


class TargetError(ValueError):
    """Error of a target that cannot be loaded; its message is one line and names the setting to change."""


def one_line(error: object) -> str:
    """Return the beginning of an error's message on one line."""
    return " ".join(str(error).split())[:300]


def check_files(directory: Path, source: str, runs_here: bool = True) -> None:
    """Check configuration and weights of a directory.

    Args:
        directory: the directory.
        source: its name in messages.
        runs_here: whether our own engine runs the model; another engine reads more kinds of models and weights.

    Raises:
        TargetError: a file is missing or damaged; with ``runs_here`` also for a model of another kind, or that is
            quantised.
    """
    config = _read(directory, source)
    if runs_here:
        if method := quantisation(config):
            raise TargetError(f"target.source: {source} is quantised by {method}, which osd does not read: {_ADVICE}")
        _check_kind(config, source)
    _check_weights(directory, source)


def quantisation(config: dict[str, Any]) -> str:
    """Return the method that quantised the weights of a model with these fields in ``config.json``, "" for none."""
    quantised = config.get("quantization_config")
    if not quantised:
        return ""
    return str(quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised)


def _read(directory: Path, source: str) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (directory / _ADAPTER).is_file():
            raise TargetError(
                f"target.source: {source} is an adapter{_base(directory)}: merge it into its base model, "
                "and name the directory with the merged weights"
            ) from None
        raise TargetError(f"target.source: {source} holds no config.json") from None
    except (OSError, ValueError) as error:
        raise TargetError(f"target.source: config.json of {source} is not JSON: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise TargetError(f"target.source: config.json of {source} is not a JSON object")
    return config


def _base(directory: Path) -> str:
    """Return the name of an adapter's base model for a message, empty if it is not known."""
    try:
        base = json.loads((directory / _ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" of {base}" if base else ""


def _check_kind(config: dict[str, Any], source: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    kinds = config.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""), "")]
    if config.get("is_encoder_decoder") or kinds[0] not in names:
        raise TargetError(f"target.source: {source} is {kinds[0] or 'of unknown kind'}, not a decoder-only model")


def _check_weights(directory: Path, source: str) -> None:
    from safetensors import SafetensorError, safe_open

    files = {path.name for path in directory.glob("*.safetensors")}
    if "model.safetensors" not in files and (directory / _INDEX).is_file():
        missing = sorted(_shards(directory, source) - files)
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise TargetError(f"target.source: {source} lacks {missing[0]}{more}, which {_INDEX} names: fetch it again")
    if not files:
        raise TargetError(f"target.source: {source} holds no weights as safetensors")
    for name in sorted(files):
        file = directory / name
        try:
            with safe_open(file, "numpy"):
                continue
        except (SafetensorError, OSError) as error:
            if _is_pointer(file):
                raise TargetError(
                    f"target.source: {name} of {source} is a pointer of Git LFS instead of weights: run `git lfs pull`"
                ) from None
            raise TargetError(f"target.source: {name} of {source} is damaged: {one_line(error)}") from None


def _shards(directory: Path, source: str) -> set[str]:
    """Return the names of the files that the index names."""
    try:
        return set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"target.source: {_INDEX} of {source} is damaged: {one_line(error)}") from None


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
