"""Scaling laws: acceptance, speed and payback of a drafter as functions of its size and its traffic."""
