"""The serving study on the bundled model: answers, a run that is killed and continued, its schema, the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

import typer
from typer.testing import CliRunner

from ctxwin.engines.open import open_engine
from ctxwin.evals.studies.serve import plain, sweep
from ctxwin.evals.studies.serve.__main__ import main
from ctxwin.evals.studies.serve.figures import plain_figures
from ctxwin.evals.studies.serve.policies import POLICIES, Film, Prompts, Windows, budget_of
from ctxwin.evals.studies.serve.show import lines, picture, serve_table
from ctxwin.evals.studies.serve.trace import Mix, Turn, frames_of, trace
from ctxwin.fidelity import Fidelity
from ctxwin.policies import OldestFirst
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.vllm.engine import VLLMEngine

ROOT = Path(__file__).parents[2]
MIX = Mix(sessions=2, frames=3, look_backs=0.4)
TOKENS = 32
SETTINGS = sweep.Settings(
    windows=2, frames=3, tokens=TOKENS, answer=3, rates=(2.0, 6.0), duration=1.5, requests=4, threads=1, clock="cpu"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = open_engine("tiny:vllm", dtype="float32")
    yield opened  # type: ignore[misc]
    opened.close()


@pytest.fixture
def film(engine: VLLMEngine) -> Iterator[Film]:
    seen = engine.view("film")
    yield Film(seen, MIX, TOKENS, 0)
    seen.close()


def heard() -> None:
    """Nobody listens."""


def test_every_policy_answers_the_trace_and_exact_windows_as_a_reprefill_does(engine: VLLMEngine, film: Film) -> None:
    turns = trace(MIX, 24, seed=0)
    film.shoot(frames_of(turns, MIX, 0))
    budget = budget_of(engine, MIX, TOKENS, 4)
    windows = Windows(engine.view("exact"), film, budget, 4, Fidelity("exact"))
    naive = Prompts("naive", engine.view("naive"), film, budget, 4)
    try:
        windows.begin()
        naive.begin()
        for turn in turns:
            ours, theirs = windows.serve(turn, heard), naive.serve(turn, heard)
            assert ours.token_ids == theirs.token_ids, turn
            assert ours.prompt == theirs.prompt, turn
            assert theirs.computed + theirs.cached == theirs.prompt
    finally:
        windows.close()
        naive.close()


def test_patched_windows_compute_the_new_frame_alone_and_look_back_for_nothing(engine: VLLMEngine, film: Film) -> None:
    turns = trace(MIX, 30, seed=0)
    film.shoot(frames_of(turns, MIX, 0))
    windows = Windows(engine.view("patched"), film, budget_of(engine, MIX, TOKENS, 3), 3)
    try:
        windows.begin()
        for turn in turns:
            served = windows.serve(turn, heard)
            query = engine.encode_query(turn.query).tokens
            if turn.kind == "now":
                assert served.computed == TOKENS + query
                assert served.lanes["survivor"] == (MIX.frames - 1) * TOKENS
            elif turn.kind == "back":
                assert served.computed == query
            assert served.misses == served.fallbacks == 0
    finally:
        windows.close()


def turn(kind: Any, frame: int, *placed: int) -> Turn:
    return Turn(0, 0, kind, frame, placed, 0)


def test_users_of_the_prefix_cache_hold_what_the_ledger_says(engine: VLLMEngine, film: Film) -> None:
    """The same moves in a window that a `Ledger` watches: the same frames in the same order, branches aside."""
    from ctxwin.baselines.ledger import Ledger
    from ctxwin.evals.studies.serve.policies import SYSTEM_PROMPT

    mix, answer = MIX, 4
    turns = [t for t in trace(mix, 60, seed=0) if t.session == 0 and t.kind in ("now", "back")]
    film.shoot(frames_of(turns, mix, 0))
    budget = budget_of(engine, mix, TOKENS, answer)
    users = {name: Prompts(name, engine.view(name), film, budget, answer) for name in ("trim", "append")}
    ledger = Ledger(
        engine, reserve_tokens=budget - engine.encode_system_prompt(SYSTEM_PROMPT).tokens - (mix.frames + 1) * TOKENS
    )
    window = Window(engine, SYSTEM_PROMPT, budget=budget, eviction=OldestFirst())
    ledger.watch(window)
    ids: list[str] = []

    def arrive(number: int) -> None:
        ids.append(window.append(film.frame(0, number)))
        window.slide(max(0, len(window.ids) - mix.frames))

    try:
        for number in range(film.past(0)):
            arrive(number)
        for user in users.values():
            user.open(0, ())
        for one in turns:
            if one.kind == "now":
                arrive(one.frame)
            else:
                window.recall(ids[one.frame])
            for name, user in users.items():
                held = [ids.index(i) for i in ledger._users[window.id][name].held]
                assert user.prompt(one) == held, (name, one)
            if one.kind == "back":
                window.slide(1)  # the oldest: it makes room again
                assert one.frame not in [ids.index(i) for i in window.ids]
    finally:
        window.close()
        for user in users.values():
            user.close()


def test_what_a_user_of_the_prefix_cache_sends(engine: VLLMEngine, film: Film) -> None:
    film.shoot({0: 30, 1: 30})
    budget = budget_of(engine, MIX, TOKENS, 4)
    trim, append, naive = (Prompts(name, engine.view(name), film, budget, 4) for name in ("trim", "append", "naive"))
    try:
        for user in (trim, append, naive):
            user.open(0, ())
        last = film.past(0) - 1
        assert trim.held(0) == append.held(0)
        assert trim.held(0)[-1] == last
        assert len(trim.held(0)) <= MIX.frames + 1
        back = turn("back", 0, 0, last - 2, last - 1, last)
        assert naive.prompt(back) == [0, last - 2, last - 1, last]
        assert trim.prompt(back)[0] == 0
        assert append.prompt(back)[-1] == 0
        assert append.prompt(back).count(0) == 1  # it is still there
        swapped = turn("reorder", -1, last - 2, last, last - 1)
        assert naive.prompt(swapped) == [last - 2, last, last - 1]
        held = trim.held(0)
        assert trim.prompt(swapped)[-2:] == [held[-1], held[-2]]
        assert trim.held(0) == held  # that was a branch
    finally:
        for user in (trim, append, naive):
            user.close()


class KilledError(Exception):
    pass


def test_a_killed_run_continues_and_its_result_is_whole(engine: VLLMEngine, tmp_path: Path) -> None:
    row = sweep.settings_row(SETTINGS, "tiny")
    opened = 0

    def view() -> VLLMEngine:
        nonlocal opened
        opened += 1
        return engine.view("run")

    def kills(what: str, done: int, total: int) -> None:
        if what.startswith("trim") and "requests" in what:
            raise KilledError

    with pytest.raises(KilledError):
        sweep.measure(view, SETTINGS, sweep.Progress(tmp_path, row), kills)
    before = json.loads((tmp_path / sweep.STATE).read_text())["cells"]
    assert [c["policy"] for c in before] == ["ctxwin", "naive"]
    progress = sweep.Progress(tmp_path, row)
    result = sweep.measure(view, SETTINGS, progress, lambda *_: None)
    assert progress.cells[:2] == before
    assert opened == 2
    again = sweep.measure(view, SETTINGS, sweep.Progress(tmp_path, row), lambda *_: None)
    assert opened == 2  # nothing was left to measure
    assert again["rows"] == result["rows"]
    check_schema(result)
    picture(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    picture(result, tmp_path / "p.svg")
    assert serve_table(result).row_count == len(result["rows"])
    assert any("requests/s at p95" in line for line in lines(result))


def check_schema(result: dict[str, Any]) -> None:
    """What `sweep.result_of` and `load.cell_of` promise."""
    json.dumps(result, allow_nan=False)
    assert set(result) == {"rows", "comparison", "ratio", "plain", "checks", "meta"}
    rows = result["rows"]
    assert {(r["policy"], r["rate"]) for r in rows if r["rate"] == 2.0} == {(p, 2.0) for p in POLICIES}
    numbers = {
        "rate", "seconds", "requests_per_s", "requests", "completed", "dropped", "failed", "prompt_tokens",
        "computed_tokens", "cached_tokens", "answer_tokens", "loads", "bytes_loaded", "misses", "fallbacks",
        "cpu_s_per_request",
    }  # fmt: skip
    for row in rows:
        assert all(isinstance(row[name], int | float) for name in numbers)
        assert row["requests"] == row["completed"] + row["dropped"] + row["failed"]
        assert row["failed"] == 0, row["errors"]
        assert set(row["ttft_s"]) == set(row["inter_token_s"]) == set(row["wait_s"]) == {"p50", "p95", "p99"}
        assert row["ttft_s"]["p50"] > 0
        assert row["ttft_s"]["p50"] <= row["ttft_s"]["p95"] <= row["ttft_s"]["p99"]
        assert 0 <= row["goodput_per_s"] <= row["requests_per_s"]
        assert (row["policy"] == "ctxwin") == bool(row["tokens_by_lane"])
        assert row["policy"] == "ctxwin" or row["loads"] == 0
    # The same trace for everybody, at one rate.
    for rate in {r["rate"] for r in rows}:
        assert len({r["requests"] for r in rows if r["rate"] == rate}) == 1
    first = {r["policy"]: r["computed_tokens"] for r in rows if r["rate"] == 2.0}
    assert first["ctxwin"] < first["append"] < first["naive"]
    at = result["comparison"]["at_slo"]
    assert set(at) == {"bound_s", "rates", "at_least", "best_prefix_cache", "ratio", "ratio_is"}
    assert result["ratio"] == at["ratio"]
    assert {"machine", "versions", "model", "fidelity", "settings", "capacity_per_s", "date"} <= set(result["meta"])


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    import subprocess
    import sys

    cases = {
        ("--windows", "0"): "sessions must be at least 1, got 0",
        ("--rates", "1,x"): "--rates must be comma-separated numbers, got '1,x'",
        ("--model", "/nowhere"): "--model must be a local model folder, got '/nowhere'",
        ("--plain-only", "--plain-pairs", "0"): "--plain-only needs at least one pair of slices, got --plain-pairs 0",
    }
    for options, told in cases.items():
        found = subprocess.run(
            [sys.executable, "-m", "evals.studies.serve", "--out", str(tmp_path / "out"), *options],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert found.returncode == 2, found.stderr
        assert told in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
        assert found.stdout == ""


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_help_names_the_options() -> None:
    shown = CliRunner().invoke(command(), ["--help"], env={"COLUMNS": "200"}).output
    for option in ("--windows", "--rates", "--duration", "--model", "--processes", "--seed", "--out", "--json"):
        assert option in shown


def test_quick_measures_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from ctxwin.evals.studies.serve import plain
    from ctxwin.evals.studies.serve.sweep import Settings as ServeSettings

    seen: list[ServeSettings] = []
    monkeypatch.setattr(plain, "measure_plain", lambda folder, settings, *_: seen.append(settings))
    options = [
        "--quick",
        "--json",
        "--plain-only",
        "--plain-pairs",
        "1",
        "--model",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    CliRunner().invoke(command(), options)
    (settings,) = seen
    assert (settings.windows, settings.frames, settings.requests) == (6, 4, 12)
    assert settings.ladder == (0.5, 1.0, 2.0)


@pytest.mark.slow
def test_plain_traffic_in_two_processes(tmp_path: Path) -> None:
    """The connector and windows beside; an engine each. No statement about 5 %: these are two slices of a second."""
    from ctxwin.tiny import checkpoint_dir

    settings = sweep.Settings(windows=2, frames=3, tokens=TOKENS, answer=3, rates=(1.0,), threads=1, clock="cpu")
    asked = plain.PlainSettings(pairs=2, seconds=1.0, prompt=16, answer=6, burst=3, bursts=2, windows=2)
    progress = sweep.Progress(tmp_path, sweep.settings_row(settings, "tiny"))
    plain.measure_plain(str(checkpoint_dir()), settings, asked, progress, lambda *_: None)
    assert [(s["pair"], s["side"]) for s in progress.state["slices"]] == [
        (0, "with"), (0, "without"), (0, "windows"), (1, "without"), (1, "with"), (1, "windows"),
    ]  # fmt: skip
    assert len({s["tokens"] for s in progress.state["slices"]}) == 1
    found = plain_figures(progress.state["slices"])
    for side in ("without", "with", "windows"):
        assert found["sides"][side]["inter_token_s"]["p99"] > 0
        assert found["sides"][side]["burst_tokens_per_s"] > 0
    assert found["sides"]["windows"]["window_asks"] > 0
    assert found["ratios"]["inter_token_p99"]["pairs"] == 2
    # Nothing is left to do, so no engine is started.
    plain.measure_plain("/nowhere", settings, asked, progress, lambda *_: None)
