"""Where a model computes."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """Resolve "auto" to the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
