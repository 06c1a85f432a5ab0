"""Worker extension of vLLM (``--worker-extension-cls``) that captures traces and replaces draft weights in place."""

from __future__ import annotations

from osd.vllm.capture import Capture
from osd.vllm.cpu_sampling import correct_sampling
from osd.vllm.draft_weights import DraftWeights

correct_sampling()  # the worker imports this module before it decodes


class Osd(DraftWeights, Capture):
    """All methods that osd adds to vLLM's workers."""

    def osd_load_draft(self, number: int) -> str:
        """Load the version that was read; see ``DraftWeights``."""
        sha256 = super().osd_load_draft(number)
        if self._osd_session is not None:
            self._osd_session.recorder.version = number
        return sha256
