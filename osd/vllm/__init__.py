"""Recall as a custom proposer of vLLM and updates of vLLM's draft model; see ``docs/vllm.md``."""

from osd.vllm.proposer import RecallProposer

__all__ = ["RecallProposer"]
