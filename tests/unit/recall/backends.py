"""Backends of recall that run on this machine."""

from __future__ import annotations

import pytest

from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.native import quick_kernels

needs_kernels = pytest.mark.skipif(quick_kernels() is None, reason="the kernels were not built, or this CPU lacks AVX2")
BACKENDS = [pytest.param(NativeBackend(), id="kernel", marks=needs_kernels), pytest.param(PlainBackend(), id="python")]
