"""Execution of models: packed forwards over KV slots, attention, linear layers, kernels, CUDA graphs."""
