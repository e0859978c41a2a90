"""Prefix caching: exact KV of what its user places, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ctxwin.engines.segments import Segment
from ctxwin_evals.arms import BASES, parse_arm, parse_arms
from ctxwin_evals.arms.prefix import Prefix
from ctxwin_evals.run import Runner, Settings, plan_jobs
from ctxwin_evals.tasks import open_task

from .conftest import HEADER, item_of, mixed_chunks

if TYPE_CHECKING:
    from pathlib import Path

    from ctxwin_evals.arms import Arm, Served
    from ctxwin_evals.group import Group
    from ctxwin_evals.items import Item

    from .conftest import Bench


def mixed(before: tuple[int, ...], placed: tuple[int, ...], asked: int | None = None) -> Item:
    return item_of(mixed_chunks, 0, before=before, placed=placed, asked=asked)


def arm(habit: str, setting: str) -> Prefix:
    made: Arm = parse_arm(f"prefix:{habit}").on(setting)  # type: ignore[arg-type]
    assert isinstance(made, Prefix)
    return made


def served(group: Group, habit: str, setting: str) -> list[Served]:
    return [one for one in arm(habit, setting).serve(group) if one is not None]


@pytest.mark.parametrize(
    ("before", "placed", "asked", "habit", "setting", "order"),
    [
        ((0, 1, 2, 3), (1, 2, 3), None, "naive", "slide", (1, 2, 3)),
        ((0, 1, 2, 3), (1, 2, 3), None, "trim", "slide", (2, 3)),
        ((0, 1, 2, 3), (2, 3), None, "trim", "slide", (2, 3)),  # three were held
        ((0, 1, 2), (1, 2), 0, "append", "slide", None),
        ((0, 1, 2, 3), (0, 1, 2, 3), 1, "naive", "recall", (0, 1, 2, 3)),
        ((0, 1, 2, 3), (0, 1, 2, 3), 1, "append", "recall", (0, 2, 3, 1)),
        ((0, 1, 2, 3), (0, 1, 2, 3), 1, "trim", "recall", (1, 3)),  # what came back is always there
        ((0, 1, 2, 3), (0, 1, 2, 3), 3, "trim", "recall", (2, 3)),
        ((1, 0), (2, 3, 0), 2, "trim", "recall", (3, 0)),
    ],
)
def test_what_is_placed(
    before: tuple[int, ...], placed: tuple[int, ...], asked: int | None, habit: str, setting: str,
    order: tuple[int, ...] | None,
) -> None:  # fmt: skip
    assert arm(habit, setting).order(mixed(before, placed, asked)) == order


@pytest.mark.parametrize(
    ("item", "habit", "setting", "fresh"),
    [
        (mixed((0, 1, 2, 3), (1, 2, 3)), "naive", "slide", (1, 2, 3)),  # another beginning: nothing is known
        (mixed((0, 1, 2, 3), (0, 1, 2)), "naive", "slide", ()),
        (mixed((0, 1, 2, 3), (0, 1, 2, 3), 1), "naive", "recall", ()),  # as it was
        (mixed((3, 1, 0), (0, 1, 2, 3), 1), "naive", "recall", (1, 2, 3)),  # what stayed is (0, 2, 3)
        (mixed((3, 1, 0), (0, 1, 2, 3), 1), "append", "recall", (1,)),
        (mixed((3, 1, 0), (0, 1, 2, 3), 1), "trim", "recall", (1, 3)),
    ],
)
def test_what_is_computed_stands_behind_the_longest_known_prefix(
    bench: Bench, item: Item, habit: str, setting: str, fresh: tuple[int, ...]
) -> None:
    group = bench.of([item])
    one = served(group, habit, setting)[0]
    assert one.computed == sum(group.chunks[0][f].tokens for f in fresh)
    assert one.forwards == (1 if fresh else 0)
    assert one.encodes == 0  # all were placed before
    assert one.extra["entered"] == sum(len(group.chunks[0][f].media) for f in fresh)


def test_pictures_that_are_new_are_encoded(bench: Bench) -> None:
    group = bench.of([mixed((0,), (0, 1, 2))])
    one = served(group, "naive", "slide")[0]
    assert (one.encodes, one.extra["entered"]) == (2, 2.0)
    assert one.computed == sum(group.chunks[0][f].tokens for f in (1, 2))


@pytest.mark.parametrize(("habit", "setting"), [("trim", "slide"), ("trim", "recall"), ("append", "recall")])
def test_its_context_is_exact_and_the_question_stands_behind_it(bench: Bench, habit: str, setting: str) -> None:
    """Against the engine, over the order that this user places."""
    item = mixed((0, 1, 2, 3), (0, 1, 2, 3), 1) if setting == "recall" else mixed((0, 1, 2, 3), (1, 2, 3))
    group, engine = bench.of([item]), bench.decoder.engine
    one = served(group, habit, setting)[0]
    order = arm(habit, setting).order(item)
    assert order is not None and order != item.placed
    system_prompt = engine.encode_system_prompt(HEADER)
    layout, start = [Segment(system_prompt, 0)], system_prompt.advance
    for frame in order:
        layout.append(Segment(group.chunks[0][frame], start))
        start += group.chunks[0][frame].advance
    assert one.begin == start
    assert one.extra["context"] == sum(group.chunks[0][f].tokens for f in order) / group.context_tokens
    have = bench.decoder.read(group.memory([one.spans]), [item.query], start)[0]
    torch.testing.assert_close(have, engine.logits(layout, engine.encode_query(item.query)), atol=1e-5, rtol=1e-5)


def test_items_of_one_batch_may_place_other_orders(bench: Bench) -> None:
    items = [item_of(_pictures, i, before=(0, 1, 2), placed=(0, 1, 2), asked=i, count=3) for i in range(3)]
    group = bench.of(items)
    for b, one in enumerate(served(group, "trim", "recall")):
        alone = served(bench.of([items[b]]), "trim", "recall")[0]
        for x, y in zip(one.spans, alone.spans, strict=True):
            torch.testing.assert_close(x.v, y.v, atol=1e-5, rtol=0)


def _pictures(seed: int) -> list:  # type: ignore[type-arg]
    from ctxwin.chunk import Chunk

    rng = np.random.default_rng(seed)
    return [Chunk.image(rng.integers(0, 255, (56, 56, 3), dtype=np.uint8)) for _ in range(3)]


def test_a_run_asks_behind_what_each_user_places(bench: Bench, tmp_path: Path) -> None:
    tasks = [open_task("tiny/slide_needed"), open_task("tiny/recall@0.5")]
    runner = Runner(bench.decoder.engine, Settings(dtype="float32"), tmp_path, tasks)
    rows = {}
    for job in plan_jobs(parse_arms("prefix:naive,prefix:trim,prefix:append"), tasks):
        item = job.task.items(3)[2]
        made = runner.measurer.samples([item], job.arms, base=BASES[job.task.setting])
        rows |= {(item.task, row.arm): row for row in made}
    assert len(rows) == 6
    for task in tasks:
        assert rows[task.name, "prefix:naive"].kl < 1e-6
        assert rows[task.name, "prefix:naive"].extra["context"] == 1.0
        assert rows[task.name, "prefix:trim"].kl > 1e-6
    assert rows["tiny/slide_needed", "prefix:append"].unscored is not None
    assert rows["tiny/recall@0.5", "prefix:append"].kl < 1e-6  # it comes back at the end anyway
    item = tasks[0].items(3)[2]
    group = runner.measurer.group([item])
    one = served(group, "trim", "slide")[0]
    assert one.begin is not None and one.begin < group.begin
    logits = bench.decoder.read(group.memory([one.spans]), [item.query], one.begin)
    assert rows["tiny/slide_needed", "prefix:trim"].answer == runner.measurer.text([int(logits.argmax())])


def test_a_recalled_item_must_say_what_came_back() -> None:
    with pytest.raises(ValueError, match="what came back"):
        arm("naive", "recall").cached_orders(mixed((0,), (0, 1)))


@pytest.mark.parametrize("text", ["prefix", "prefix:", "prefix:none", "prefix:trim:2"])
def test_bad_spellings_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="an arm must be one of"):
        parse_arm(text)
