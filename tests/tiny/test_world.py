"""The generated world: determinism, the rule that gives the truth, and what each task means."""

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.tiny import world
from ctxwin.tiny.sprites import COLORS, GREY, N_APPEARANCES, SHAPES, TINT_PAIRS, sprites
from ctxwin.tiny.world import Frame, Role

ROLES = st.lists(st.sampled_from(["legend", "scene"]), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=20, deadline=None)


def truth(frames: tuple[Frame, ...] | list[Frame], index: int, row: int, column: int) -> str | None:
    """The rule, stated afresh: walk back from the scene to the first legend that shows the shape."""
    frame = frames[index]
    drawn, shape = frame.appearance[row, column], frame.shape[row, column]
    if frame.role == "legend":
        return COLORS[drawn]
    for earlier in reversed(frames[:index]):
        if earlier.role == "legend" and (earlier.shape == shape).any():
            color = earlier.appearance[earlier.shape == shape][0]
            if drawn == GREY or color in TINT_PAIRS[drawn - GREY - 1]:
                return COLORS[color]
            return None
    return "grey" if drawn == GREY else None


def kind(frames: tuple[Frame, ...], mark: int) -> str:
    """What asking for the colour of a mark takes, stated afresh."""
    index, row, column = world.locate(frames, mark) or (0, 0, 0)
    frame, shape = frames[index], frames[index].shape[row, column]
    if frame.role == "legend":
        return "single_hop"
    legends = [f for f in frames[:index] if f.role == "legend" and (f.shape == shape).any()]
    colors = {int(f.appearance[f.shape == shape][0]) for f in legends}
    if not colors:
        return "unbound"
    grey = frame.appearance[row, column] == GREY
    return ("order" if grey else "graded_order") if len(colors) > 1 else ("multi_hop" if grey else "graded")


@quick
@given(seed=SEEDS, roles=ROLES)
def test_answers_follow_the_rule(seed: int, roles: list[Role]) -> None:
    frames = world.sample_frames(np.random.default_rng(seed), roles, marks_per_frame=10)
    for index, frame in enumerate(frames):
        for row, column in np.argwhere(frame.mark >= 0):
            mark = frame.mark[row, column]
            expected = truth(frames, index, row, column)
            assert world.answer(frames, f"color of {mark:02d}?") == expected
            assert world.answer(frames, f"shape of {mark:02d}?") == SHAPES[frame.shape[row, column]]


@quick
@given(seed=SEEDS, roles=ROLES)
def test_all_questions_agree_with_answer_kind_and_antecedents(seed: int, roles: list[Role]) -> None:
    frames = world.sample_frames(np.random.default_rng(seed), roles, marks_per_frame=8)
    for question in world.all_questions(frames):
        assert world.answer(frames, question.text) == question.answer
        assert question.mark in frames[question.frame].marks
        if question.text.startswith("color"):
            assert kind(frames, question.mark) == question.kind
            assert world.antecedents(frames, question.mark) == question.antecedents


@quick
@given(seed=SEEDS, task=st.sampled_from(world.TASKS), count=st.integers(3, 6))
def test_items_are_reproducible_and_hold_their_task(seed: int, task: world.Task, count: int) -> None:
    item = world.make_item(seed, task, count, marks_per_frame=12)
    assert item == world.make_item(seed, task, count, marks_per_frame=12)
    assert len(item.frames) == count
    marks = [mark for frame in item.frames for mark in frame.marks]
    assert len(set(marks)) == len(marks) == 12 * count
    (question,) = item.questions
    assert question.kind == task
    assert all(index < question.frame for index in question.antecedents)


@quick
@given(seed=SEEDS, task=st.sampled_from(["multi_hop", "graded", "order"]), count=st.integers(3, 4))
def test_what_the_order_of_earlier_frames_changes(seed: int, task: world.Task, count: int) -> None:
    item = world.make_item(seed, task, count)
    (question,) = item.questions
    before, rest = item.frames[: question.frame], item.frames[question.frame :]
    answers = {world.answer((*order, *rest), question.text) for order in permutations(before)}
    assert len(answers) == 1 if task != "order" else len(answers) > 1


@quick
@given(seed=SEEDS, task=st.sampled_from(["multi_hop", "graded", "order"]))
def test_antecedents_decide_the_answer(seed: int, task: world.Task) -> None:
    item = world.make_item(seed, task)
    (question,) = item.questions
    needed = [item.frames[i] for i in (*question.antecedents, question.frame)]
    assert world.answer(needed, question.text) == question.answer
    agreeing = world.legend_palette(item.frames[question.antecedents[-1]])
    assert COLORS[agreeing.max()] != "grey"
    alone = world.answer([item.frames[question.frame]], question.text)
    assert alone == ("grey" if task != "graded" else None)


def test_a_later_legend_does_not_repaint() -> None:
    item = world.make_item(5, "multi_hop", 2)
    (question,) = item.questions
    later = world.make_item(6, "single_hop", 1, marks_per_frame=0, n_questions=0).frames
    legend = world.sample_frames(np.random.default_rng(1), ["legend"], marks_per_frame=0)
    assert world.answer([*item.frames, *legend, *later], question.text) == question.answer


