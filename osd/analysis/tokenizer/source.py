"""Read the vocabulary that a source names: a file, a directory, or a model as ``target.source`` names it."""

from __future__ import annotations

from pathlib import Path

from osd.target.load import Report, TargetError, resolve_tokenizer
from osd.target.vocabulary import Vocabulary, VocabularyError


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
    return Vocabulary.read(path, label, source)
