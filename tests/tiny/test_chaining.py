"""The model that chains at query time, through the transformers engine, beside the one that binds at prefill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.world import Task, make_item, render
from train_tiny.check import HELD_OUT
from twins import guard

CHAINING = Path(__file__).parents[1] / "models" / "chaining"
FRAMES = (2, 3, 4)


def right_answers(engine: Engine, task: Task, n: int) -> dict[str, float]:
    """Share of right answers with every frame re-prefilled in place, and with frames reused blindly."""
    right = dict.fromkeys(("exact", "blind"), 0)
    for index in range(n):
        count = FRAMES[index % len(FRAMES)]
        item = make_item(HELD_OUT + 10_000 * count + index, task, count, conflict=0.0)
        for mode in ("exact", "blind"):
            with Window(engine, system_prompt="You watch a camera.", budget=1000, fidelity=Fidelity(mode)) as window:
                for i, frame in enumerate(item.frames):
                    window.append(Chunk.image(render(frame), text=f"t={2 * i} s"))
                answer = window.ask(item.questions[0].text, max_tokens=4)
            right[mode] += answer.text == item.questions[0].answer
    return {mode: count / n for mode, count in right.items()}


@pytest.fixture(scope="module")
def chaining() -> Iterator[Engine]:
    with open_engine(f"hf:{CHAINING}") as engine:
        yield engine


@guard
@pytest.mark.parametrize("task", ["single_hop", "multi_hop"])
def test_a_model_that_chains_loses_nothing_when_frames_are_reused_blindly(chaining: Engine, task: Task) -> None:
    right = right_answers(chaining, task, 42)
    assert right["exact"] >= 0.9
    assert right["blind"] >= 0.9


@pytest.mark.slow
def test_a_model_that_binds_loses_the_same_answers() -> None:
    with open_engine(f"hf:{checkpoint_dir()}") as engine:
        right = right_answers(engine, "multi_hop", 18)
    assert right["exact"] >= 0.9
    assert right["blind"] <= 0.2


def test_the_chaining_model_is_small_and_holds_no_pickle() -> None:
    files = [path for path in CHAINING.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md"}
