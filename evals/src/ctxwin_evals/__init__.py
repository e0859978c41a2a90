"""Evaluation of the window operations on a model: tasks, arms, samples, scores and reports.

Measuring and scoring are separate. `ctxwin_evals.measure` puts arms to items; `ctxwin_evals.run` keeps what it finds, one line
per (task, arm, item) in ``samples.jsonl``, and `ctxwin_evals.score` makes every figure from that file without a model. The
probe judges the same samples as they come. Nothing here is imported by ``import ctxwin``.
"""

from __future__ import annotations
