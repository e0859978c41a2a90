"""MM-NIAH, Video-MME, EgoSchema, MileBench, MuirBench, MMDU, SparklesEval and MuSiQue: their data, prompts and scores.

The data sets are not part of this project (MM-NIAH and EgoSchema: MIT; Video-MME: academic use only, not to be redistributed;
MileBench and MMDU: CC BY-NC; MuSiQue: CC BY). `benchmark` opens one from a local folder or from the Hugging Face hub, as
``hub:OpenGVLab/MM-NIAH``. A data set's media are downloaded whole, since its archives hold them together: 18 GB for MM-NIAH's val
split, 44 GB for its test split, 106 GB for EgoSchema.

``python tests/benchmark_data`` writes small data sets of generated content in the layouts of most.
"""

from collections.abc import Callable
from functools import partial

from ctxwin_evals.benchmarks import dialogues, egoschema, milebench, mm_niah, muirbench, musique, video_mme
from ctxwin_evals.benchmarks.base import DataOptions, DataTask, Missing
from ctxwin_evals.benchmarks.frames import FRAME_RULES

_KINDS: tuple[type[DataTask], ...] = (
    mm_niah.MMNiah, video_mme.VideoMME, egoschema.EgoSchema, milebench.MileBench, muirbench.MuirBench, dialogues.MMDU,
    dialogues.Sparkles, musique.MuSiQue,
)  # fmt: skip
BENCHMARKS: dict[str, Callable[[DataOptions], DataTask]] = {n: partial(kind, n) for kind in _KINDS for n in kind.names}
"""What opens each benchmark, by name."""


def benchmark(name: str, options: DataOptions | None = None) -> DataTask:
    """The benchmark of a name; reads no data. Raises ValueError, naming the benchmarks, for an unknown one."""
    if name not in BENCHMARKS:
        raise ValueError(f"a benchmark must be one of {', '.join(BENCHMARKS)}; got {name!r}")
    return BENCHMARKS[name](DataOptions() if options is None else options)


__all__ = ["BENCHMARKS", "FRAME_RULES", "DataOptions", "DataTask", "Missing", "benchmark"]
