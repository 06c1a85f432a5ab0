"""Correction of vLLM 0.32 on CPUs, which samples drafted positions with wrong settings.

Its replacement of a Triton kernel copies settings such as the temperature from requests to drafted positions. It
converts them to integers and drops the result, so the positions keep the content of unset memory.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def correct_sampling() -> None:
    """Replace the copy in this process, if vLLM is installed and runs on a CPU."""
    with suppress(ImportError):
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.triton_utils import dispatcher  # pyright: ignore[reportMissingImports]
        from vllm.utils import cpu_triton_utils  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu():
            cpu_triton_utils._expand_kernel_impl = expand
            if _KERNEL in dispatcher._registry:
                dispatcher.register_kernels({_KERNEL: expand})


def expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Copy value i of ``values`` to its positions in ``output``, up to ``ends[i]``; one value is replaced."""
    copied = values.masked_fill(values == replace_from, replace_to)
    output.copy_(copied.repeat_interleave(ends.long().diff(prepend=ends.new_zeros(1).long())))
