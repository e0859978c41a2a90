from __future__ import annotations

from math import factorial
from typing import Any

import numpy as np
import pytest

from ctxwin.tiny.world import Frame, all_questions, answer, antecedents
from ctxwin_evals.items import Item
from ctxwin_evals.tasks import SUITES, expand, open_task, task_names
from ctxwin_evals.tasks.tiny import FIT_SPACE, SPACE, TASKS, TURNOVERS, TinyOptions, TinyTask, fit_cases

FRAMES = (2, 3, 4, 5, 6)
AMOUNTS = {name: task.amount.listed[-1] if task.amount else 0.0 for name, task in TASKS.items()}
FIXED = ("reorder", "excess", "superset")
"""Their number of frames follows from the amount."""
KEPT = {"multi_hop": "2e6a7ef80b0d", "order": "72eeb5d3e88e", "slide_needed": "2c4d08aa45c0", "recall": "2d46d1bdc202"}
"""Digests of items as they were drawn before tasks had amounts."""


def frames_of(case: Item) -> tuple[Frame, ...]:
    """The frames that a generated item's chunks are rendered from."""
    load: Any = case.load
    return tuple(load.args[0])


@pytest.mark.parametrize("name", list(TASKS))
def test_an_item_depends_on_its_index_alone(name: str) -> None:
    task, amount = TASKS[name], AMOUNTS[name]
    first = [task.case(3, i, FRAMES, amount) for i in range(6)]
    again = [task.case(3, i, FRAMES, amount) for i in reversed(range(6))][::-1]
    assert [c.digest for c in first] == [c.digest for c in again]
    assert len({c.digest for c in first} | {task.case(4, i, FRAMES, amount).digest for i in range(6)}) == 12
    assert len({len(c.placed) for c in first}) >= (1 if name in FIXED else 3)


@pytest.mark.parametrize("name", list(TASKS))
def test_the_truth_is_the_answer_over_what_is_placed(name: str) -> None:
    for i in range(10):
        case = TASKS[name].case(0, i, FRAMES, AMOUNTS[name])
        placed = [frames_of(case)[f] for f in case.placed]
        mark = int(case.query[-3:-1])
        assert case.target == answer(placed, case.query)
        assert mark in placed[case.asked].marks
        assert sum(mark in f.marks for f in placed) == 1
        if case.before:
            was = answer([frames_of(case)[f] for f in case.before], case.query)
            assert case.meta["control"] == (was == case.target)
            assert {*case.before, *case.placed} == set(range(len(frames_of(case))))


def test_a_slide_takes_the_leading_frame_and_what_depends_on_it() -> None:
    for i in range(12):
        for name, needed in (("slide_needed", True), ("slide_distractor", False)):
            case = TASKS[name].case(1, i, FRAMES)
            assert case.before == tuple(range(len(frames_of(case))))
            assert case.placed == case.before[1:]
            mark = int(case.query[-3:-1])
            front = antecedents(frames_of(case), mark)
            assert (front == (0,)) if needed else (front and 0 not in front)
            assert (answer(frames_of(case), case.query) != case.target) == needed
            assert not needed or case.target == "grey"


def test_a_repeated_legend_leaves_and_the_answer_stays() -> None:
    for i in range(12):
        case = TASKS["slide_repeated"].case(1, i, FRAMES)
        copies = [f for f in case.placed if frames_of(case)[f] == frames_of(case)[0]]
        assert copies and case.placed == case.before[1:] and case.meta["control"]
        others = [frames_of(case)[f] for f in case.placed if f not in copies]
        assert answer(others, case.query) != case.target == answer(frames_of(case), case.query)


@pytest.mark.parametrize("turnover", [0.0, 0.25, 0.5, 1.0])
def test_a_recall_replaces_the_share_in_front(turnover: float) -> None:
    for i in range(10):
        case = TASKS["recall"].case(2, i, FRAMES, turnover)
        front = len(case.placed) - 1
        kept = [f for f in case.placed[:-1] if f in case.before]
        assert len(kept) == front - int(np.floor(turnover * front + 0.5))
        assert case.placed[-1] == case.before[-1] == case.before[front]
        assert case.asked == front
        for frames in (case.placed, case.before):
            kinds = {q.text: q.kind for q in all_questions([frames_of(case)[f] for f in frames])}
            assert kinds[case.query] == "multi_hop"


@pytest.mark.parametrize("slides", [1, 4, 16])
def test_a_history_places_the_end_of_its_stream(slides: int) -> None:
    for i in range(4):
        case = TASKS["history"].case(0, i, FRAMES, slides)
        assert case.before == tuple(range(len(case.placed) + slides)) and case.placed == case.before[slides:]
        assert case.meta["stream_window"] == len(case.placed)
        assert sum(int(case.query[-3:-1]) in f.marks for f in frames_of(case)) == 1


