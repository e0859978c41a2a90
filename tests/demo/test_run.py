"""The demo end to end on the transformers engine: files, schema, accounts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxwin.audit import auditor_of
from ctxwin.audit.auditor import VARIABLE
from ctxwin.audit.evidence import Trial
from ctxwin.audit.harm import Harm
from ctxwin.baselines import POLICIES
from ctxwin.demo.earning import without_profile
from ctxwin.demo.footage import VideoFootage, WorldFootage
from ctxwin.demo.run import Options, prepare, run, summarise
from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import Fidelity
from ctxwin.profiles import PROFILE_NAME, PROFILES_VARIABLE, find_profile
from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.world import answer
from ctxwin.view import totals
from ctxwin.view.trace import read_trace

STEP = {
    "op", "query", "answer", "truth", "answer_reprefill", "tokens_by_lane", "computed_tokens", "computed_tokens_naive",
    "computed_tokens_trim", "computed_tokens_append", "vision_encodes", "vision_encodes_prefix_cache", "ttft_s",
    "ttft_reprefill_s",
}  # fmt: skip
SUMMARY = {"accuracy", "accuracy_reprefill", "accuracy_blind", "kl_mean", "kl_blind_mean", "engine", "asks"}
SUMS = {name for name in STEP if name.startswith(("computed_tokens", "vision_encodes"))}
EDITS = {"recall", "reorder", "fork", "toggle_off", "toggle_on", "disposable"}


@pytest.fixture(scope="module")
def engine(vision_dir: Path) -> Iterator[Any]:
    from ctxwin.opening import open_engine

    opened = open_engine(f"hf:{vision_dir}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def patched(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two seeds to the end of a short stream, with survivors, patches and idle work."""
    out = tmp_path_factory.mktemp("patched")
    options = Options(out=out, seeds=(0, 3), window=4, frames=14, fidelity=Fidelity("patched", rank=4))
    return out, run(engine, options, prepare(options))


