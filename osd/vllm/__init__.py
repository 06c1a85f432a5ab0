"""Recall as a proposer of vLLM: ``--speculative-config '{"method": "custom_class", ...}'``; see ``docs/vllm.md``."""

from osd.vllm.proposer import RecallProposer

__all__ = ["RecallProposer"]
