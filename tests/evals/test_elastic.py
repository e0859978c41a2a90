"""Elastic Cache's own claims: what is fed and counted is held against the engine, loops and definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Sampling, Segment
from ctxwin.evals.metrics import rouge_l
from ctxwin.evals.studies.elastic import quality
from ctxwin.evals.studies.elastic.__main__ import main
from ctxwin.evals.studies.elastic.exchanges import Exchange, Turn, generated, read_exchanges, script
from ctxwin.evals.studies.elastic.quality import QualitySettings, measure_quality
from ctxwin.evals.studies.elastic.report import plot_quality, quality_table, speed_table
from ctxwin.evals.studies.elastic.speed import Shape, SpeedSettings, measure_speed, random_engine
from engines.oracle import teacher_forced

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

TURNS = (Turn("what color is it?", "red"), Turn("shape?", "a blue square"), Turn("number?", "now"))


@pytest.fixture(scope="module")
def tiny() -> Iterator[HFEngine]:
    from ctxwin import open_engine

    opened = open_engine("tiny:hf", dtype="float32")
    yield opened  # type: ignore[misc]
    opened.close()


def exchange(*turns: Turn) -> Exchange:
    rng = np.random.default_rng(len(turns))
    picture = rng.integers(0, 255, (56, 84, 3), dtype=np.uint8)
    return Exchange("one", lambda: [Chunk.text("a frame"), Chunk.image(picture)], 2, turns)


def layout_of(engine: HFEngine, one: Exchange) -> list[Segment]:
    layout, start = [], 0
    for encoded in (engine.encode_system_prompt("You watch a camera."), *(engine.encode(c) for c in one.load())):
        layout.append(Segment(encoded, start))
        start += encoded.advance
    return layout


def test_turns_are_fed_as_a_remembered_exchange(engine: HFEngine) -> None:
    made = script(engine, exchange(*TURNS))
    have: list[int] = [*engine.encode_query(TURNS[0].prompt).token_ids]
    for i, answer in enumerate(made.answers):
        assert engine.decode(answer) == TURNS[i].answer
        have += [*answer, *(made.between[i] if i < 2 else ())]
    want: list[int] = []
    for turn, answer in zip(TURNS, made.answers, strict=True):
        want += engine.encode_exchange(turn.prompt, answer).token_ids
    assert have == want[: len(have)] and len(made.between) == 2
    with pytest.raises(ValueError, match="at least one token"):
        script(engine, exchange(Turn("what?", "")))


@pytest.mark.parametrize("turns", [TURNS, TURNS[1:2]])
def test_perplexity_is_of_the_answers_under_the_engine(engine: HFEngine, turns: tuple[Turn, ...]) -> None:
    """Equation 4, from the engine's own teacher forcing over the whole exchange."""
    one = exchange(*turns)
    made, query = script(engine, one), engine.encode_query(turns[0].prompt)
    stream: list[int] = []
    counted: list[int] = []
    for i, answer in enumerate(made.answers):
        counted += range(len(stream), len(stream) + len(answer))
        stream += [*answer, *(made.between[i] if i + 1 < len(turns) else ())]
    logs = teacher_forced(engine, layout_of(engine, one), query, stream).double()
    loss = [-float(logs[i, stream[i]]) for i in counted]
    result = measure_quality(engine, [one], QualitySettings(("elastic",), (1.0,), max_tokens=4))
    assert result["full"]["ppl"] == pytest.approx(math.exp(sum(loss) / len(loss)), rel=1e-4)
    assert result["config"]["answer_tokens"] == len(counted)


def test_a_single_turn_is_generated_as_by_the_engine(engine: HFEngine) -> None:
    one = exchange(TURNS[1])
    want = engine.generate(layout_of(engine, one), engine.encode_query("shape?"), Sampling(max_tokens=9))
    result = measure_quality(engine, [one], QualitySettings(("local",), (0.3,), max_tokens=9))
    assert result["answers"][0]["full"] == [want.text.strip()]


