"""`examples/web_agent.py` in headless Chromium, and its pages: what the browser shows is what the model was trained on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ctxwin.tiny import world
from twins import guard

pytestmark = pytest.mark.browser

pytest.importorskip("playwright")
pytest.importorskip("langgraph")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def chromium(examples):
    from web.browser import find_chromium

    try:
        return find_chromium()
    except SystemExit as error:
        pytest.skip(str(error))


def run(*arguments, path=None):
    env = {**os.environ, **({} if path is None else {"PATH": path})}
    command = [sys.executable, str(EXAMPLES / "web_agent.py"), "--engine", "hf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_screenshots_are_the_worlds_frames(chromium):
    from web.browser import Browser
    from web.pages import Pages
    from web.shop import Shop

    pages = Pages(seed=5, count=6)
    with Shop(pages) as shop, Browser(shop.side, shop.side) as browser:
        browser.open(shop.url)
        for page, frame in enumerate(pages.frames):
            shown = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"))
            assert np.array_equal(shown, world.render(frame)), f"page {page}"
            assert browser.url.endswith(f"/{page}")
            assert browser.links() == [name for name, there in (("Back", page > 0), ("Next", page < 5)) if there]
            if page < 5:
                browser.click("Next")
        browser.click("Back")
        assert browser.url.endswith("/4")


@guard
def test_the_agent_answers_as_a_reprefill_and_computes_a_quarter(chromium, tmp_path):
    trace = tmp_path / "trace.jsonl"
    done = run("--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # and nothing else was printed
    assert figures["policy"] == "scripted"
    assert figures["asks"] == figures["known"] == 47
    assert figures["right"] >= figures["right_reprefill"] >= 45
    assert figures["share_of_naive"] <= 0.25
    assert max(figures["share_of_trim"], figures["share_of_append"]) <= 1
    assert figures["vision_encodes"] == 24  # one a page, none for the look-backs
    assert all(figures["vision_encodes"] <= figures[f"vision_encodes_{p}"] for p in ("naive", "trim", "append"))
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(line.get("op") == "look_back" for line in events) == 10  # pages 4, 6, ... 22


@pytest.mark.slow
def test_what_it_prints(chromium):
    done = run("--steps", "6")
    assert done.returncode == 0, done.stderr
    assert "scripted" in done.stdout
    assert "keeps its newest 4 exchanges" in done.stdout
    assert sum(line.startswith("http://127.0.0.1:") for line in done.stdout.splitlines()) == 6
    assert "looks back at" in done.stdout
    assert "right: " in done.stdout


@pytest.mark.slow
def test_the_model_walks_through_any_site(chromium):
    from web.pages import Pages
    from web.shop import Shop

    with Shop(Pages(seed=1, count=4)) as shop:
        done = run("--url", shop.url, "--steps", "5", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["policy"] == "model"
    assert figures["known"] == 0
    assert figures["vision_encodes"] <= 4  # it came back to pages that it had seen


def test_without_a_browser_the_error_has_a_remedy(tmp_path):
    done = run("--json", path=str(tmp_path))
    assert done.returncode == 1
    assert "make system-deps" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_page_that_does_not_open_is_one_line(chromium):
    done = run("--url", "http://127.0.0.1:1/")
    assert done.returncode == 1
    assert "http://127.0.0.1:1/" in done.stderr
    assert "Traceback" not in done.stderr


def test_questions_agree_with_the_rule_of_the_world():
    """The oracle is the world's own `answer` over all pages, where the number is unique."""
    from web.pages import Pages

    pages = Pages(seed=3, count=20)
    asked = 0
    for page in range(3, 20):
        shown = list(range(page - 3, page + 1))
        for text, truth in pages.questions(page, shown, np.random.default_rng(page)):
            assert world.answer(pages.frames, text) == truth
            asked += 1
    assert asked > 50


def test_the_transcript_is_bounded_and_the_newest_screenshots_stay():
    from web_agent import NewestScreenshots

    from ctxwin import Chunk, Window
    from window.fake import FakeEngine

    engine = FakeEngine()
    with Window(engine, "watch", eviction=NewestScreenshots(2)) as window:
        shots, notes = [], []
        for n in range(4):
            shots.append(window.append(Chunk.image(np.full((28, 28, 3), n * 50, np.uint8))))
            notes.append(window.append(Chunk.text(f"note {n}")))
        assert window.slide(3) == [*notes[:2], shots[0]]
        assert window.slide(4) == [*shots[1:], notes[2]]
