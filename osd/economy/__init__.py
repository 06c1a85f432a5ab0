"""Measured speed-up of drafting, and the budget for the time that drafting may lose."""
