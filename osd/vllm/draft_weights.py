"""New weights for vLLM's draft model, in place and between two steps: ``--worker-extension-cls`` names this class."""

from __future__ import annotations

import threading
from typing import Any

from osd.registry.versions import VersionError
from osd.vllm.published import Checkpoint, Published
from osd.vllm.settings import VllmSettings


class _Reading:
    """A version that a thread reads from the registry while vLLM goes on."""

    def __init__(self, published: Published, number: int) -> None:
        self._published, self.number = published, number
        self.checkpoint: Checkpoint | None = None
        self.problem = ""
        self._thread = threading.Thread(target=self._read, name="osd-draft-weights", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            self.checkpoint = self._published.checkpoint(self.number)
        except (VersionError, OSError, ValueError) as error:
            self.problem = " ".join(str(error).split())


class DraftWeights:
    """What vLLM's workers can do beside their own: ``osd.vllm.rollout`` asks them by ``collective_rpc``.

    vLLM carries such calls out between two steps. Each worker reads the registry itself; whoever calls names a version
    and gives no weights.
    """

    speculative_config: Any
    vllm_config: Any
    _osd_published: Published | None = None
    _osd_reading: _Reading | None = None

    def osd_read_draft(self, number: int) -> None:
        """Begin to read a version of the registry, on a thread of its own."""
        if self._osd_published is None:
            self._osd_published = Published(VllmSettings.from_environment(), self.speculative_config.model)
        self._osd_reading = _Reading(self._osd_published, number)

    def osd_draft_read(self, number: int) -> str | None:
        """Why the version cannot be loaded, "" where nothing is wrong with it, None while it is being read."""
        reading = self._osd_reading
        if reading is None or reading.number != number:
            return f"version {number} was not read"
        return reading.problem if reading.done else None

    def osd_load_draft(self, number: int) -> str:
        """Load what was read; returns the hash of its weights.

        Raises:
            RuntimeError: it was not read, or vLLM has no draft model.
        """
        reading, draft = self._osd_reading, self.get_draft_model()  # type: ignore[attr-defined] - the worker's
        if reading is None or reading.number != number or reading.checkpoint is None or draft is None:
            raise RuntimeError(f"version {number} cannot be loaded: it was not read, or there is no draft model")
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self.vllm_config):
            reload.initialize_layerwise_reload(draft)
            try:
                draft.load_weights(reading.checkpoint.tensors.items())
            finally:
                # Until then the layers, those that the target shares too, hold nothing.
                reload.finalize_layerwise_reload(draft, self.speculative_config.draft_model_config)
        self._osd_reading = None
        return reading.checkpoint.sha256
