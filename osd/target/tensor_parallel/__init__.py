"""A target whose layers are divided among the GPUs of one node, by the heads and columns of their weights.

Shoeybi et al., "Megatron-LM", 2019 (arXiv 1909.08053): of two matrices that follow one another the first is divided by
its outputs and the second by its inputs, so that one sum over all processes ends each half of a layer.
"""