def test_faded_things_show_the_pair_of_their_color() -> None:
    seen = set()
    for seed in range(20):
        item = world.make_item(seed, "graded")
        (question,) = item.questions
        _, row, column = world.locate(item.frames, question.mark) or (0, 0, 0)
        tint = item.frames[question.frame].appearance[row, column] - GREY - 1
        assert COLORS.index(question.answer) in TINT_PAIRS[tint]
        seen.add(question.answer)
    assert len(seen) >= 6
    assert sorted(color for pair in TINT_PAIRS for color in pair) == list(range(8))


def test_a_tint_that_contradicts_its_legend_has_no_answer() -> None:
    item = world.make_item(11, "graded", 2)
    (question,) = item.questions
    legend, scene = item.frames
    shifted = np.where(legend.appearance >= 0, (legend.appearance + 1) % 8, 0)
    shape = scene.shape[scene.mark == question.mark][0]
    color = COLORS.index(question.answer)
    tint = next(pair for pair in TINT_PAIRS if color in pair)
    other = next(c for c in range(8) if c not in tint)
    shifted[legend.shape == shape] = other
    wrong = Frame("legend", legend.shape, shifted, legend.mark, legend.jitter)
    assert world.answer([wrong, scene], question.text) is None


def test_absent_and_ambiguous_marks_have_no_answer() -> None:
    frame = world.sample_frames(np.random.default_rng(0), ["legend"], marks=[[17, 30]])[0]
    assert world.answer([frame], "shape of 18?") is None
    assert world.answer([frame, frame], "shape of 17?") is None
    assert world.all_questions([frame, frame]) == []
    assert world.questions_for([frame, frame], 5, 0) == []


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="question must be"):
        world.answer([], "size of 17?")
    with pytest.raises(ValueError, match="task must be"):
        world.make_item(0, "three_hop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 3 frames"):
        world.make_item(0, "order", 2)
    with pytest.raises(ValueError, match="marks_per_frame"):
        world.make_item(0, "single_hop", 6, marks_per_frame=17)
    with pytest.raises(ValueError, match="shape"):
        Frame("scene", *(np.zeros((6, 6), np.int64) for _ in range(4)))


def test_streams_are_reproducible_and_keep_marks_apart() -> None:
    stream = world.make_stream(3, 30)
    assert stream == world.make_stream(3, 30)
    assert stream != world.make_stream(4, 30)
    assert stream[0].role == "legend"
    roles = "".join(frame.role[0] for frame in stream)
    assert "ssss" not in roles and roles.count("l") < 25
    for begin in range(25):
        marks = [mark for frame in stream[begin : begin + 6] for mark in frame.marks]
        assert len(set(marks)) == len(marks)
    everything = [mark for frame in stream for mark in frame.marks]
    for frame in stream:
        assert sum(everything.count(mark) == 1 for mark in frame.marks) >= 2
    with pytest.raises(ValueError, match="anchors"):
        world.make_stream(0, 60, anchors=2)


@pytest.mark.parametrize("seed", range(6))
def test_a_question_about_a_frame_has_one_answer_in_the_whole_stream(seed: int) -> None:
    frames = world.make_stream(seed, 12)
    for index in range(12):
        for attribute in ("color", "shape"):
            question = world.question_about(frames, index, attribute)  # type: ignore[arg-type]
            assert world.locate(frames, question.mark)[0] == index  # type: ignore[index]
            assert question.answer == world.answer(frames, question.text)
    with pytest.raises(ValueError, match="frame 1 must hold a mark of its own with a color, got none"):
        world.question_about([frames[0], frames[0], frames[0]], 1)


def test_questions_are_distinct_and_of_the_kinds_asked_for() -> None:
    frames = world.make_stream(1, 6)
    questions = world.questions_for(frames, 20, 7, ("multi_hop", "graded"))
    assert questions == world.questions_for(frames, 20, 7, ("multi_hop", "graded"))
    assert len({q.text for q in questions}) == len(questions) > 0
    assert {q.kind for q in questions} <= {"multi_hop", "graded"}


def test_frames_are_values_and_read_only() -> None:
    one, two = (world.make_item(0, "single_hop", 1).frames[0] for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != "frame"
    with pytest.raises(ValueError, match="read-only"):
        one.shape[0, 0] = 1


def test_render_draws_every_cell_with_its_own_picture() -> None:
    frame = world.make_item(0, "single_hop", 1, marks_per_frame=64).frames[0]
    picture = world.render(frame)
    assert picture.shape == (224, 224, 3) and picture.dtype == np.uint8
    cells = picture.reshape(8, 28, 8, 28, 3).transpose(0, 2, 1, 3, 4).reshape(64, -1)
    assert len(np.unique(cells, axis=0)) == 64
    assert len(np.unique(sprites().reshape(8 * N_APPEARANCES * 9, -1), axis=0)) == 8 * N_APPEARANCES * 9


def test_the_world_imports_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'cv2'}"
    code = f"import sys, ctxwin.tiny, ctxwin.tiny.world, ctxwin.tiny.clip; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
