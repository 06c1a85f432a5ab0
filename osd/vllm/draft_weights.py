"""Worker extension of vLLM (``--worker-extension-cls``) that replaces the weights of the draft model in place."""

from __future__ import annotations

import threading
from typing import Any

from osd.registry.versions import VersionError
from osd.vllm.published import Checkpoint, PublishedDrafter
from osd.vllm.settings import VllmSettings


class _VersionReader:
    """Thread that reads a version from the registry while vLLM decodes."""

    def __init__(self, published: PublishedDrafter, number: int) -> None:
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
    """Methods that vLLM adds to its workers; ``osd.vllm.rollout`` calls them with ``collective_rpc``.

    vLLM runs such calls between two steps. A call names a version, and each worker reads its weights from the registry.
    """

    speculative_config: Any
    vllm_config: Any
    _osd_published: PublishedDrafter | None = None
    _osd_reader: _VersionReader | None = None

    def osd_read_draft(self, number: int) -> None:
        """Start to read a version from the registry in a thread."""
        if self._osd_published is None:
            self._osd_published = PublishedDrafter(VllmSettings.from_environment(), self.speculative_config.model)
        self._osd_reader = _VersionReader(self._osd_published, number)

    def osd_draft_read(self, number: int) -> str | None:
        """Return the problem of the version, "" without a problem, or None while it is being read."""
        reader = self._osd_reader
        if reader is None or reader.number != number:
            return f"version {number} was not read"
        return reader.problem if reader.done else None

    def osd_load_draft(self, number: int) -> str:
        """Load the version that was read, and return the SHA-256 hash of its weights.

        Raises:
            RuntimeError: the version was not read, or vLLM has no draft model.
        """
        reader, draft = self._osd_reader, self.get_draft_model()  # type: ignore[attr-defined] - a worker's method
        if reader is None or reader.number != number or reader.checkpoint is None or draft is None:
            raise RuntimeError(f"version {number} cannot be loaded: it was not read, or there is no draft model")
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self.vllm_config):
            reload.initialize_layerwise_reload(draft)
            try:
                draft.load_weights(reader.checkpoint.tensors.items())
            finally:
                # Before this call the layers, including those shared with the target, have no weights.
                reload.finalize_layerwise_reload(draft, self.speculative_config.draft_model_config)
        self._osd_reader = None
        return reader.checkpoint.sha256
