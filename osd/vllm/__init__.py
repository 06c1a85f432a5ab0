"""Recall as a custom proposer of vLLM, capture of traces, and updates of vLLM's draft model; see ``docs/vllm.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osd.vllm.proposer import RecallProposer

__all__ = ["RecallProposer"]


def __getattr__(name: str) -> Any:
    """Import ``RecallProposer`` at its first use, because the assembler of traces needs no PyTorch."""
    if name in __all__:
        from osd.vllm.proposer import RecallProposer

        return RecallProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
