"""Chats with edited histories on vLLM's own command with our plugin, in exact mode and with the bundled profile.

``CTXWIN_HISTORIES`` says how many the slow test runs, ``CTXWIN_HISTORIES_SEED`` which, and ``CTXWIN_HISTORIES_OUT`` names a file
for the figures, from which an interrupted run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from adapters.server.histories import Edit, History, Part, Step, histories
from adapters.server.history_runner import Figures, Runner
from adapters.server.vllm.processes import Process

BATCH = 50
OPTIONS = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)
WINDOWS = 0.95
"""Least share of answers with a window behind them: what is compared must have been there."""


def picture(number: int) -> Part:
    return "picture", number, 0


SHOW = Step("user", (picture(0), picture(1), picture(2)), (), False, 0, "", "", 0)
SHOT = replace(SHOW, turn="tools", parts=(("text", 0, 0), picture(3)))
FIRST = History("chat", True, False, False, False, False, 0, (SHOW,))


def asked(history: History, *steps: Step, **changes: Any) -> History:
    return replace(history, steps=steps, **changes)


def edited(*edits: tuple[str, int, int], step: Step = SHOW) -> Step:
    """A request behind edits that adds nothing but a question."""
    return replace(step, turn="user", parts=(("text", 0, 0),), edits=tuple(Edit(*edit) for edit in edits))


NAMED = {
    "a picture in front of the others": asked(FIRST, SHOW, edited(("in_front", 0, 5)), edited(("in_front", 0, 6))),
    "an old picture becomes a text and comes back": asked(
        FIRST, SHOW, SHOW, edited(("to_text", 0, 0)), edited(("to_text", 1, 0)), edited(("to_picture", 0, 0))
    ),
    "turns are dropped at the front": asked(FIRST, SHOW, SHOT, edited(("drop", 0, 0)), edited(("drop", 0, 0))),
    "turns are swapped": asked(FIRST, SHOW, SHOT, edited(("swap_turns", 0, 2)), edited(("swap_turns", 2, 0))),
    "results of parallel calls are swapped": asked(FIRST, SHOT, edited(("swap_results", 0, 0)), SHOT),
    "the system prompt tells the time": asked(FIRST, SHOW, *[edited(("clock", 0, 0))] * 3),
    "an early text is edited": asked(FIRST, SHOT, SHOT, edited(("edit_text", 0, 0)), edited(("edit_text", 1, 1))),
    "pictures are cleared": asked(FIRST, SHOW, *[replace(SHOW, manages="pictures", keep=2)] * 3),
    "results are cleared": asked(FIRST, *[replace(SHOT, manages="results", keep=1)] * 4),
    "results are cleared on messages": asked(FIRST, *[replace(SHOT, manages="results", keep=1)] * 3, route="messages"),
    "it is compacted on messages": asked(FIRST, SHOW, replace(SHOW, manages="compact"), SHOT, route="messages"),
    "it is compacted on responses": asked(FIRST, SHOW, replace(SHOW, manages="compact"), SHOT, route="responses"),
    "the system prompt comes as blocks": asked(FIRST, SHOW, SHOT, SHOW, route="messages", blocks=True),
    "functions give pictures": asked(FIRST, SHOT, SHOT, SHOT, route="responses"),
    "a developer speaks": asked(FIRST, SHOW, replace(SHOW, turn="developer", parts=(("text", 0, 1),)), SHOW),
    "two conversations have one name": asked(FIRST, SHOW, replace(SHOT, track=1), SHOT, replace(SHOW, track=1), SHOW),
    "the client leaves before an answer about new pictures": asked(
        FIRST, *[replace(SHOW, leaves="before", keep=keep) for keep in range(4)], SHOW, fresh=True, first=1
    ),
    "the client leaves in a stream": asked(FIRST, replace(SHOW, leaves="stream"), SHOW, SHOT, fresh=True, first=2),
    "an answer is asked for again": asked(FIRST, SHOW, *[replace(SHOW, turn="again", streamed=True)] * 2),
}
"""What clients do every day, one by one."""


@cache
def warm_up(url: str) -> None:
    """Kernels are compiled at their first use, pictures read."""
    every = replace(SHOW, parts=tuple(map(picture, range(8))))
    for route in ("chat", "responses", "messages"):
        Runner(url).run(asked(FIRST, every, route=route))


@pytest.fixture
def server(vllm_server: Process) -> Process:
    warm_up(vllm_server.url)
    return vllm_server


def explore(run: Callable[[History], object], *decorators: Callable[[Any], Any]) -> None:
    """Runs histories, as many as Hypothesis is set to draw."""

    @given(histories)
    def check(history: History) -> None:
        run(history)

    for decorate in decorators:
        check = decorate(check)
    check()


def check_counters(server: Process, figures: Figures) -> None:
    """Nothing fell back to vLLM for a fault of ours, and windows stood behind nearly all answers."""
    counters = server.metrics()
    assert not counters.get('ctxwin_chats_total{behind="failed",tenant=""}')
    assert not counters.get('ctxwin_fallbacks_total{tenant=""}')
    for way in ("exact", "profile"):
        assert figures.windows[f"{way}: auto"] >= WINDOWS * figures.answers[way], figures.windows


@pytest.mark.parametrize("history", NAMED.values(), ids=NAMED)
def test_what_clients_do(server: Process, history: History) -> None:
    runner = Runner(server.url)
    runner.run(history)
    check_counters(server, runner.figures)


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.guard])])
def test_every_history_is_answered_as_vllm_answers_it(server: Process, count: int) -> None:
    runner = Runner(server.url)
    explore(runner.run, settings(OPTIONS, max_examples=count, derandomize=True))
    print(json.dumps(runner.figures.summary()))
    check_counters(server, runner.figures)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_thousands_of_histories(server: Process) -> None:
    count = int(os.environ.get("CTXWIN_HISTORIES", "2000"))
    begin = int(os.environ.get("CTXWIN_HISTORIES_SEED", "0"))
    file = os.environ.get("CTXWIN_HISTORIES_OUT")
    state: dict[str, Any] = {"batches": {}}
    if file and Path(file).exists():
        state = json.loads(Path(file).read_text())
    total = Figures()
    for batch in range(begin, begin + -(-count // BATCH)):
        result = state["batches"].get(str(batch))
        if result is None:
            runner, failure = Runner(server.url, () if batch % 4 else ("again", "uncached")), ""
            try:
                explore(runner.time, seed(batch), settings(OPTIONS, max_examples=BATCH))
            except AssertionError as error:
                failure = "\n".join([str(error), *getattr(error, "__notes__", ())])
            result = {"failure": failure, "figures": runner.figures.data()}
            state["batches"][str(batch)] = result
        total.add(result["figures"])
        state["summary"] = total.summary()
        if file:
            Path(file).write_text(json.dumps(state))
        print(f"batch {batch}: {json.dumps(state['summary'])} {result['failure']}", flush=True)
    failures = {batch: result["failure"] for batch, result in state["batches"].items() if result["failure"]}
    assert not failures, "\n\n".join(f"seed {batch}: {failure}" for batch, failure in failures.items())
    check_counters(server, total)
    assert not total.slow, "\n".join(total.slow)
