"""Where tests of the engine and of models over slots put their models: ``OSD_TEST_DEVICE``, else the CPU."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("OSD_TEST_DEVICE", "cpu"))