def test_the_answers_of_later_turns_stand_behind_the_earlier_ones(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer is what the engine says behind the first one as it was generated, not as it was given."""
    monkeypatch.setattr(engine, "_checkpoint", replace(engine._checkpoint, eos=frozenset()))
    one = exchange(*TURNS)
    made = script(engine, one)
    result = measure_quality(engine, [one], QualitySettings(("h2o",), (1.0,)))
    query, stream = engine.encode_query(TURNS[0].prompt), list[int]()
    for i, answer in enumerate(made.answers):
        start = (stream and [*query.token_ids, *stream]) or list(query.token_ids)
        asked = Encoded("", tuple(start), np.tile(np.arange(len(start)), (3, 1)), len(start))
        got = engine.generate(layout_of(engine, one), asked, Sampling(max_tokens=len(answer))).token_ids
        stream += [*got, *(made.between[i] if i < 2 else ())]
        assert result["answers"][0]["full"][i] == engine.decode(got).strip()


@pytest.mark.parametrize("moment", ["prompt", "window"])
def test_the_whole_budget_is_the_full_cache(engine: HFEngine, moment: Any) -> None:
    exchanges = [exchange(*TURNS[:2]), exchange(TURNS[1])]
    result = measure_quality(engine, exchanges, QualitySettings(budgets=(1.0, 0.3), moment=moment, max_tokens=4))
    for method, cells in result["methods"].items():
        assert cells["1"]["ppl"] == pytest.approx(result["full"]["ppl"], rel=1e-5), method
        assert cells["1"]["same"] == cells["1"]["rouge_l"] == cells["1"]["kv_share"] == 1
        assert cells["0.3"]["ppl"] != pytest.approx(result["full"]["ppl"], rel=1e-4)
        assert cells["0.3"]["kv_share"] < (
            0.45 if moment == "prompt" else 0.95
        )  # system prompt and question stay otherwise
    assert len({round(c["0.3"]["ppl"], 6) for c in result["methods"].values()}) == 3


def test_the_bundled_model_answers_exchanges_and_batches_change_nothing(
    tiny: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = [replace(e, turns=e.turns[:3]) for e in generated(4)]
    chosen = QualitySettings(("h2o",), (0.5,))
    steps: list[int] = []
    together = measure_quality(tiny, exchanges, chosen, steps.append)
    assert sum(steps) == 4 * 2 and max(steps) > 1
    assert together["full"]["right"] > 0.9 and together["full"]["ppl"] < 1.5
    assert together["methods"]["h2o"]["0.5"]["ppl"] > together["full"]["ppl"]
    monkeypatch.setattr(quality, "BATCH", 1)
    alone = measure_quality(tiny, exchanges, chosen)
    assert {a["name"]: a for a in alone["answers"]} == {a["name"]: a for a in together["answers"]}
    assert alone["methods"]["h2o"]["0.5"]["ppl"] == pytest.approx(together["methods"]["h2o"]["0.5"]["ppl"], rel=1e-3)


def test_generated_exchanges_depend_on_their_index_alone() -> None:
    def shown(one: Exchange) -> Any:
        return one.turns, [c.id for c in one.load()]

    five, two = generated(5, seed=1), generated(2, seed=1)
    assert [shown(a) for a in five[:2]] == [shown(b) for b in two]
    assert shown(five[0]) != shown(five[1]) and shown(five[0]) != shown(generated(1)[0])
    assert all(len(set(e.turns)) == 8 for e in five)
    with pytest.raises(ValueError, match="n must be >= 1"):
        generated(0)


WORDS = st.lists(st.sampled_from(["red", "blue", "circle", "square", "17"]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS)
def test_rouge_is_the_longest_common_subsequence(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    common = table[-1][-1]
    want = 2 * common / (len(first) + len(second)) if first or second else 1.0  # harmonic mean of both shares
    assert rouge_l(" ".join(first), " ".join(second)) == pytest.approx(want)


def test_exchanges_of_a_file(tmp_path: Path, engine: HFEngine) -> None:
    Image.fromarray(np.full((56, 56, 3), 90, dtype=np.uint8)).save(tmp_path / "a.png")
    path = tmp_path / "data.jsonl"
    rows = [{"image": "a.png", "prompt": "shape?", "answer": "a circle"}, {"prompt": "now?", "answer": "red"}]
    path.write_text(json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1]) + "\n")
    pictured, plain = read_exchanges(path)
    assert pictured.turns == (Turn("shape?", "a circle"),) and pictured.name == "data.jsonl:1"
    assert plain.turns == (Turn("", "red"),) and plain.name == "data.jsonl:3"
    assert len(engine.encode(pictured.load()[0]).media) == 1
    assert engine.decode(engine.encode(plain.load()[0]).token_ids) == "now?"
    assert len(read_exchanges(path, 1)) == 1
    result = measure_quality(engine, [pictured, plain], QualitySettings(("local",), (1.0,), max_tokens=3))
    assert [a["name"] for a in result["answers"]] == ["data.jsonl:1", "data.jsonl:3"]


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "at least one line"), ("{", "line 1"), ("[1]", "line 1"), ('{"prompt": "a"}', "line 1"),
     ('{"prompt": "", "answer": "b"}', "not empty"), ('{"prompt": "a", "answer": 3}', "not empty"),
     ('{"prompt": "a", "answer": "b", "image": 3}', "not empty")],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_line(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_exchanges(path)
    with pytest.raises(ValueError, match="must be a file"):
        read_exchanges(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changed", "match"),
    [({"methods": ("h2o", "h2o")}, "methods must be named once"), ({"budgets": (0.5, 0.5)}, "budgets must be named once"),
     ({"methods": ()}, "methods must be of"), ({"methods": ("topk",)}, "got topk"), ({"budgets": (1.2,)}, "budgets"),
     ({"budgets": ()}, "budgets"), ({"moment": "later"}, "moment"), ({"max_tokens": 0}, "max_tokens")],
)  # fmt: skip
def test_bad_settings_are_named(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        QualitySettings(**changed)


def test_what_is_timed_holds_the_budget() -> None:
    engine, steps = random_engine(1, hidden=64), list[int]()
    chosen = SpeedSettings((Shape.parse("2x40+30"), Shape(1, 25, 5)), repeats=2)
    try:
        result = measure_speed(engine, chosen, steps.append)
    finally:
        engine.close()
    assert sum(steps) == 2 * 2 * 3
    for (batch, prompt, new), found in zip(((2, 40, 30), (1, 25, 5)), result["shapes"].values(), strict=True):
        slot = batch * 64 * 2 * 4  # keys and values of 64 numbers in float32, one layer
        assert found["full"]["kv_end_bytes"] == found["full"]["kv_peak_bytes"] == (prompt + new - 1) * slot
        assert found["elastic"]["kv_end_bytes"] == math.ceil(0.2 * (prompt + new - 1) - 1e-9) * slot
        ratio = found["ratio"]
        assert ratio["kv_end_bytes"] == found["elastic"]["kv_end_bytes"] / found["full"]["kv_end_bytes"]
        assert 0 < ratio["generate_s"]["least"] <= ratio["generate_s"]["median"] <= ratio["generate_s"]["most"]
        assert found["full"]["tokens_s"] == pytest.approx(batch * new / found["full"]["total_s"])
    assert speed_table(result).row_count == 6


@pytest.mark.parametrize("text", ["8x1024", "8x+3", "0x4+4", "1x4+1", "a"])
def test_a_bad_shape_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="a shape must"):
        Shape.parse(text)


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("elastic")(main)
    app.command("other")(lambda: None)
    options = ["elastic", "--n", "1", "--budgets", "1,0.5", "--methods", "local", "--output", str(tmp_path), "--json"]
    made = CliRunner().invoke(app, options)
    assert made.exit_code == 0, made.output
    result = json.loads(made.stdout)
    assert result["config"]["budgets"] == [1.0, 0.5] and list(result["methods"]) == ["local"]
    assert json.loads((tmp_path / "elastic.json").read_text()) == result
    assert Image.open(tmp_path / "elastic.png").size[0] > 600
    assert quality_table(result).row_count == 3
    for bad in (
        ["--budgets", "1,1"], ["--budgets", "2"], ["--speed", "8"], ["--n", "0"], ["--data", "none.jsonl"],
        ["--methods", "topk"], ["--speed", "1x2+2", "--speed-model", "random:x"],
    ):  # fmt: skip
        failed = CliRunner().invoke(app, ["elastic", *bad])
        assert failed.exit_code == 2 and "error:" in failed.output, bad


def test_a_single_exchange_has_no_interval_to_draw(engine: HFEngine, tmp_path: Path) -> None:
    result = measure_quality(engine, [exchange(TURNS[0])], QualitySettings(("local",), (0.5, 1.0), max_tokens=2))
    assert result["full"]["ppl_ci95"] is None
    plot_quality(result, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_every_ablation_is_measured(tiny: HFEngine) -> None:
    from ctxwin.evals.studies.elastic.ablations import ABLATIONS

    result = measure_quality(tiny, generated(1, 3), QualitySettings(methods=tuple(ABLATIONS), budgets=(1.0, 0.5)))
    for name, cells in result["methods"].items():
        assert cells["1"]["same"] == 1 and 0.49 < cells["0.5"]["kv_share"] < 0.52, name
    table = quality_table(result)
    assert table.row_count == 1 + 2 * len(ABLATIONS)


def test_merged_windows_are_measured(tiny: HFEngine) -> None:
    from ctxwin.evals.studies import merged

    rows = merged.measure(tiny, [0.5], 2, 0.8, lambda done: None)
    assert [(r["merged"], r["n"]) for r in rows] == [(which, 2) for which in merged.WHICH]
    assert rows[0]["bytes"] < rows[1]["bytes"] < rows[2]["bytes"] < 1 and rows[0]["whole_right"] == 1
    (table,) = merged.tables({"tiny": rows})
    assert table.row_count == 3
