"""`ctxwin bench reuse` from end to end, on a small model in the generated one's architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin_evals.bench import model, moves, peers, reuse
from twins import guard

SMALL = model.Sizes(
    hidden=128, layers=3, heads=2, kv_heads=1, intermediate=192, vocabulary=0, max_tokens=2048, vision_depth=1,
    vision_width=32, vision_heads=2,
)  # fmt: skip


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
    """Lanes by the chunk's name, and the tokens computed beyond the query, of the ask behind the last edit."""
    from ctxwin import Fidelity, Window

    scene = moves.MOVES[name](
        engine, tokens, Fidelity("patched", rank=2, orbit=True), 20 + list(moves.MOVES).index(name)
    )
    with scene.window as window:
        for edit in scene.edits:
            edited = edit(window)
            asked = edited if isinstance(edited, Window) else window
            plan = asked.plan()
            answer = asked.ask(moves.QUERY, 1)
    extra = answer.usage.computed_tokens - engine.encode_query(moves.QUERY).tokens
    return {str(asked.chunk(entry.id).label): entry.lane for entry in plan.entries}, extra


def test_every_move_is_served_without_a_forward_by_the_lanes_it_is_about(hf: Any) -> None:
    """Of the four that bring or move content, the forward is over that alone."""
    assert served(hf, "slide") == (dict.fromkeys("ABCD", "survivor"), 0)
    assert served(hf, "recall") == ({"front": "resident", "recalled": "patched", "A": "patched", "B": "patched"}, 0)
    assert served(hf, "reorder") == ({"P3": "resident", "P1": "orbit", "P2": "orbit", "T": "orbit"}, 0)
    assert served(hf, "toggle") == ({"front": "resident", "toggled": "canonical", "A": "survivor", "B": "survivor"}, 0)
    assert served(hf, "steady") == ({**{str(i): "survivor" for i in range(5, 12)}, "12": "computed"}, 16)
    assert served(hf, "fork") == ({**dict.fromkeys("ABCD", "resident"), "new": "computed"}, 32)
    untried = {"front": "resident", "toggled": "canonical", "A": "survivor", "B": "survivor"}
    assert served(hf, "untried") == (untried, 38)
    assert served(hf, "oldest") == ({"B": "survivor", "C": "survivor", "D": "survivor", "A": "formed"}, 32)
    assert served(hf, "newest") == ({"D": "survivor", "A": "formed", "B": "formed", "C": "formed"}, 96)
    lanes, extra = served(hf, "copy")
    assert (list(lanes), extra) == (list("ABCD"), 32)  # two of one label


def test_a_text_model_is_measured_on_text(text_dir: Path) -> None:
    from ctxwin import open_engine

    with open_engine(f"hf:{text_dir}", dtype="float32") as engine:
        result = reuse.measure(engine, reuse.Settings(ops=("slide", "copy"), tokens=(64,), runs=1))
    slide, copy = result["rows"]
    assert (slide["lanes"], copy["lanes"]) == ({"survivor": 64}, {"resident": 64, "computed": 16})
    assert slide["arms"]["ctxwin"]["computed_tokens"] == copy["arms"]["ctxwin"]["computed_tokens"] - 16


def test_any_order_of_the_predecessors_needs_no_forward(hf: Any) -> None:
    from itertools import permutations

    from ctxwin import Fidelity

    scene = moves.MOVES["reorder"](hf, 64, Fidelity("patched", rank=2, orbit=True), 6)
    *front, last = scene.window.ids
    with scene.window:
        for order in permutations(front):
            scene.window.reorder([*order, last])
            assert all(entry.compute == 0 for entry in scene.window.plan().entries), order


