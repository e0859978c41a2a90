from __future__ import annotations

import numpy as np
import pytest

from ctxwin.evals.tasks import FIT_SPACE, SPACE, TASKS, fit_cases
from ctxwin.tiny.world import answer, antecedents, classify

FRAMES = (2, 3, 4, 5, 6)


@pytest.mark.parametrize("name", list(TASKS))
def test_an_item_depends_on_its_index_alone(name: str) -> None:
    task = TASKS[name]
    first = [task.case(3, i, FRAMES, 0.5) for i in range(6)]
    again = [task.case(3, i, FRAMES, 0.5) for i in reversed(range(6))][::-1]
    assert [c.digest for c in first] == [c.digest for c in again]
    assert len({c.digest for c in first} | {task.case(4, i, FRAMES, 0.5).digest for i in range(6)}) == 12
    assert len({len(c.placed) for c in first}) >= 4


@pytest.mark.parametrize("name", list(TASKS))
def test_the_truth_is_the_answer_over_what_is_placed(name: str) -> None:
    for i in range(10):
        case = TASKS[name].case(0, i, FRAMES, 1.0)
        placed = [case.frames[f] for f in case.placed]
        mark = int(case.question[-3:-1])
        assert case.truth == answer(placed, case.question)
        assert mark in placed[case.asked].marks
        assert sum(mark in f.marks for f in placed) == 1


def test_a_slide_takes_the_leading_frame_and_what_depends_on_it() -> None:
    for i in range(12):
        for name, needed in (("slide_needed", True), ("slide_distractor", False)):
            case = TASKS[name].case(1, i, FRAMES)
            assert case.before == tuple(range(len(case.frames)))
            assert case.placed == case.before[1:]
            mark = int(case.question[-3:-1])
            front = antecedents(case.frames, mark)
            assert (front == (0,)) if needed else (front and 0 not in front)
            assert (answer(case.frames, case.question) != case.truth) == needed
            assert not needed or case.truth == "grey"


@pytest.mark.parametrize("turnover", [0.0, 0.25, 0.5, 1.0])
def test_a_recall_replaces_the_share_in_front(turnover: float) -> None:
    for i in range(10):
        case = TASKS["recall"].case(2, i, FRAMES, turnover)
        front = len(case.placed) - 1
        kept = [f for f in case.placed[:-1] if f in case.before]
        assert len(kept) == front - int(np.floor(turnover * front + 0.5))
        assert case.placed[-1] == case.before[-1] == case.before[front]
        assert case.asked == front
        placed = [case.frames[f] for f in case.placed]
        mark = int(case.question[-3:-1])
        assert classify(placed, mark) == classify([case.frames[f] for f in case.before], mark) == "multi_hop"


def test_too_few_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="frames must include 3 or more for task 'order'"):
        TASKS["order"].case(0, 0, (2,))
    assert len(TASKS["order"].case(0, 0, (2, 5)).placed) == 5


def test_seeds_stay_apart_from_training_and_from_the_fit_split() -> None:
    from ctxwin.tiny.train import Recipe

    assert SPACE != FIT_SPACE
    assert Recipe().seed not in (SPACE, FIT_SPACE)
    held_out = {TASKS["multi_hop"].case(0, i, FRAMES).digest for i in range(8)}
    assert held_out.isdisjoint(c.digest for c in fit_cases(0, 8, FRAMES))
