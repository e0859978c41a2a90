"""The figures of `ctxwin bench reuse`: summaries and checks by hand, bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin_evals.bench.command import check_lines, reuse_table
from ctxwin_evals.bench.moves import ARMS, MOVES
from ctxwin_evals.bench.reuse import BOUNDS, Sample, Settings, checks, summary
from ctxwin_evals.stats import bootstrap_median


def run(ours: float, floor: float, prefix: float, trim: float, append: float, cpu: float = 1.0) -> dict[str, Sample]:
    times = {"ctxwin": ours, "floor": floor, "prefix": prefix, "trim": trim, "append": append}
    times["look back"] = max(trim, append)
    return {name: Sample(t, 10 * t, cpu) for name, t in times.items()}


def row(op: str, tokens: int, *runs: dict[str, Sample]) -> dict[str, Any]:
    return {"op": op, "tokens": tokens, "lanes": {"survivor": tokens}, **summary(runs)}


def test_ratios_are_the_runs_own() -> None:
    """A machine that is slow in one run is slow for all of it."""
    made = summary([run(t, t / 2, 4 * t, 3 * t, 5 * t) for t in (1.0, 9.0, 2.0)])
    assert made["arms"]["ctxwin"]["ttft_s"]["median"] == 2.0 and made["arms"]["floor"]["ttft_s"]["median"] == 1.0
    assert {name: made["arms"][name]["ratio"] for name in ("floor", "prefix")} == {
        "floor": {"median": 2.0, "interval": [2.0, 2.0]}, "prefix": {"median": 0.25, "interval": [0.25, 0.25]},
    }  # fmt: skip
    assert made["arms"]["trim"]["computed_tokens"] == 60.0 and made["cleverest"] == "trim" and made["runs"] == 3


def test_cpu_seconds_are_those_of_an_engine_in_this_process() -> None:
    runs = [run(1.0, 1.0, 1.0, 1.0, 1.0, cpu) | {"peer": Sample(1.0, 5.0, 0.0)} for cpu in (0.6, 0.5, 2.0)]
    arms = summary(runs)["arms"]
    assert arms["prefix"]["cpu_s"] == 0.6 and arms["prefix"]["cpu_ratio"]["median"] == 1.0
    assert (
        arms["peer"]["cpu_s"] is None and arms["peer"]["cpu_ratio"] is None and arms["peer"]["computed_tokens"] == 5.0
    )
    assert {arm["cpu_s"] for arm in summary(runs, local=False)["arms"].values()} == {None}


def test_the_interval_of_a_median() -> None:
    assert bootstrap_median([3.0]) is None
    low, high = bootstrap_median([5.0, 1.0, 2.0, 3.0, 4.0]) or (0.0, 0.0)
    assert 1.0 <= low < 3.0 < high <= 5.0
    # By drawing again without the counts.
    rng = np.random.default_rng(1)
    values = rng.normal(size=40)
    drawn = np.median(rng.choice(values, (20_000, 40)), axis=1)
    assert bootstrap_median(list(values)) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.1)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.0, 1.01, 1.02], "holds"), ([1.2, 1.3, 1.4], "exceeded"), ([1.0, 1.1, 1.3], "open"), ([1.0], "open")],
)
def test_a_verdict_is_by_the_whole_interval(ratios: list[float], verdict: str) -> None:
    rows = [row("slide", 512, *(run(r, 1.0, 9.0, 9.0, 9.0) for r in ratios))]
    (found,) = checks(rows)
    assert (found["op"], found["tokens"], found["against"], found["bound"]) == ("slide", 512, "floor", 1.1)
    assert found["verdict"] == verdict
    (line,) = check_lines({"checks": [found]})
    assert line.startswith(f"{verdict}: slide at 512 tokens: {found['median']:.2f}") and "of floor, at most 1.1" in line
    assert ("[" in line) == (len(ratios) > 1)


def test_every_bound_is_of_a_move_and_somebody_who_is_asked() -> None:
    assert set(BOUNDS) <= set(MOVES) and {against for against, _ in BOUNDS.values()} <= set(ARMS)
    (oldest,) = checks([row("oldest", 512, *[run(3.0, 1.0, 9.0, 9.0, 4.0)] * 2)])
    assert oldest["against"] == "append" and oldest["verdict"] == "holds"
    assert checks([row("copy", 512, run(1.0, 1.0, 1.0, 1.0, 1.0))]) == []


def test_the_table_has_a_line_a_row() -> None:
    machine = {"cpu": "a cpu", "threads": 1, "load_before": [0.5], "load": [0.7]}
    model = {"name": "m", "layers": 2, "kv_bytes_per_token": 8, "dtype": "bfloat16"}
    meta = {"engine": "vllm", "machine": machine, "model": model, "settings": {"runs": 2}}
    rows = [row(op, 256, run(0.1, 0.1, 0.4, 0.2, 0.3), run(0.2, 0.1, 0.4, 0.2, 0.3)) for op in ("slide", "toggle")]
    table = reuse_table({"rows": rows, "meta": meta})
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert table.row_count == 2
    assert (cells["ctxwin"], cells["trim"], cells["over floor"]) == ("150.0 (2)", "200.0 (2)", "1.50 [1.00, 2.00]")
    assert cells["over cleverest"] == "0.75 [0.50, 1.00]" and cells["by CPU"] == "1.00 [1.00, 1.00]"
    assert "load 0.5 before and 0.7 after" in str(table.caption)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ops", "slide,fly"], f"ops must be some of {', '.join(MOVES)}, got fly"),
        (["--ops", ","], "ops must be some of"),
        (["--tokens", "8"], "tokens must be numbers of at least 16, got [8]"),
        (["--tokens", "many"], "numbers must be integers >= 0 separated by commas"),
        (["--rank", "0"], "rank must be at least 1, got 0"),
        (["--runs", "0"], "runs must be at least 1, got 0"),
        (["--engine", "tgi"], "engine must be hf or vllm and its options a JSON object, got 'tgi'"),
        (["--peers", "mooncake"], "--peers must be some of offloading, lmcache, got mooncake"),
        (["--engine", "hf", "--peers", "lmcache"], "--peers run beside vLLM only, got --engine hf"),
        (["--engine-options", "fast"], "engine options must be a JSON object, got 'fast'"),
        (["--model", "no/such/folder"], "--model must be a local model folder"),
        (["--out", "no/such/folder/result.json"], "--out must be a file in a folder that exists"),
        (["--out", "."], "--out must be a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", "reuse", *arguments])
    assert result.exit_code == 2
    assert told in result.stderr and len(result.stderr.splitlines()) == 1 and result.stdout == ""


def test_a_folder_for_the_generated_model_goes_with_no_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "reuse", "--model", str(tmp_path), "--model-dir", str(tmp_path)])
    assert result.exit_code == 2 and "not both" in result.stderr


def test_settings_are_plain() -> None:
    """They go into the result as they are."""
    assert json.loads(json.dumps(Settings().ops)) == list(MOVES)
    assert Settings().tokens == (512, 2048, 4096) and Settings().runs >= 5


def test_quick_measures_less_and_flags_still_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin import opening
    from ctxwin_evals.bench import reuse

    measured: list[Settings] = []

    class StopError(ValueError):
        pass

    def measure(engine: Any, settings: Settings, told: Any, peers: Any) -> Any:
        measured.append(settings)
        raise StopError("enough")

    class Engine:
        def close(self) -> None: ...

    monkeypatch.setattr(reuse, "measure", measure)
    monkeypatch.setattr(opening, "open_engine", lambda *_, **options: Engine())
    for more in ([], ["--quick"], ["--quick", "--runs", "3"]):
        CliRunner().invoke(app, ["bench", "reuse", "--engine", "hf", "--model", str(tmp_path), *more])
    assert measured == [Settings(), *(Settings(tokens=(512,), runs=runs) for runs in (12, 3))]
