"""Small data sets of generated content in the official layouts, to try a benchmark without its data.

Every question has its answer in pictures, videos or text that a model could read; the figures mean nothing beside others'.
"""

from __future__ import annotations

from benchmark_data.egoschema import write_egoschema
from benchmark_data.milebench import write_milebench
from benchmark_data.mm_niah import write_mm_niah
from benchmark_data.musique import write_musique
from benchmark_data.video_mme import write_video_mme

__all__ = ["write_egoschema", "write_milebench", "write_mm_niah", "write_musique", "write_video_mme"]
