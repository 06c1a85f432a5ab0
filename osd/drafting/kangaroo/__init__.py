"""Kangaroo as drafter: the target's own first layers, and a small adapter behind them."""
