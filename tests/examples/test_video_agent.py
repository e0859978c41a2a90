"""The LangGraph agent over a video: figures, look-backs on the model's word, interrupts, size of its checkpoints."""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
import sys
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from PIL import Image

from core.videos import number_of, write
from ctxwin import open_engine
from ctxwin.errors import BadMedia
from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip
from examples.agent_runs import EXAMPLES, check_figures, figures_of
from twins import guard


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("video_agent", EXAMPLES / "video_agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "video_agent", module)  # where LangGraph looks up the state's types
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_answers_like_a_re_prefill_and_computes_a_fraction() -> None:
    figures = figures_of("video_agent")
    check_figures(figures)
    assert figures["asks"] == 38  # one a second, and eight look-backs
    assert figures["vision_encodes"] == 30  # a frame each, none for a look-back


@guard
def test_a_video_is_asked_the_users_questions(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    write_clip(clip, world.make_stream(3, 5))
    figures = figures_of("video_agent", str(clip), "--ask", "What is this?", "--ask", "Where is it?")
    assert figures["policy"] == "model"
    assert (
        figures["asks"] == 6
    )  # every second second and at the end, the model is asked where to look, then the question
    assert figures["known"] == 0
    assert figures["compared"] == 6


@pytest.mark.parametrize(("said", "back"), [("t=3 s", [3]), ("t=9 s", []), ("none", []), ("t=8 s or t=1 s", [1])])
def test_the_model_decides_where_to_look_back(example: ModuleType, said: str, back: list[int]) -> None:
    policy = example.Model(("What was there?",), last=20)
    decoder = SimpleNamespace(ask=lambda query, max_tokens: SimpleNamespace(text=said))
    task = policy.next(9, 0, decoder, [4, 5, 6, 7, 8, 9])
    assert task == {"question": "What was there?", "back": back, "truth": None}
    assert policy.next(9, 1, decoder, [4, 5, 6, 7, 8, 9]) is None


def test_stopped_before_every_answer_it_says_the_same(example: ModuleType) -> None:
    stream = world.make_stream(1, 9, window=6)
    frames = example.film(stream)
    with open_engine("tiny:hf") as engine:

        def run(**stops: Any) -> tuple[list[tuple[str, str]], int, list[int]]:
            context = example.Context(
                engine=engine, ledger=Silent(), frames=frames, policy=example.Scripted(stream, 1), budget=487, reserve_tokens=48,
                max_tokens=4, serving={},
            )  # fmt: skip
            agent = example.graph().compile(checkpointer=InMemorySaver(), **stops)
            config = {"configurable": {"thread_id": "t"}, "recursion_limit": 100}
            heard, runs, given = [], 0, {}
            while given is not None or agent.get_state(config).next:
                runs += 1
                events = agent.stream(given, config, context=context, stream_mode="custom")
                heard += [(e["query"], e["answer"]) for e in events if e["op"] == "ask"]
                given = None
            return heard, runs, [len(json.dumps(s.values)) for s in agent.get_state_history(config)]

        whole, runs, sizes = run()
        assert (len(whole), runs) == (10, 1)  # one a second, and a look-back
        assert max(sizes) < 4_000  # of the state in a checkpoint, as JSON
        stopped, runs, _ = run(interrupt_before=["answer"])
        assert (stopped, runs) == (whole, 11)


def test_a_script_is_called_one(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = example.agent_options.parser("").parse_args(["--model", "tiny:hf"])
    with example.agent_options.running(options) as run:
        assert run.scripted
    assert "scripted" in capsys.readouterr().out
    with example.agent_options.running(options, scripted=False):
        pass
    assert "scripted" not in capsys.readouterr().out


def test_a_long_large_video_is_cut_and_made_smaller(example: ModuleType, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    write_clip(clip, [np.full((320, 640, 3), 40 * shade, np.uint8) for shade in range(5)])
    frames = example.agent_options.decoded(clip, 3)
    assert [frame.shape for frame in frames] == [(224, 448, 3)] * 3
    assert [round(frame.mean() / 40) for frame in frames] == [0, 1, 2]
    assert len(example.agent_options.decoded(clip, 30)) == 5
    clip.write_bytes(write("webm", "libvpx", [Fraction(i) for i in range(12)], options={"live": "1"}))  # of no length
    assert len(example.agent_options.decoded(clip, 9)) == 9
    with pytest.raises(BadMedia):
        example.agent_options.decoded(tmp_path / "none.mp4", 3)


def test_a_camera_pushes_a_video_at_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, pushed = tmp_path / "clip.mkv", list[tuple[int, float]]()
    clip.write_bytes(write("matroska", "ffv1", [Fraction(1001 * i, 24_000) for i in range(72)]))

    def push(raw: bytes, text: str, time: float) -> None:
        pushed.append((number_of(np.asarray(Image.open(io.BytesIO(raw)))), time))
        assert text == f"t={time:g} s"

    state = SimpleNamespace(placed=[], dropped=0)
    live = SimpleNamespace(push=push, stream=lambda *_, **__: ["a cat"], settle=lambda: None, state=state)
    window = SimpleNamespace(id="w", ids=[], evicted=[])
    monkeypatch.setattr("ctxwin_client.LiveStream", lambda *_, **__: nullcontext(live))
    monkeypatch.setattr("ctxwin_client.RemoteWindow", lambda *_, **__: nullcontext(window))
    monkeypatch.setattr("time.sleep", lambda _: None)

    def run(video: Path) -> None:
        monkeypatch.setattr(
            sys, "argv", ["live_camera.py", "--video", str(video), "--question", "what?", "--seconds", "2"]
        )
        runpy.run_path(str(EXAMPLES / "live_camera.py"))

    run(clip)
    assert [number for number, _ in pushed] == [0, 6, 12, 18, 24, 30, 36, 42]
    assert all(abs(time - number * 1001 / 24_000) < 1e-3 for number, time in pushed)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "none.mkv")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("video_agent.py --frames 0", "argument --frames: must be at least 1, got 0"),
        ("video_agent.py --seed -1", "argument --seed: must be at least 0, got -1"),
        ("video_agent.py --ask what?", "--ask needs a VIDEO"),
        ("video_agent.py none.mp4", "video path must be a readable file, got 'none.mp4'"),
        ("two_agents.py none.mp4", "video path must be a readable file, got 'none.mp4'"),
        ("two_agents.py --model foo:bar", "an engine name must be"),
        ("two_agents.py --model tiny:hf --trace none/a.jsonl", "No such file or directory"),
        ("live_camera.py --seconds 0", "--seconds and --fps"),
        ("live_camera.py --base-url http://127.0.0.1:9/v1", "start one: ctxwin serve"),
        ("remote_window.py --base-url http://127.0.0.1:9/v1", "start one: ctxwin serve"),
        ("remote_window.py --frames 0", "--frames must be at least 1, got 0"),
        ("langgraph_restart.py --none", "unrecognized arguments: --none"),
    ],
)
def test_what_cannot_be_had_is_told_in_a_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    assert caught.value.code == 2 and said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Silent:
    """A watcher that counts nothing."""

    def watch(self, window: object) -> None: ...

    def truth(self, text: str | None) -> None: ...
