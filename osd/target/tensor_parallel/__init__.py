"""Tensor-parallel target, divided among the GPUs of one node by attention heads and MLP columns.

Shoeybi et al., "Megatron-LM", 2019 (arXiv 1909.08053): of two consecutive matrices the first is divided by its outputs
and the second by its inputs, so that one sum over all processes ends each half of a layer.
"""