def test_all_files_are_written(patched: tuple[Path, dict[str, Any]]) -> None:
    out, result = patched
    assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in out.glob("*.mp4")} == {"clip.mp4", "clip-3.mp4"}
    assert (out / "timeline-dark.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_run_holds_every_ask_and_all_work(patched: tuple[Path, dict[str, Any]]) -> None:
    out, result = patched
    recorded = read_trace(out / "run.jsonl")
    numbers, summary = totals(recorded), result["summary"]
    assert numbers["computed_tokens"] == summary["computed_tokens"]
    assert numbers["vision_encodes"] == summary["vision_encodes"]
    assert numbers["asks"] == numbers["known"] == summary["asks"]
    assert numbers["right"] == summary["accuracy"] * summary["asks"]
    assert numbers["right_others"]["re-prefill"] == summary["accuracy_reprefill"] * summary["asks"]
    assert numbers["costs"]["prefix cache: slide"]["tokens"] == summary["computed_tokens_naive"]
    assert {event["op"] for event in recorded.events} >= {
        "append",
        "slide",
        "recall",
        "reorder",
        "toggle",
        "fork",
        "adopt",
    }
    assert (out / "view.html").read_text().startswith("<!doctype html>")


def test_the_schema_of_the_result(patched: tuple[Path, dict[str, Any]]) -> None:
    _, result = patched
    summary, steps = result["summary"], result["steps"]
    assert summary.keys() >= SUMMARY | SUMS
    assert summary["asks"] == len(steps)
    assert summary["engine"] == "hf"
    for step in steps:
        assert step.keys() >= STEP
        assert sum(step["tokens_by_lane"].values()) < step["prompt_tokens"]
        assert step["truth"] is not None
        assert step["ttft_s"] > 0 < step["ttft_reprefill_s"]
    for name in SUMS:
        assert summary[name] == sum(step[name] for step in steps)
    assert summary["accuracy"] == np.mean([step["answer"] == step["truth"] for step in steps])


def test_every_move_is_made_and_half_of_the_asks_are_multi_hop(patched: tuple[Path, dict[str, Any]]) -> None:
    _, result = patched
    ops = {step["op"] for step in result["steps"]}
    assert ops == {"append", "slide"} | EDITS
    multi = [step for step in result["steps"] if step["kind"] == "multi_hop"]
    assert 0.4 <= len(multi) / len(result["steps"]) <= 0.6


def test_edits_run_no_vision_encode(patched: tuple[Path, dict[str, Any]]) -> None:
    _, result = patched
    for step in result["steps"]:
        assert step["vision_encodes"] == (0 if step["op"] in EDITS else 1)
    assert result["summary"]["vision_encodes"] <= result["summary"]["vision_encodes_prefix_cache"]


def test_truth_is_the_worlds_for_the_placed_frames(patched: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, result = patched
    for seed in (0, 3):
        world = WorldFootage(tmp_path / "again.mp4", seed, 14, 4)._world
        for step in result["steps"]:
            if step["seed"] == seed:
                placed = [world[p["frame"]] for p in step["placed"]]
                assert step["truth"] == answer(placed, step["query"])


def test_our_work_is_all_of_the_engines_but_the_yardsticks(engine: Any, tmp_path: Path) -> None:
    """Sums of the steps, plus what the yardsticks must have run, are what the engine counted."""
    options = Options(out=tmp_path, window=4, frames=9, steps=14, fidelity=Fidelity("patched", rank=4))
    footage = prepare(options)
    before = engine.counters.prefill_tokens
    steps = run(engine, options, footage)["steps"]
    system_prompt = engine.encode_system_prompt("You watch a camera.").tokens
    tokens = {p["frame"]: p["tokens"] for step in steps for p in step["placed"]}
    reprefill = sum(step["prompt_tokens"] for step in steps)
    queries = sum(engine.encode_query(step["query"]).tokens for step in steps)
    canonicals = system_prompt + sum(tokens.values())
    ours = sum(step["computed_tokens"] for step in steps)
    assert engine.counters.prefill_tokens - before == ours + reprefill + queries + canonicals


def test_exact_windows_answer_like_a_reprefill(engine: Any, tmp_path: Path) -> None:
    """With every move, and computing no more than the best user of a prefix cache."""
    options = Options(out=tmp_path, window=6, frames=18, seeds=(1,), fidelity=Fidelity("exact"))
    summary = run(engine, options, prepare(options))["summary"]
    assert summary["asks"] > 30
    assert summary["agreement"] == 1.0
    best = min(summary[f"computed_tokens_{policy}"] for policy in POLICIES)
    assert summary["computed_tokens"] <= 1.05 * best
    assert summary["kl_mean"] < 1e-6
    assert summary["kl_blind_mean"] > 1e-3


@pytest.mark.slow
def test_without_a_profile_lanes_earn_trust_between_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin.opening import open_engine

    for variable in (PROFILES_VARIABLE, VARIABLE):
        monkeypatch.setenv(variable, "")  # given back behind the test
    options = Options(out=tmp_path, frames=9, steps=10)
    with without_profile("tiny") as model, open_engine(f"hf:{model}") as engine:
        first = run(engine, options, prepare(options))["summary"]
        (served,) = first["trust"]["served"].items()
        assert served[0] == "exact" and served[1]["asks"] == 10
        assert served[1]["computed_tokens"] == first["computed_tokens"] > served[1]["audit_tokens"] > 0
        assert "in lane survivor" not in served[1]
        ledger = auditor_of(engine).evidence_of(engine)
        ledger.take(
            [Trial("survivor", Harm("scored", 0.0), computed=1, exact_computed=10, unit=str(i)) for i in range(500)]
        )
        options = replace(options, seeds=(1,))  # of frames seen before the exact KV is held, and served
        later = run(engine, options, prepare(options))["summary"]["trust"]
    assert list(later["served"]) == ["survivor"] and later["served"]["survivor"]["in lane survivor"] > 0
    assert any(said.startswith("survivor promoted") for said in later["decisions"])
    with pytest.raises(ValueError, match="--no-profile needs --model tiny or the folder of a model, got 'a/hub-name'"):
        without_profile("a/hub-name").__enter__()


def test_without_a_profile_is_without_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (PROFILES_VARIABLE, VARIABLE):
        monkeypatch.setenv(variable, "")
    profile = find_profile(checkpoint_dir())
    assert profile is not None
    size = sum(file.stat().st_size for file in checkpoint_dir().glob("*.safetensors"))
    (tmp_path / f"{size}-{profile.weights}.json").write_text(profile.model_dump_json())
    monkeypatch.setattr("ctxwin.profiles.SHIPPED", tmp_path)
    with without_profile("tiny") as model:
        assert find_profile(model) is None
        shutil.copy(checkpoint_dir() / "config.json", model / "config.json")
        assert find_profile(model) == profile, "it would be found by the weights"


def test_a_video_of_ones_own(engine: Any, tmp_path: Path) -> None:
    clip = tmp_path / "mine.mp4"
    assert len(WorldFootage(clip, 5, 8, 4).chunks) == 8  # writes it
    options = Options(video=clip, out=tmp_path / "out", window=4, frames=8, steps=9, questions=("what?",), max_tokens=2)
    result = run(engine, options, prepare(options))
    assert {step["query"] for step in result["steps"]} == {"what?"}
    assert result["summary"]["accuracy"] is None
    assert result["summary"]["agreement"] == 1.0
    assert (tmp_path / "out" / "view.html").is_file()
    assert not list((tmp_path / "out").glob("*.mp4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "seeds must be"),
        ({"seeds": (1, 1)}, "seeds must be"),
        ({"steps": 0}, "steps must be"),
        ({"window": 2}, "window must be"),
        ({"frames": 3}, "frames must be"),
        ({"questions": ("why?",)}, "needs a video"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(Options(out=tmp_path / "none", **change))
    assert not (tmp_path / "none").exists()


def test_a_video_shorter_than_the_window_is_refused(tmp_path: Path) -> None:
    clip = tmp_path / "short.mp4"
    assert len(WorldFootage(clip, 5, 3, 3).chunks) == 3
    with pytest.raises(ValueError, match="at least 4 frames, got 3"):
        VideoFootage(clip, 1.0, limit=2, least=4)
    assert len(VideoFootage(clip, 1.0, limit=28).chunks) == 3


def test_of_a_long_video_only_its_beginning_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = tmp_path / "long.mp4"
    assert len(WorldFootage(clip, 5, 9, 3).chunks) == 9
    monkeypatch.setattr("ctxwin.media.MAX_FRAMES", 8)
    footage = VideoFootage(clip, 1.0, limit=4)
    assert len(footage.chunks) == 4 and footage.times == [0.0, 1.0, 2.0, 3.0]


def test_a_text_model_reads_a_log(text_dir: Path, tmp_path: Path) -> None:
    from ctxwin.opening import open_engine

    options = Options(out=tmp_path, window=3, frames=8, max_tokens=3, fidelity=Fidelity("exact"))
    with open_engine(f"hf:{text_dir}") as engine:
        summary = run(engine, options, prepare(options))["summary"]
        with pytest.raises(UnsupportedModel, match="a video needs a model that sees images"):
            run(engine, replace(options, video=tmp_path / "clip.mp4"), {})
    assert (summary["source"], summary["accuracy"], summary["vision_encodes"]) == ("a log", None, 0)
    assert summary["agreement"] == 1.0 and summary["kl_mean"] < 1e-6 and {"slide", "recall"} < set(summary["by_op"])
    assert not [*tmp_path.glob("*.mp4")]


def test_looking_back_brings_the_legend_that_the_question_needs(tmp_path: Path) -> None:
    footage = WorldFootage(tmp_path / "clip.mp4", 2, 20, 6)
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(20):
        answered = footage.look_back([16, 17, 18, 19], list(range(16)), "multi_hop", rng)
        assert answered is not None
        back, query = answered
        found += len(back) == 2
        assert query.frame in back
        assert set(query.needs) <= {*back, 16, 17, 18, 19}
        assert footage.look_back([16], [], "single_hop", rng) is None
    assert found


def test_the_summary_of_nothing_has_no_means() -> None:
    summary = summarise([])
    assert summary["asks"] == 0
    assert summary["accuracy"] is None
    assert summary["share_of_naive"] is None


PINNED = [
    [
        93,
        84,
        91,
        82,
        89,
        377,
        297,
        162,
        89,
        377,
        297,
        153,
        377,
        233,
        377,
        9,
        9,
        377,
        297,
        377,
        315,
        89,
        297,
        377,
        297,
        162,
    ],
    [
        93,
        84,
        91,
        82,
        89,
        306,
        297,
        155,
        82,
        89,
        89,
        153,
        306,
        306,
        235,
        11,
        11,
        82,
        297,
        89,
        315,
        306,
        297,
        89,
        226,
        164,
    ],
    [93, 84, 91, 82, 89, 306, 89, 155, 82, 89, 89, 153, 306, 306, 91, 11, 11, 82, 89, 89, 315, 306, 89, 89, 306, 164],
]
"""Tokens computed at each ask of `answered`: same prompts, trimming, and trimming with look-backs at the end."""

bundled = pytest.mark.skipif(
    not (checkpoint_dir() / PROFILE_NAME).is_file(), reason="the bundled model and its profile are not in this checkout"
)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run on the bundled model: to the first two look-backs, a fork, a reorder and a toggle."""
    from ctxwin.opening import open_engine

    options = Options(out=tmp_path_factory.mktemp("bundled"), frames=16, window=5, steps=26)
    footage = prepare(options)
    engine = open_engine("tiny:hf")
    try:
        return run(engine, options, footage)
    finally:
        engine.close()


@bundled
def test_the_bundled_model_answers_through_the_window(answered: dict[str, Any]) -> None:
    summary = answered["summary"]
    assert summary["fidelity"]["mode"] == "patched"
    assert summary["model"] == "tiny (bundled)"
    assert summary["accuracy"] >= summary["accuracy_reprefill"] - 0.07
    assert summary["accuracy_reprefill"] >= 0.85
    assert summary["share_of_naive"] < 0.6


@bundled
def test_what_users_of_a_prefix_cache_compute_is_what_it_was(answered: dict[str, Any]) -> None:
    """Figures of an independent implementation of these users (one class for each, with rules of its own)."""
    assert {step["op"] for step in answered["steps"]} == {"append", "slide"} | EDITS
    found = [[step[f"computed_tokens_{user}"] for step in answered["steps"]] for user in ("naive", "trim", "append")]
    assert found == PINNED
