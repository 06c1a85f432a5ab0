"""Models in the file formats of peers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf

from osd.drafting.language_model.drafter import LanguageModel
from osd.target.model import DTYPES


def write_drafter(drafter: LanguageModel, dtype: str, directory: Path) -> Path:
    """Write a drafter into ``directory`` as a transformers model in ``dtype``, and return ``directory``."""
    model: Any = copy.deepcopy(drafter.model).to(DTYPES[dtype])
    model.save_pretrained(directory)
    return directory


def write_first_layers(source: Path, layers: int, file: Path) -> Path:
    """Write the first ``layers`` layers of a GGUF model with its embedding and head, and return ``file``.

    All tensors keep the quantisation of ``source``.
    """
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(file, architecture)
    depth = f"{architecture}.block_count"
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        value = layers if name == depth else field.contents()
        writer.add_key_value(name, value, kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
