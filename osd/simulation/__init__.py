"""Discrete-event simulation of a deployment: its traffic, storage, training, savings and cost."""
