"""MM-NIAH, Video-MME, MileBench, MuirBench, MMDU and SparklesEval: their data, prompts and scores.

The data sets are not part of this project (MM-NIAH: MIT; Video-MME: academic use only, not to be redistributed; MileBench and
MMDU: CC BY-NC). `benchmark` opens one from a local folder or from the Hugging Face hub: ``hub:OpenGVLab/MM-NIAH``,
``hub:lmms-lab/Video-MME``, ``hub:FreedomIntelligence/MileBench``, ``hub:MUIRBENCH/MUIRBENCH``. A data set's media are downloaded
whole, since its archives hold them together: 18 GB for MM-NIAH's val split, 44 GB for its test split.

``python tests/benchmark_data`` writes small data sets of generated content in the layouts of the first three.
"""

from __future__ import annotations

from ctxwin_evals.benchmarks import dialogues, milebench, mm_niah, muirbench, video_mme
from ctxwin_evals.benchmarks.base import DataOptions, DataTask, Missing
from ctxwin_evals.benchmarks.frames import FRAME_RULES

BENCHMARKS: dict[str, str] = {
    **mm_niah.TASKS,
    video_mme.NAME: "multiple-choice questions about videos",
    **milebench.TASKS,
    muirbench.NAME: "multiple-choice questions about several pictures",
    **dialogues.NAMES,
}
"""What each benchmark asks, by name."""


def benchmark(name: str, options: DataOptions | None = None) -> DataTask:
    """The benchmark of a name; reads no data. Raises ValueError, naming the benchmarks, for an unknown one."""
    options = DataOptions() if options is None else options
    if name in mm_niah.TASKS:
        return mm_niah.MMNiah(name, options)
    if name == video_mme.NAME:
        return video_mme.VideoMME(options)
    if name in milebench.TASKS:
        return milebench.MileBench(name, options)
    if name == muirbench.NAME:
        return muirbench.MuirBench(options)
    if name in dialogues.NAMES:
        return dialogues.KINDS[name](name, options)
    raise ValueError(f"a benchmark must be one of {', '.join(BENCHMARKS)}; got {name!r}")


__all__ = ["BENCHMARKS", "FRAME_RULES", "DataOptions", "DataTask", "Missing", "benchmark"]
