"""Completions that a controller may stop, and lossy answers, whose tokens leave the target early.

Sun et al., "When Neural Code Completion Models Size up the Situation", ICSE 2024 (arXiv 2401.09964). The text stops
before a token where, behind some layer, STOP is the controller's first choice and more probable than the request's
threshold. The first token of an answer is never judged. ``osd.runtime.leaving`` runs the rows that leave early.

The rest of the engine knows four things of this: ``Request.is_exact``, ``Sequence.completion``, ``EarlyAnswers``, and
how many layers were skipped.
"""

from osd.engine.completion.state import Completing, Completion, Judged, Skipped

__all__ = ["Completing", "Completion", "Judged", "Skipped"]
