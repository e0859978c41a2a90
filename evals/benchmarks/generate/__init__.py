"""Small data sets of generated content in the official layouts, to try a benchmark without its data.

Every question has its answer in pictures, videos or text that a model could read; the figures mean nothing beside others'.
"""

from __future__ import annotations

from ctxwin.evals.benchmarks.generate.milebench import write_milebench
from ctxwin.evals.benchmarks.generate.mm_niah import write_mm_niah
from ctxwin.evals.benchmarks.generate.video_mme import write_video_mme

__all__ = ["write_milebench", "write_mm_niah", "write_video_mme"]
