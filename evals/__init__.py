"""Evaluation of the window operations on a model: tasks, arms, samples, scores and reports.

Generating and scoring are separate: `ctxwin.evals.run` appends one line per (task, arm, item) to ``samples.jsonl``, and
`ctxwin.evals.score` makes every figure from that file without a model. Nothing here is imported by ``import ctxwin``.
"""

from __future__ import annotations
