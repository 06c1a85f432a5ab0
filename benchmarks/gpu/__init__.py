"""What is to be measured on a GPU: ``python -m benchmarks.gpu``, see ``benchmarks/gpu.md``.

It needs neither Ray nor a model that must be fetched, and runs on a CPU with ``--small`` shapes.
"""
