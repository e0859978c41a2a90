"""Answers that drop slots with vLLM's second model runner, which runs on GPUs: here under Triton's interpreter, a step ahead.

``python second_runner.py FOLDER`` prints, for each sampling of `SAMPLINGS`, the tokens and how many requests they took, by
`Core.shortens`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment

HELD = Sampling(40, hold=0.4, hold_every=4)
SAMPLINGS = [HELD, replace(HELD, merge_prompt=True), replace(HELD, temperature=1.0, seed=7)]


def question(engine: Any) -> tuple[list[Any], Any]:
    """A text of some length, and what is asked about it."""
    system, chunk = (
        engine.encode_system_prompt("watch a camera"),
        engine.encode(Chunk.text("red is left of blue, " * 8)),
    )
    return [Segment(system, 0), Segment(chunk, system.advance)], engine.encode_query("what color is the left one")


def answers(engine: Any, sampling: Sampling, whole: bool) -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of its requests."""
    driver = engine._core.driver
    with (
        mock.patch.object(engine._core, "shortens", whole and engine._core.shortens),
        mock.patch.object(driver, "submit", wraps=driver.submit) as submit,
    ):
        made = engine.generate(*question(engine), sampling, salt="second")
    return [int(token) for token in made.token_ids], submit.call_count


def main(folder: Path) -> None:
    """Print the answers as JSON."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: True)
    )  # vLLM looks for one that compiles
    from vllm.platforms.cpu import CpuPlatform

    from ctxwin_vllm.engine import VLLMEngine

    configure = CpuPlatform.check_and_update_config

    def configured(config: Any) -> None:
        configure(config)
        config.scheduler_config.async_scheduling = True  # vLLM's default, but on a CPU

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(configured)):
        engine = VLLMEngine(folder, dtype="float32")
    with engine:
        config = engine._core.driver.config
        assert config.use_v2_model_runner and config.max_concurrent_batches == 2
        print(json.dumps([[answers(engine, s, whole) for whole in (True, False)] for s in SAMPLINGS]))


if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    main(Path(sys.argv[1]))