def test_divergent_antecedents_are_what_their_names_say() -> None:
    for i in range(8):
        case = {kind: TASKS[f"divergent-{kind}"].case(0, i, FRAMES) for kind in ("reorder", "duplicate", "replace-one")}
        for kind, c in case.items():
            was, now = c.before[:-1], c.placed[:-1]
            assert c.before[-1] == c.placed[-1] and len(was) == len(now) and was != now, kind
        assert sorted(case["reorder"].placed) == sorted(case["reorder"].before)
        doubled = case["duplicate"]
        assert set(doubled.placed) < set(doubled.before) and len({*doubled.placed}) == len(doubled.placed) - 1
        one = case["replace-one"]
        assert len(set(one.placed) - set(one.before)) == 1
        every = TASKS["divergent-replace-all"].case(0, i, FRAMES)
        assert set(every.placed[:-1]).isdisjoint(every.before)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_excess_frames_have_no_part_in_the_answer_and_changed_ones_may(count: int) -> None:
    for i in range(6):
        for name in ("excess", "superset"):
            case = TASKS[name].case(0, i, FRAMES, count)
            assert len(case.placed) == 3 + count and case.before == (0, 1, 2) and case.meta["control"]
            kept = [f for f in case.placed if f in case.before]
            assert kept == [0, 1, 2]
            legends = antecedents([frames_of(case)[f] for f in case.placed], int(case.query[-3:-1]))
            assert all(case.placed[f] in (0, 1) for f in legends)
            assert case.placed[:count] == tuple(range(3, 3 + count)) if name == "excess" else case.placed[0] == 0
        case = TASKS["changed"].case(0, i, FRAMES, count)
        assert len(set(case.placed) - set(case.before)) == count and len(case.placed) == len(case.before) >= 4


@pytest.mark.parametrize("count", [3, 4, 6])
def test_every_order_of_three_and_four_predecessors_is_asked_about_and_24_of_six(count: int) -> None:
    task, orders = TASKS["reorder"], {3: 5, 4: 23, 6: 24}[count]
    cases = [task.case(0, i, FRAMES, count) for i in range(2 * orders)]
    for context in (cases[:orders], cases[orders:]):
        assert {frames_of(c) for c in context} == {frames_of(context[0])} and len({c.query for c in context}) == 1
        met = {c.placed for c in context}
        assert len(met) == orders <= factorial(count) - 1 and tuple(range(count + 1)) not in met
        assert all(c.placed[-1] == count and c.asked == count and c.before == tuple(range(count + 1)) for c in context)
    assert {c.cluster for c in cases} == {"0", "1"} and frames_of(cases[0]) != frames_of(cases[-1])


def test_too_few_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="frames must include 3 or more for task 'order'"):
        TASKS["order"].case(0, 0, (2,))
    with pytest.raises(ValueError, match="frames must include 3 or more for task 'order'"):
        open_task("tiny/order", TinyOptions(frames=(2,)))  # not when its first item is drawn, after other tasks' hours
    assert len(TASKS["order"].case(0, 0, (2, 5)).placed) == 5


def test_seeds_stay_apart_from_training_and_from_the_fit_split() -> None:
    from train_tiny.train import Recipe

    assert SPACE != FIT_SPACE
    assert Recipe().seed not in (SPACE, FIT_SPACE)
    held_out = {TASKS["multi_hop"].case(0, i, FRAMES).digest for i in range(8)}
    assert held_out.isdisjoint(c.digest for c in fit_cases(8, FRAMES))


def test_the_items_of_earlier_runs_are_still_the_same() -> None:
    digests = {name: TASKS[name].case(0, 3, FRAMES).digest[:12] for name in ("multi_hop", "order", "slide_needed")}
    assert digests | {"recall": TASKS["recall"].case(0, 3, FRAMES, 0.5).digest[:12]} == KEPT


def test_every_task_and_suite_opens() -> None:
    for suite in SUITES:
        for name in expand(suite):
            assert open_task(name).name == name
    assert set(expand("tiny-all")) < set(task_names()) and len(expand("mm-niah")) == 6 and len(expand("milebench")) == 4
    assert expand("recall@0.5:mm-niah") == [f"recall@0.5:{name}" for name in expand("mm-niah")]
    assert [open_task(f"tiny/recall@{t:g}").name for t in TURNOVERS] == list(SUITES["tiny-recall"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny/other", "a generated task must be one of"),
        ("tiny/recall", "a turnover .* must be 0..1"),
        ("tiny/recall@2", "a turnover .* must be 0..1"),
        ("tiny/reorder@5", "a number of predecessors .* must be 3, 4, 6"),
        ("tiny/multi_hop@1", "tiny/multi_hop must be named without an amount"),
        ("elsewhere", "a task must be one of"),
    ],
)
def test_other_names_are_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        open_task(name)


def test_options_reach_the_items() -> None:
    task = open_task("tiny/multi_hop", TinyOptions(seed=3, frames=(4,)))
    assert isinstance(task, TinyTask) and len(task.item(0).placed) == 4
    assert task.config()["seed"] == 3


def test_two_page_documents() -> None:
    """Each page is needed: the first names the department, the second its room; the control asks for the department itself."""
    task, control = open_task("two-page"), open_task("two-page/one")
    assert not task.control and control.control and "two-page" in task_names()
    answers = set()
    for index in range(20):
        item, alone = task.items(20)[index], control.items(20)[index]
        (_, staff), (_, rooms) = item.load.args[0]  # type: ignore[attr-defined]
        who = item.query.removeprefix("Which room does the department of ").split(" use?")[0]
        department = dict(row.split(": ") for row in staff)[who]
        assert dict(row.split(": room ") for row in rooms)[department] == item.target == alone.target
        assert f"the {department} department" in alone.query
        assert len({row.split(": ")[1] for row in staff}) == 8, "one person a department"
        answers.add(item.target)
        assert item.digest == open_task("two-page").items(20)[index].digest != alone.digest
    assert len(answers) > 15
    first, second = item.load()
    assert first.id != second.id and [c.id for c in item.load()] == [first.id, second.id]
    other = next(room for room in item.meta["decoys"] if room != item.target)
    said = [f"Room {item.target}.", f"it is {other}", "I do not know", f"{item.target}7"]
    scored = [task.score(text, item.target, item.meta) for text in said]
    assert [s.score for s in scored] == [1, 0, 0, 0] and [s.metrics["decoy"] for s in scored] == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="n must be given"):
        task.items()
