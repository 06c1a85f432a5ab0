"""Measurements for one GPU: ``python -m benchmarks.gpu``, see ``benchmarks/gpu.md``.

They need neither Ray nor a downloaded model, and run on a CPU with ``--small`` shapes.
"""
