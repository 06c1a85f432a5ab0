"""Device of tests that put models on a device: ``OSD_TEST_DEVICE``, or the CPU by default."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device(os.environ.get("OSD_TEST_DEVICE", "cpu"))


def skip_unless_cpu(why: str) -> pytest.MarkDecorator:
    """Skip a test when the models are on a GPU."""
    return pytest.mark.skipif(DEVICE.type != "cpu", reason=why)


@contextmanager
def forbid_device_waits() -> Iterator[None]:
    """Fail on any operation that waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that the debug mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
