"""Worker extension of vLLM that captures traces while vLLM speculates."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osd.vllm.capture_session import CaptureSession

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only


class Capture:
    """Methods that vLLM adds to its workers; ``osd.vllm.capture_control`` calls them with ``collective_rpc``."""

    vllm_config: Any
    model_runner: Any
    _osd_session: CaptureSession | None = None

    def osd_capture_start(self) -> str | None:
        """Start to capture, unless this worker does already.

        Returns:
            "" after a start, the reason in one sentence when the worker cannot capture, or None when another worker of
            the same model captures.
        """
        if self._osd_session is not None:
            return ""
        try:
            if not _has_results():
                return None
            # Imported here, so that a package that is missing only prevents capture.
            from osd.vllm.capture_session import CaptureSession

            self._osd_session = CaptureSession.start(self.vllm_config, self.model_runner)
        except (ValueError, OSError, ImportError) as error:
            return " ".join(str(error).split())
        except Exception as error:  # capture never stops vLLM
            log.exception("capture does not start")
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return ""

    def osd_capture_counts(self) -> dict[str, int]:
        """Return the counts since the last call; empty for a worker that does not capture."""
        return {} if self._osd_session is None else self._osd_session.counts()


def _has_results() -> bool:
    """Return whether this worker has the results of its model: it is the first of the last pipeline stage."""
    from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

    return parallel_state.get_tp_group().is_first_rank and parallel_state.get_pp_group().is_last_rank
