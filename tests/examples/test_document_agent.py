"""The document agent: what it computes, its PDF, its forks, and what it does with a document of the user's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ctxwin.tiny import world
from ctxwin.view.trace import read_trace
from examples.agent_runs import EXAMPLES, check_figures, figures_of, run_example
from twins import guard

pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed; run pip install 'ctxwin[pdf]'")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("document_agent")


@pytest.mark.slow
def test_it_answers_like_a_re_prefill_for_a_quarter_of_the_tokens(tmp_path: Path) -> None:
    figures = figures_of("document_agent", "--trace", str(tmp_path / "run.jsonl"))
    # Forks that do not show the answer have no truth; they are compared with a re-prefill.
    check_figures(figures | {"compared": figures["known"]})
    assert figures["asks"] == figures["compared"] == 16 + 24 * 2  # a note on each page, two forks a question
    assert figures["known"] >= 16 + 24  # the notes, and the adopted fork of each question
    assert figures["agree"] >= 0.9 * figures["compared"]
    assert figures["vision_encodes"] == 16  # each page once, however often it came back

    # Each question adopts one fork and closes all.
    events = read_trace(tmp_path / "run.jsonl").events
    count = Counter(event["op"] for event in events)
    assert (count["fork"], count["adopt"], count["append"]) == (48, 24, 16)
    assert {e["other"] for e in events if e["op"] == "fork"} <= {e["window"] for e in events if e["op"] == "close"}
    [document] = {event["window"] for event in events if event["op"] == "adopt"}
    asked = Counter(event["window"] == document for event in events if event["op"] == "ask")
    assert asked == {True: 16, False: 48}  # questions are asked in forks alone
    assert count["recall"] >= 24  # pages come back behind other pages


def test_the_pdf_gives_the_same_pixels_back(agent: ModuleType, tmp_path: Path) -> None:
    frames = [world.render(frame) for frame in world.make_stream(5, 3)]
    agent.write_pdf(tmp_path / "pages.pdf", frames)
    pages = agent.read_pdf(tmp_path / "pages.pdf", scale=1)
    assert [np.array_equal(page, frame) for page, frame in zip(pages, frames, strict=True)] == [True] * 3
    assert agent.read_pdf(tmp_path / "pages.pdf", scale=2)[0].size == (448, 448)


def test_questions_need_pages_that_were_looked_at_before(agent: ModuleType) -> None:
    policy = agent.Scripted(seed=0)
    about = [task.page for task in policy.tasks]
    assert len(about) == 24
    assert set(about) == set(range(16))
    for task in policy.tasks:
        assert world.answer(policy.frames, task.question) == task.truth  # in the whole document, too
        opened = policy.candidates(task, ask=None)
        assert [task.page] in [pages[-1:] for pages in opened]
        assert len({pages[-1] for pages in opened}) == 2


def test_the_model_names_candidates(agent: ModuleType) -> None:
    policy, asked = agent.Model(["Who signed?"]), []
    for note in ("a cover", "a letter", "signatures", "an index"):
        policy.noted(note)

    def ask(said: str) -> list[list[int]]:
        def answer(query: str) -> str:
            asked.append(query)
            return said

        return policy.candidates(policy.tasks[0], answer)

    assert ask("Pages 3, 2 and 3; not 17") == [[2], [1]]
    assert "page 3: signatures\n" in asked[0]
    assert asked[0].endswith("Who signed?")
    assert ask("none") == [[0], [1], [2]]


@guard
def test_a_pdf_of_the_users_is_read_with_their_questions(agent: ModuleType, tmp_path: Path) -> None:
    pdf = tmp_path / "mine.pdf"
    agent.write_pdf(pdf, [world.render(frame)[:, :150] for frame in world.make_stream(2, 4)])
    printed = run_example("document_agent", str(pdf), "--ask", "color of 17?", "--ask", "shape of 03?", "--scale", "1")
    assert "skimmed 4 pages" in printed
    assert "the same answer as a re-prefill" in printed
    assert "scripted" not in printed
    assert sum(line.startswith(("color of 17?", "shape of 03?")) for line in printed.splitlines()) == 2


def test_what_it_cannot_read_is_refused_before_a_model_is_opened(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.7 and no more")
    for wrong, said in (
        [[str(broken)], "--ask"],
        [["--ask", "Who?"], "PDF"],
        [[str(broken), "--ask", "Who?"], "broken.pdf"],
        [[str(tmp_path / "none.pdf"), "--ask", "Who?"], "none.pdf"],
        [["--scale", "0"], "--scale"],
    ):
        command = [sys.executable, str(EXAMPLES / "document_agent.py"), "--model", "hf:/nowhere", *wrong]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, said in done.stderr.splitlines()[-1]) == (2, True), done.stderr
