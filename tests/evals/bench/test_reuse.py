"""`ctxwin bench reuse` from end to end, on a small model in the generated one's architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin_evals.bench import model, moves, reuse
from twins import guard

SMALL = model.Sizes(
    hidden=128, layers=3, heads=2, kv_heads=1, intermediate=192, vocabulary=0, max_tokens=1024, vision_depth=1,
    vision_width=32, vision_heads=2,
)  # fmt: skip
FIELDS = {"op", "tokens", "rank", "ttft_s", "ttft_prefix_cache_s", "ttft_local_hit_s", "speedup", "over_floor"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.ensure_model(SMALL, 0, tmp_path_factory.mktemp("bench"))[0]


@pytest.fixture(scope="module")
def hf(folder: Path) -> Iterator[Any]:
    from ctxwin import open_engine

    engine = open_engine(f"hf:{folder}", dtype="float32")
    yield engine
    engine.close()


def test_a_model_is_written_once_and_as_a_whole(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model.ensure_model(SMALL, 0, folder.parent) == (folder, False)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in folder.parent.iterdir()) == [".lock", folder.name]  # nothing half done is left


def test_what_a_killed_run_left_is_cleared_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = model.model_folder(SMALL, 1, tmp_path)
    dead = target.with_name(f"{target.name}.partial")
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")

    def killed(folder: Path, sizes: model.Sizes, seed: int) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(model, "write_model", killed)
        model.ensure_model(SMALL, 1, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    assert model.ensure_model(SMALL, 1, tmp_path) == (target, True)


def test_seeds_and_sizes_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {model.model_folder(SMALL, 0, tmp_path), model.model_folder(SMALL, 1, tmp_path),
             model.model_folder(model.Sizes(), 0, tmp_path)}  # fmt: skip
    assert len(names) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.model_folder(SMALL, 0) == tmp_path / "ctxwin" / "bench" / model.model_folder(SMALL, 0).name


def test_the_default_has_the_decoder_of_qwen2_half_a_billion() -> None:
    s = model.Sizes()
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + s.head_dim * (s.heads + 2 * s.kv_heads)
    layer = attention + 3 * s.hidden * s.intermediate + 2 * s.hidden
    assert s.vocabulary * s.hidden + s.layers * layer + s.hidden == 494_032_768


@pytest.mark.parametrize("tokens", [1, 7, 16, 40, 64, 171])
def test_chunks_have_exactly_the_tokens_asked_for(hf: Any, tokens: int) -> None:
    chunk = moves.make_chunk(hf, tokens, seed=3)
    encoded = hf.encode(chunk)
    assert encoded.tokens == tokens
    assert bool(encoded.media) == (tokens >= 16)
    assert moves.make_chunk(hf, tokens, seed=3).id == chunk.id != moves.make_chunk(hf, tokens, seed=4).id


def served(engine: Any, name: str, tokens: int = 128) -> tuple[dict[str, str], int]:
    """Lanes by the chunk's name, and the tokens computed beyond the query, of the ask behind the edit."""
    from ctxwin import Fidelity

    scene = moves.MOVES[name](engine, tokens, Fidelity("patched", rank=2, orbit=True), 5)
    with scene.window:
        scene.edit(scene.window)
        plan = scene.window.plan()
        assert sum(entry.tokens for entry in plan.entries) == tokens
        answer = scene.window.ask(moves.QUERY, 1)
    extra = answer.usage.computed_tokens - engine.encode_query(moves.QUERY).tokens
    return {scene.names[entry.id]: entry.lane for entry in plan.entries}, extra


def test_every_move_is_served_without_a_forward_by_the_lanes_it_is_about(hf: Any) -> None:
    assert served(hf, "slide") == (dict.fromkeys("ABCD", "survivor"), 0)
    assert served(hf, "recall") == ({"front": "resident", "recalled": "patched", "A": "patched", "B": "patched"}, 0)
    assert served(hf, "reorder") == ({"P3": "resident", "P1": "orbit", "P2": "orbit", "T": "orbit"}, 0)
    assert served(hf, "toggle") == ({"front": "resident", "toggled": "canonical", "A": "survivor", "B": "survivor"}, 0)
    assert served(hf, "ahead") == (dict.fromkeys("ABCD", "resident"), 0)


def test_a_text_model_is_measured_on_text(text_dir: Path) -> None:
    from ctxwin import open_engine

    with open_engine(f"hf:{text_dir}", dtype="float32") as engine:
        result = reuse.measure(engine, reuse.Settings(ops=("slide", "ahead"), tokens=(64,), runs=1))
    slide, ahead = result["rows"]
    assert (slide["lanes"], ahead["lanes"]) == ({"survivor": 64}, {"resident": 64})
    assert slide["forward_free"] and ahead["forward_free"]


def test_any_order_of_the_predecessors_needs_no_forward(hf: Any) -> None:
    from itertools import permutations

    from ctxwin import Fidelity

    scene = moves.MOVES["reorder"](hf, 64, Fidelity("patched", rank=2, orbit=True), 6)
    *front, last = scene.window.ids
    with scene.window:
        for order in permutations(front):
            scene.window.reorder([*order, last])
            assert all(entry.compute == 0 for entry in scene.window.plan().entries), order


