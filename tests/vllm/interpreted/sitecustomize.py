"""Backend with which Triton runs its kernels in Python, so that vLLM's second model runner works on a CPU."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class _Backend:
        driver, compiler = _Driver, None

    triton.backends.backends.setdefault("cpu", _Backend)
