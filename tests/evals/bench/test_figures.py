"""The figures of `ctxwin bench reuse`: summaries and checks by hand, bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin_evals.bench.command import check_lines, note_lines, reuse_table
from ctxwin_evals.bench.reuse import Plain, Run, Settings, checks, quartiles, summary


def row(op: str, tokens: int, ttft: float, cache: float, floor: float, forward_free: bool = True) -> dict[str, Any]:
    return {
        "op": op, "tokens": tokens, "rank": 0, "ttft_s": ttft, "ttft_prefix_cache_s": cache, "ttft_local_hit_s": floor,
        "speedup": cache / ttft, "over_floor": ttft / floor, "forward_free": forward_free, "computed_tokens": 12,
        "lanes": {"survivor": tokens}, "cpu_s": {"over_floor_paired": 1.1},
    }  # fmt: skip


def test_a_summary_holds_medians_and_both_kinds_of_ratio() -> None:
    made = summary([
        Run(1.0, 0.9, Plain(10.0, 1.0, 5, 20)), Run(2.0, 1.8, Plain(30.0, 1.0, 5, 20)), Run(4.0, 3.6, Plain(20.0, 2.0, 6, 21)),
    ])  # fmt: skip
    assert (made["ttft_s"], made["ttft_prefix_cache_s"], made["ttft_local_hit_s"]) == (2.0, 20.0, 1.0)
    assert made["speedup"] == 10.0  # of the medians
    assert made["speedup_paired"] == 10.0  # the median of 10, 15 and 5
    assert (made["over_floor"], made["over_floor_paired"]) == (2.0, 2.0)
    assert made["quartiles"]["ttft_s"] == [1.5, 3.0]
    assert made["phases_s"]["window"] == pytest.approx(0.2)
    assert (made["runs"], made["prefix_hit_tokens"], made["local_hit_tokens"]) == (3, 6, 21)
    assert made["ttft_back_s"] is None


def test_paired_ratios_are_the_runs_own() -> None:
    """A machine that is slow in one run is slow for both sides of it."""
    made = summary([Run(t, t, Plain(4 * t, t / 2, 0, 0)) for t in (1.0, 9.0, 2.0)])
    assert made["speedup_paired"] == 4.0 and made["over_floor_paired"] == 2.0
    assert made["quartiles"]["speedup"] == [4.0, 4.0]


def test_cpu_seconds_are_those_of_an_engine_in_this_process() -> None:
    runs = [Run(1.0, 1.0, Plain(4.0, 1.0, 0, 0, 3.0, 0.5), cpu_s=c) for c in (0.6, 0.5, 2.0)]
    cpu = summary(runs)["cpu_s"]
    assert cpu == {"ask": 0.6, "prefix_cache": 3.0, "local_hit": 0.5, "over_floor_paired": 1.2}
    assert summary(runs, local=False)["cpu_s"] is None


def test_one_run_has_quartiles() -> None:
    assert quartiles([3.0]) == [3.0, 3.0]


def test_only_the_largest_size_is_checked() -> None:
    rows = [row("slide", 256, 9.0, 1.0, 1.0), row("slide", 2048, 1.2, 50.0, 1.0)]
    found = checks(rows)
    assert [(c["check"], c["op"], c["tokens"]) for c in found] == [
        ("speedup", "slide", 2048),
        ("over_floor", "slide", 2048),
    ]
    assert all(c["holds"] for c in found)


def test_the_bound_of_the_speedup_is_three_quarters_of_the_best_there_is() -> None:
    (just,) = (c for c in checks([row("recall", 2048, 4.0, 12.0, 3.0)]) if c["check"] == "speedup")
    assert just["bound"] == pytest.approx(0.75 * 12.0 / 3.0) and just["value"] == pytest.approx(3.0) and just["holds"]
    (below,) = (c for c in checks([row("recall", 2048, 4.001, 12.0, 3.0)]) if c["check"] == "speedup")
    assert not below["holds"]


def test_the_floor_counts_only_for_what_needs_no_forward() -> None:
    forward = row("reorder", 2048, 5.0, 50.0, 1.0, forward_free=False)
    assert [c["check"] for c in checks([forward])] == ["speedup"]
    (over,) = (c for c in checks([row("toggle", 2048, 1.31, 50.0, 1.0)]) if c["check"] == "over_floor")
    assert not over["holds"] and over["bound"] == 1.3
    assert checks([]) == []


def test_a_check_that_fails_says_so() -> None:
    result = {"checks": checks([row("toggle", 2048, 1.4, 50.0, 1.0)])}
    lines = check_lines(result)
    assert lines[0].startswith("FAILS: toggle at 2048 tokens: speedup 35.7x, at least 37.5x")
    assert lines[1].startswith("FAILS: toggle at 2048 tokens: 1.40 floors")


def test_what_was_formed_beforehand_is_told_with_every_chunks_lane() -> None:
    chunks = [{"chunk": "P3", "tokens": 9, "lane": "resident"}, {"chunk": "T", "tokens": 9, "lane": "orbit"}]
    more = {"chunks": chunks, "prepared": {"tokens": 4321, "forwards": 30, "seconds": 1.0}, "ttft_back_s": None}
    rows = [row("slide", 64, 1.0, 2.0, 1.0), row("reorder", 128, 1.0, 2.0, 1.0) | more]
    told = "reorder at 128 tokens: P3 resident, T orbit; 4,321 tokens in 30 forwards beforehand"
    assert note_lines({"rows": rows}) == [told]
    rows[1]["ttft_back_s"] = 0.05
    assert note_lines({"rows": rows}) == [f"{told}; back again 50.0 ms"]


def test_the_table_has_a_line_a_row() -> None:
    machine = {"cpu": "a cpu", "threads": 1, "load_before": [0.5], "load_after": [0.7]}
    model = {"name": "m", "layers": 2, "kv_bytes_per_token": 8, "dtype": "bfloat16"}
    meta = {"engine": "vllm", "machine": machine, "model": model, "settings": {"runs": 5}}
    rows = [row("slide", 256, 0.1, 1.0, 0.1), row("toggle", 256, 0.1, 1.0, 0.1, forward_free=False)]
    table = reuse_table({"rows": rows, "meta": meta})
    assert table.row_count == 2
    assert list(table.columns[9].cells) == ["none", "12 tokens"]
    assert "load 0.5 before and 0.7 after" in str(table.caption)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ops", "slide,fly"], "ops must be some of slide, recall, reorder, toggle, ahead, got fly"),
        (["--ops", ","], "ops must be some of"),
        (["--tokens", "8"], "tokens must be numbers of at least 16, got [8]"),
        (["--tokens", "many"], "numbers must be a comma-separated list"),
        (["--rank", "0"], "rank must be at least 1, got 0"),
        (["--runs", "0"], "runs must be at least 1, got 0"),
        (["--engine", "tgi"], "--engine must be vllm or hf, got 'tgi'"),
        (["--model", "no/such/folder"], "--model must be a local model folder"),
        (["--out", "no/such/folder/result.json"], "--out must lie in a folder that exists"),
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
    assert json.loads(json.dumps(Settings().ops)) == ["slide", "recall", "reorder", "toggle", "ahead"]
    assert Settings().tokens == (256, 512, 1024, 2048) and Settings().runs >= 5


def test_quick_measures_less_and_flags_still_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin import opening
    from ctxwin_evals.bench import reuse

    measured: list[Settings] = []

    class StopError(ValueError):
        pass

    def measure(engine: Any, settings: Settings, told: Any) -> Any:
        measured.append(settings)
        raise StopError("enough")

    class Engine:
        def close(self) -> None: ...

    monkeypatch.setattr(reuse, "measure", measure)
    monkeypatch.setattr(opening, "open_engine", lambda *_: Engine())
    for more in ([], ["--quick"], ["--quick", "--runs", "3"]):
        CliRunner().invoke(app, ["bench", "reuse", "--engine", "hf", "--model", str(tmp_path), *more])
    assert measured == [Settings(), *(Settings(tokens=(256, 512), rank=16, runs=runs) for runs in (2, 3))]