def test_the_held_prefix_computes_what_a_prefix_cache_would(hf: Any) -> None:
    chunks = [moves.make_chunk(hf, n, seed) for seed, n in enumerate((16, 20, 24))]
    system_prompt, query = hf.encode_system_prompt(moves.system_prompt_of(hf)), hf.encode_query(moves.QUERY)
    a, b, c = (hf.encode(chunk) for chunk in chunks)
    before = hf.counters.prefill_tokens
    plain = reuse.ask_plainly(hf, [system_prompt, a, b], [system_prompt, a, c], query, "x")
    assert plain.prefix_hit == system_prompt.tokens + 16 and plain.local_hit == system_prompt.tokens + 16 + 24
    assert plain.prefix_cache_s > 0 and plain.local_hit_s > 0
    assert hf.counters.prefill_tokens >= before


def test_a_move_that_is_about_patches_must_be_served_by_one() -> None:
    """Where a patch outweighs the KV it stands for, the window keeps the KV."""
    row = {"op": "recall", "tokens": 64, "rank": 512, "lanes": {"resident": 64}}
    with pytest.raises(ValueError, match=r"rank must be so small .* got 512 for recall at 64 tokens"):
        reuse._check_patches(row)
    reuse._check_patches(row | {"op": "slide"})
    reuse._check_patches(row | {"lanes": {"resident": 16, "patched": 48}})


def test_tokens_beyond_what_the_model_takes_are_refused(hf: Any) -> None:
    with pytest.raises(ValueError, match="1024 that the model takes, got 1024"):
        reuse.measure(hf, reuse.Settings(tokens=(64, 1024)))


def check_rows(result: dict[str, Any], runs: int) -> None:
    assert set(result) == {"rows", "checks", "meta"}
    query = result["meta"]["query_tokens"]
    assert [(r["op"], r["tokens"]) for r in result["rows"]] == [(op, n) for n in (64, 128) for op in moves.MOVES]
    for r in result["rows"]:
        assert set(r) >= FIELDS
        assert all(r[name] > 0 for name in FIELDS if name.endswith("_s"))
        assert r["speedup"] == pytest.approx(r["ttft_prefix_cache_s"] / r["ttft_s"])
        assert r["over_floor"] == pytest.approx(r["ttft_s"] / r["ttft_local_hit_s"])
        assert r["runs"] == runs and r["rank"] == (2 if r["op"] in ("recall", "reorder") else 0)
        assert r["forward_free"] and r["computed_tokens"] <= query
        assert sum(r["lanes"].values()) == sum(c["tokens"] for c in r["chunks"]) == r["tokens"]
        assert (r["ttft_back_s"] is not None) == (r["op"] == "toggle")
        assert r["cpu_s"]["ask"] > 0 and r["cpu_s"]["local_hit"] > 0
        assert 0 <= r["phases_s"]["window"] < r["ttft_s"]
    by_op = {r["op"]: r["chunks"] for r in result["rows"] if r["tokens"] == 128}
    assert [(c["chunk"], c["lane"]) for c in by_op["reorder"]] == [
        ("P3", "resident"), ("P1", "orbit"), ("P2", "orbit"), ("T", "orbit"),
    ]  # fmt: skip
    assert {(c["check"], c["op"]) for c in result["checks"]} == {
        (check, op) for check in ("speedup", "over_floor") for op in moves.MOVES
    }
    meta = result["meta"]
    assert meta["machine"]["cores"] and len(meta["machine"]["load_before"]) == 3
    assert meta["versions"]["torch"] and meta["model"]["kv_bytes_per_token"] > 0


def run(arguments: list[str]) -> Any:
    from ctxwin.cli.main import app

    return CliRunner().invoke(app, ["bench", "reuse", "--rank", "2", "--runs", "2", "--tokens", "64,128", *arguments])


def test_the_command_on_transformers(folder: Path) -> None:
    told = run(["--engine", "hf", "--model", str(folder), "--json"])
    assert told.exit_code == 0, told.output
    check_rows(json.loads(told.stdout), runs=2)


@guard
@pytest.mark.vllm
def test_the_command_on_vllm(folder: Path, tmp_path: Path) -> None:
    """Prints a table and writes the object; the prefix cache is vLLM's own, and a full hit is one."""
    told = run(["--model", str(folder), "--out", str(tmp_path / "out.json")])
    assert told.exit_code == 0, told.output
    result = json.loads((tmp_path / "out.json").read_text())
    check_rows(result, runs=2)
    for r in result["rows"]:
        if r["op"] != "ahead":  # whose chunks vLLM's own prefix cache may have, from the time before the ask
            assert r["bytes_loaded"] >= (r["tokens"] - 16) * result["meta"]["model"]["kv_bytes_per_token"]
        system_prompt, query = result["meta"]["system_prompt_tokens"], result["meta"]["query_tokens"]
        # The floor is the lowest there is: everything but the query is a hit.
        assert system_prompt % moves.BLOCK == 0 and r["floor_computed_tokens"] == query
        assert r["local_hit_tokens"] == system_prompt + r["tokens"]
        # The timed ask must not find the blocks of an earlier repetition.
        assert r["cached_tokens"] <= system_prompt + 16 or r["op"] == "ahead"
        # Before the edit nothing but the system prompt and what stands in front of the edit is the same.
        assert r["prefix_hit_tokens"] <= system_prompt + 16
    assert "medians of 2 paired runs" in told.stdout and told.stdout.count("at 128 tokens") == 5 + len(result["checks"])
