"""Read the vocabulary that a source names: a file, a directory, or a model as ``target.source`` names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from osd.analysis.tokenizer.vocabulary import Vocabulary, VocabularyError
from osd.target.load import Report, TargetError, load_gguf_tokenizer, load_tokenizer, resolve_tokenizer

_FILE = "tokenizer.json"
_OTHERS = ("*.model", "vocab.*", "merges.txt")


def read(source: str, label: str, home: Path, report: Report = lambda step: None) -> Vocabulary:
    """The vocabulary of ``source``, under a name; what is fetched is kept as ``resolve`` does under ``home``.

    Raises:
        VocabularyError: there is no such source, or it holds no tokenizer that can be read.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix == ".json" or source.startswith((".", "/", "~"))):
        raise VocabularyError(f"there is no file or directory {source}")
    if not path.is_file() or path.suffix == ".gguf":
        try:
            path = resolve_tokenizer(source, home, report)
        except TargetError as error:
            raise VocabularyError(str(error).removeprefix("target.source: ")) from None
    tokenizer = _from_model(path, source) if path.is_dir() or path.suffix == ".gguf" else _from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Vocabulary.of(label, tokenizer)


def _from_file(path: Path) -> Tokenizer:
    try:
        data = path.read_bytes()
        described = json.loads(data)
    except OSError as error:
        raise VocabularyError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # JSON, or the UTF-8 that it must be
        raise VocabularyError(f"{path} is not JSON: {error}") from None
    if not (isinstance(described, dict) and isinstance(described.get("model"), dict) and "vocab" in described["model"]):
        raise VocabularyError(f"{path} is no {_FILE}: it has no model.vocab")
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises no other
        raise VocabularyError(f"{path} is no {_FILE} that can be read: {error}") from None


def _from_model(path: Path, source: str) -> Tokenizer:
    """The tokenizer of a directory or a GGUF file, which transformers reads where there is no ``tokenizer.json``."""
    if (path / _FILE).is_file():
        return _from_file(path / _FILE)
    if path.is_dir() and not any(file for pattern in _OTHERS for file in path.glob(pattern)):
        raise VocabularyError(f"{source} holds no {_FILE}, and no other file of a tokenizer")
    from transformers.utils import logging

    logging.set_verbosity_error()  # what it tries in vain is told by its error
    try:
        found: Any = load_gguf_tokenizer(path) if path.suffix == ".gguf" else load_tokenizer(path)
    except TargetError as error:
        raise VocabularyError(str(error).removeprefix("target.source: ")) from None
    if not hasattr(found, "backend_tokenizer"):
        raise VocabularyError(f"{source} holds a tokenizer that cannot be written as {_FILE}")
    return found.backend_tokenizer
