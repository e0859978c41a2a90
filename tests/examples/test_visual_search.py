"""The visual search: what it computes, its crops, its branches, and what it does with a picture of the user's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin.tiny import world
from ctxwin.view.trace import read_trace
from examples.agent_runs import EXAMPLES, check_figures, figures_of, run_example
from twins import guard


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("visual_search")


@guard
def test_it_answers_like_a_re_prefill_for_a_quarter_of_the_tokens(tmp_path: Path) -> None:
    figures = figures_of("visual_search", "--trace", str(tmp_path / "run.jsonl"))
    # Crops that do not show what is asked for have no truth; they are compared with a re-prefill.
    check_figures(figures | {"compared": figures["known"]})
    assert figures["asks"] == figures["compared"] >= 32 * 3  # the whole picture, a quarter, a view
    assert figures["known"] >= 32
    assert figures["agree"] >= 0.9 * figures["compared"]
    assert figures["vision_encodes"] == 1 + 4 + 16  # each crop once, however often it came back
    assert 0.5 < figures["confidence_auc"] < 0.95  # why the search is scripted on this model

    # Branches grow from branches; each question adopts one and closes all.
    events = read_trace(tmp_path / "run.jsonl").events
    adopted = [event for event in events if event["op"] == "adopt"]
    [picture] = {event["window"] for event in adopted}
    assert len(adopted) == 32
    parent = {event["other"]: event["window"] for event in events if event["op"] == "fork"}
    for event in adopted:  # view <- quarter <- whole picture <- the window
        assert parent[parent[parent[event["other"]]]] == picture
    assert set(parent) <= {event["window"] for event in events if event["op"] == "close"}


def test_views_show_the_frames_pixel_by_pixel(search: ModuleType) -> None:
    policy = search.Scripted(seed=3)
    assert policy.picture.size == (896, 896)
    assert len(policy.frames) == 16
    for view, frame in policy.frames.items():
        assert np.array_equal(policy.picture.crop(view.box(896, 896)), world.render(frame))


def test_parts_cover_a_picture_of_any_size(search: ModuleType) -> None:
    covered = np.zeros((37, 101), int)
    for quarter in search.Crop().parts:
        for view in quarter.parts:
            left, top, right, bottom = view.box(101, 37)
            covered[top:bottom, left:right] += 1
            assert not view.parts
    assert (covered == 1).all()
    assert str(search.Crop().parts[1].parts[2]) == "view 2.3"


def test_the_script_goes_wrong_now_and_then_and_comes_back(search: ModuleType) -> None:
    policy = search.Scripted(seed=0)

    def shows(crop: Any, task: Any) -> bool:
        return bool(task.view.path[: len(crop.path)] == crop.path)

    first = [shows(policy.best_first(task, search.Crop(), "")[0], task) for task in policy.tasks * 20]
    assert 0.65 < np.mean(first) < 0.85
    task = policy.tasks[0]
    wrong, right = sorted(search.Crop().parts, key=lambda crop: shows(crop, task))[-2:]
    # Anything below the wrong part comes after the other parts of the whole picture.
    assert policy.promise(task, wrong, 1.0) < 0.9**3 * policy.promise(task, right, 1.0)


def test_the_model_names_the_part_to_look_at(search: ModuleType) -> None:
    policy = search.Model(Image.new("RGB", (64, 64)), ["What is on the sign?"])
    whole = search.Crop()
    ordered = policy.best_first(policy.tasks[0], whole, "Bottom left, or else the top right.")
    assert [part.path[0] for part in ordered] == [2, 1, 0, 3]
    assert [part.path[0] for part in policy.best_first(policy.tasks[0], whole, "no idea")] == [0, 1, 2, 3]
    assert "bottom right" in policy.query(policy.tasks[0], whole)
    assert policy.query(policy.tasks[0], whole.parts[0].parts[0]) == "What is on the sign?"


@pytest.mark.slow
def test_a_picture_of_the_users_is_searched_with_their_questions(tmp_path: Path) -> None:
    picture = tmp_path / "mine.png"
    pixels = np.concatenate([world.render(frame) for frame in world.make_stream(4, 2)], axis=1)
    Image.fromarray(pixels).save(picture)
    printed = run_example(
        "visual_search", str(picture), "--ask", "shape of 17?", "--ask", "color of 17?", "--side", "224"
    )
    assert sum("looked at view, view " in line for line in printed.splitlines()) == 2
    assert "the same answer as a re-prefill" in printed
    assert "scripted" not in printed


def test_what_it_cannot_read_is_refused_before_a_model_is_opened(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    for wrong, said in (
        [[str(broken)], "--ask"],
        [[str(broken), "--ask", "Who?"], "broken.png"],
        [["--side", "0"], "--side"],
    ):
        command = [sys.executable, str(EXAMPLES / "visual_search.py"), "--model", "hf:/nowhere", *wrong]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, said in done.stderr.splitlines()[-1]) == (2, True), done.stderr