def test_a_move_that_is_about_patches_must_be_served_by_one(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a patch outweighs the KV it stands for, the window keeps the KV."""
    settings = reuse.Settings(ops=("slide", "recall"), tokens=(64,), rank=512, runs=1)
    monkeypatch.setattr(reuse, "_lanes_of", lambda event: {"lanes": {"resident": 64}})
    with pytest.raises(ValueError, match=r"rank must be so small .* got 512 for recall at 64 tokens"):
        reuse.measure(hf, settings)


def test_tokens_beyond_what_the_model_takes_are_refused(hf: Any) -> None:
    with pytest.raises(ValueError, match="2048 of the model, got 1024"):
        reuse.measure(hf, reuse.Settings(tokens=(64, 1024)))


def computed(tokens: int, block: int = 1) -> dict[str, tuple[float, ...]]:
    """Tokens beyond the query that the window and those in `moves.ARMS` must compute, by move.

    ``block``: of the prefix cache, which holds whole ones.
    """
    short = min(moves.SHORT, tokens // 8)
    front = short % block  # the short chunk's rest, which is computed again
    third, quarter, eighth = (tokens - short + 2) // 3, tokens // 4, tokens // 8
    trimmed = (5 + 1 + 1 + 1) * eighth / 4
    return {
        "slide": (0, 0, tokens, 3 * quarter, 0, 3 * quarter),
        "steady": (eighth, eighth, tokens, trimmed, (7 + 8) * eighth / 8, trimmed),
        "recall": (0, 0, tokens - short + front, tokens - short + front, third + (tokens - third) % block),
        "fork": (32, 32, 32, 32, 32),
        "toggle": (0, 0, tokens - short + front, tokens - short + front, tokens - short + front),
        "untried": (third, 0, tokens - short + front, tokens - short + front, tokens - short + front),
        "reorder": (0, 0, tokens, tokens, 3 * quarter, 3 * quarter),
        "oldest": (quarter, 0, tokens, tokens, quarter, quarter),
        "newest": (3 * quarter, 0, tokens, tokens, 3 * quarter, 3 * quarter),
        "copy": (quarter, quarter, quarter, quarter, quarter),
    }


def untouched(tokens: int, block: int) -> dict[str, int]:
    """Tokens in blocks that an edit leaves as they stand: the system prompt's, and whole blocks of what precedes the edit."""
    whole = block + tokens
    return {
        "slide": block, "steady": block, "recall": block, "fork": whole, "toggle": block, "untried": block,
        "reorder": block, "oldest": block, "newest": block, "copy": whole,
    }  # fmt: skip


def check_rows(result: dict[str, Any], runs: int, block: int = 1, peers: tuple[str, ...] = ()) -> None:
    assert set(result) >= {"rows", "checks", "meta"}
    query = result["meta"]["query_tokens"]
    assert [(r["op"], r["tokens"]) for r in result["rows"]] == [(op, n) for n in (256, 512) for op in moves.MOVES]
    for r in result["rows"]:
        assert list(r["arms"]) == ["ctxwin", *moves.ARMS, *peers]
        counts = [arm["computed_tokens"] - query for arm in r["arms"].values()]
        wanted = computed(r["tokens"], block)[r["op"]]
        assert tuple(counts[: len(wanted)]) == wanted, r["op"]
        for name, arm in r["arms"].items():
            assert arm["ttft_s"]["median"] > 0
            low, high = arm["ratio"]["interval"]
            assert low <= arm["ratio"]["median"] <= high
            assert (arm["cpu_s"] is None) == (name in peers)
        assert r["arms"]["ctxwin"]["ratio"] == {"median": 1.0, "interval": [1.0, 1.0]}
        assert r["cleverest"] in moves.ARMS[1:]
        assert r["runs"] == runs and r["rank"] == (2 if r["op"] in ("recall", "reorder") else 0)
        assert sum(r["lanes"].values()) == sum(c["tokens"] for c in r["chunks"])
    by_op = {r["op"]: r["chunks"] for r in result["rows"] if r["tokens"] == 512}
    assert [(c["chunk"], c["lane"]) for c in by_op["reorder"]] == [
        ("P3", "resident"), ("P1", "orbit"), ("P2", "orbit"), ("T", "orbit"),
    ]  # fmt: skip
    assert [(c["op"], c["tokens"]) for c in result["checks"]] == [
        (op, n) for n in (256, 512) for op in moves.MOVES if op in reuse.BOUNDS
    ]
    meta = result["meta"]
    assert meta["machine"]["cores"] and len(meta["machine"]["load_before"]) == 3
    assert meta["versions"]["torch"] and meta["model"]["kv_bytes_per_token"] > 0


def run(arguments: list[str]) -> Any:
    from ctxwin.cli.main import app

    return CliRunner().invoke(app, ["bench", "reuse", "--rank", "2", "--runs", "2", "--tokens", "256,512", *arguments])


def test_the_command_on_transformers(folder: Path) -> None:
    told = run(["--engine", "hf", "--model", str(folder), "--json"])
    assert told.exit_code == 0, told.output
    check_rows(json.loads(told.stdout), runs=2)


def test_tokens_that_a_generated_model_does_not_take_are_refused_before_it_is_made(tmp_path: Path) -> None:
    told = run(["--engine", "hf", "--model-dir", str(tmp_path), "--tokens", "9000"])
    assert told.exit_code and "9216 of the model, got 9000" in told.output + str(told.exception)
    assert not list(tmp_path.iterdir())


@guard
@pytest.mark.vllm
def test_the_command_on_vllm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints a table and writes the object; the prefix cache is vLLM's own, and peers say why they do not run."""
    monkeypatch.setitem(peers.CONNECTORS, "plain", {})
    options = {"kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
    told = run([
        "--model", str(folder), "--out", str(tmp_path / "out.json"), "--peers", "plain,offloading,lmcache",
        "--engine-options", json.dumps(options),
    ])  # fmt: skip
    assert told.exit_code == 0, told.output
    result = json.loads((tmp_path / "out.json").read_text())
    check_rows(result, runs=2, block=32, peers=("plain",))
    system_prompt = result["meta"]["system_prompt_tokens"]
    assert system_prompt % moves.BLOCK == 0  # the floor is the lowest there is: everything but the query is a hit
    for r in result["rows"]:
        assert r["untouched"] == untouched(r["tokens"], system_prompt)[r["op"]], r["op"]
        if r["op"] == "slide":
            assert r["bytes_loaded"] >= r["tokens"] * result["meta"]["model"]["kv_bytes_per_token"]
        # A vLLM without ctxwin computes for the same prompts what the prefix cache here does.
        assert r["arms"]["plain"]["computed_tokens"] == r["arms"]["prefix"]["computed_tokens"]
    assert set(result["refused"]) == {"offloading", "lmcache"} and "No module named" in result["refused"]["lmcache"]
    assert "only supported on CUDA-alike and XPU" in result["refused"]["offloading"]
    assert "offloading: cannot run here" in told.stdout and "lmcache: cannot run here" in told.stdout
    assert "medians of 2 runs" in told.stdout
    assert all(f"{c['verdict']}: {c['op']} at {c['tokens']} tokens" in told.stdout for c in result["checks"])


def test_arms_are_asked_in_an_order_of_each_repetitions_own(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the same prompts are asked once."""
    from ctxwin import Fidelity

    orders: list[list[str]] = []
    time_edits, time_prompts = reuse._Bench.time_edits, reuse._Bench.time_prompts

    def edits(self: Any, scene: Any) -> Any:
        orders[-1].append("ctxwin")
        return time_edits(self, scene)

    def prompts(self: Any, asked: Any, query: Any, salt: str) -> Any:
        orders[-1].append(str([[part.tokens for part in prompt] for prompt in asked]))
        return time_prompts(self, asked, query, salt)

    monkeypatch.setattr(reuse._Bench, "time_edits", edits)
    monkeypatch.setattr(reuse._Bench, "time_prompts", prompts)
    bench, scene = reuse._Bench(hf, {}), moves.MOVES["fork"](hf, 64, Fidelity("patched", rank=2), 9)
    for name in map(str, range(6)):
        orders.append([])
        bench.repeat(scene, name)
    assert len({tuple(order) for order in orders}) == 2 and all(len(order) == 2 for order in orders)
    scene.window.close()
