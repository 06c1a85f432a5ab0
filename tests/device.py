"""Where tests of the engine and of models over slots put their models: ``OSD_TEST_DEVICE``, else the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device(os.environ.get("OSD_TEST_DEVICE", "cpu"))


def only_on_a_cpu(why: str) -> pytest.MarkDecorator:
    """Leave a test out where the models are on a GPU."""
    return pytest.mark.skipif(DEVICE.type != "cpu", reason=why)


@contextmanager
def nothing_may_wait() -> Iterator[None]:
    """Whatever waits for a GPU fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
