"""Recall, and beside it a trained drafter that is asked where that is expected to pay."""
