"""The study on released weights, on the bundled model: what must hold on any model, and that a run can stop anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ctxwin.engines.segments import Segment
from ctxwin.progress import progress
from ctxwin_evals.arms import Served, parse_arm
from ctxwin_evals.console import open_model
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.patching import Patcher
from ctxwin_evals.samples import open_samples
from evals.studies import released, released_texts
from evals.studies.released import Study, Views, main, run, split, summarise
from evals.studies.released_texts import FORMS, Texts

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

PROSE = "color of 07? red. shape of 31? square. number of blue circle? 4. left of 12? green. " * 80
SET = "text-3x24"


@pytest.fixture(scope="module")
def tiny() -> Iterator[HFEngine]:
    opened = open_model("tiny", "float32", "cpu", 1)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def short_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_texts, "documentation", lambda short=False: iter([PROSE]))


def study_of(engine: HFEngine) -> Study:
    return Study(Decoder(engine), lambda: Decoder(open_model("tiny", "bfloat16", "cpu", 1)))


def test_what_must_hold_on_any_model(tiny: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released, "PIECE", 20)
    names = [
        "reprefill", "blind", "oracle", "patched:full", "mpic:all", "epic:all", "slide2/survivor", "slide2/removal:full",
        "slide2/removal:8@quantized",
        "recall/blind", "recall/update:full", "floor/pieces", "floor/bfloat16", "floor/bfloat16-pieces",
    ]  # fmt: skip
    context, study = Texts(tiny, 0).contexts(SET, 1)[0], study_of(tiny)
    rows = {row.arm: row for row in study.rows(context, names)}
    assert list(rows) == names
    blind = rows["blind"].kl
    assert rows["reprefill"].kl == 0 == rows["reprefill"].extra["flips"]
    assert blind > 1e-3 and rows["recall/blind"].kl > 1e-3
    for exact in ("mpic:all", "epic:all", "floor/pieces"):  # every token, which is text, is computed in context
        assert rows[exact].kl < 1e-5, exact
    assert rows["patched:full"].kl < 0.02 * blind  # its factors are bfloat16
    assert rows["recall/update:full"].kl < 0.02 * rows["recall/blind"].kl
    assert rows["slide2/removal:full"].kl < 0.02 * rows["slide2/survivor"].kl
    assert rows["slide2/removal:8@quantized"].kl < 0.5 * rows["slide2/survivor"].kl
    assert rows["floor/pieces"].kl < rows["floor/bfloat16"].kl < blind
    assert rows["patched:full"].stored > 0 == rows["blind"].stored and rows["mpic:all"].extra["recomputed"] == 1


def test_pictures_are_served_in_every_way_and_the_model_answers(tiny: HFEngine) -> None:
    names = [
        "reprefill", "blind", "oracle", "patched:full", "epic:all", "mpic:all", "slide6/survivor", "slide1/removal:full",
        "recall/blind", "recall/update:full", "floor/bfloat16",
    ]  # fmt: skip
    study = study_of(tiny)
    for context in Texts(tiny, 0).contexts("pictures-2-3", 2):
        rows = {row.arm: row for row in study.rows(context, names)}
        assert list(rows) == names
        assert (
            len(context.load()) == context.placed + released_texts.PAST
            and context.item("slide6").count == 6 + context.placed
        )
        for exact in ("epic:all", "mpic:all"):
            assert rows[exact].kl < 1e-5, exact
        for patched, base in (("patched:full", "blind"), ("slide1/removal:full", "slide6/survivor")):
            assert rows[patched].kl <= max(1e-4, 0.1 * rows[base].kl), patched
        assert rows["patched:full"].stored > 0 and rows["oracle"].computed == rows["reprefill"].computed


def test_the_mask_oracle_is_every_chunk_alone_at_its_own_place(tiny: HFEngine) -> None:
    """Behind the same system prompt, as far away as it stands: what blind reuse loses beyond that is that it was moved."""
    context = Texts(tiny, 0).contexts(SET, 1)[0]
    views = Views(Decoder(tiny), Patcher(tiny.spec.kv), context)
    group = views.group("")
    front = [Segment(group.system_prompt, 0, span=group.system_prompt_span)]
    placed = zip(group.chunks[0][-context.placed :], group.places, strict=True)
    alone = [tiny.prefill(front, chunk, place.start) for chunk, place in placed]
    oracle = views.read(parse_arm("oracle").serve(group)[0])
    torch.testing.assert_close(views.read(Served(alone)), oracle, atol=1e-4, rtol=0)
    moved = views.read(Served(group.blind[0]))
    assert (moved - oracle).abs().max() > 1e-2


def test_a_run_that_stopped_gives_the_table_of_one_that_did_not(tmp_path: Path) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(main)

    def figures(folder: str, n: int, arms: str, first: int = 0) -> dict[str, Any]:
        options = ["--model", "tiny", "--sets", f"{SET},facts-one", "--threads", "1", "--json"]
        share = ["--first", str(first), "--n", str(n), "--arms", arms, "--output", str(tmp_path / folder)]
        result = CliRunner().invoke(app, [*options, *share])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        assert found["complete"]
        return dict(found["sets"])

    whole = figures("whole", 2, "blind,patched:2,patched:4,slide1/removal:2")
    first = figures("stopped", 1, "patched:4")
    assert set(first[SET]) == {"reprefill", "blind", "patched:4"} and first[SET]["blind"]["n"] == 1
    path = tmp_path / "stopped" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # killed while it wrote
    assert figures("stopped", 2, "slide1/removal:2,patched:4,patched:2") == whole
    figures("one machine", 1, "blind,patched:2,patched:4,slide1/removal:2")
    other = figures("another", 2, "blind,patched:2,patched:4,slide1/removal:2", first=1)
    assert other[SET]["blind"]["n"] == 1
    rows = (tmp_path / "another" / "samples.jsonl").read_text()
    with (tmp_path / "one machine" / "samples.jsonl").open("a") as file:
        file.write(rows)
    assert figures("one machine", 2, "blind,patched:2,patched:4,slide1/removal:2") == whole
    arms = whole[SET]
    assert arms["patched:4"]["eta"] == pytest.approx(1 - arms["patched:4"]["kl"] / arms["blind"]["kl"])
    assert arms["slide1/removal:2"]["eta"] == pytest.approx(
        1 - arms["slide1/removal:2"]["kl"] / arms["slide1/survivor"]["kl"]
    )


@pytest.mark.parametrize("layout", ["quantized", "shared"])
def test_every_arm_patches_in_the_layout_of_the_run(tmp_path: Path, layout: str) -> None:
    """Windows serve quantized patches in every lane; a shared basis is fitted on contexts in front of those that are judged."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    options = ["--model", "tiny", "--sets", SET, "--threads", "1", "--json", "--arms", "patched:4,recall/update:4"]
    options += ["--layout", layout, "--output", str(tmp_path)]
    for n, first in ((2, 1), (3, 1)):
        result = CliRunner().invoke(app, [*options, "--n", str(n), "--first", str(first)])
        assert result.exit_code == 0, result.output
        figures = json.loads(result.stdout)["sets"][SET]
        assert figures["patched:4"]["n"] == n - first and figures["patched:4"]["bytes_share"] > 0
        assert figures["recall/update:4"]["kl"] < figures["recall/blind"]["kl"]
    assert (tmp_path / "basis.safetensors").exists() == (layout == "shared")
    joint = CliRunner().invoke(app, [*options, "--first", "1", "--n", "2", "--layout", "joint"])
    assert joint.exit_code == 2 and "layout" in joint.output
    if layout == "shared":
        result = CliRunner().invoke(app, [*options, "--n", "2"])
        assert result.exit_code == 2 and "--first must be at least 1" in result.output


def test_processes_give_the_rows_of_one(tiny: HFEngine) -> None:
    contexts, names = Texts(tiny, 0).contexts(SET, 3), ["reprefill", "blind", "patched:4", "floor/bfloat16"]
    jobs = [(context, names) for context in contexts]
    both = released.Processes(2, "tiny", "cpu", 1).serve(iter(jobs)), study_of(tiny).serve(jobs)
    for there, here in zip(*both, strict=True):
        assert [row.key for row in there] == [row.key for row in here]
        assert [row.kl for row in there] == pytest.approx([row.kl for row in here], abs=1e-7)


def test_nothing_begins_behind_the_deadline(tiny: HFEngine, tmp_path: Path) -> None:
    contexts = Texts(tiny, 0).contexts(SET, 1)
    with open_samples(tmp_path / "run", {"format": 3}) as samples:
        assert not run(study_of(tiny).serve, samples, contexts, ["reprefill"], 0.0)
        assert not samples.rows and summarise(samples) == {}
        assert run(study_of(tiny).serve, samples, contexts, ["reprefill"], float("inf"))
        assert run(study_of(tiny).serve, samples, contexts, ["reprefill"], 0.0)  # all is there
        with pytest.raises(ValueError, match="rows of today's texts"):
            run(study_of(tiny).serve, samples, Texts(tiny, 1).contexts(SET, 1), ["reprefill"], float("inf"))


def test_the_time_left_of_a_run_that_goes_on_is_that_of_what_is_missing(
    tiny: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def serve(jobs: Any) -> Iterator[list[Any]]:
        nonlocal now
        for _ in jobs:
            now += 10.0
            yield []

    contexts = Texts(tiny, 0).contexts(SET, 6)
    with open_samples(tmp_path / "run", {"format": 3}) as samples:
        assert run(study_of(tiny).serve, samples, contexts[:4], ["reprefill"], float("inf"))
        with progress("contexts", len(contexts)) as advance:
            now += 5.0  # the texts are read
            run(serve, samples, contexts, ["reprefill"], float("inf"), advance)
    assert "contexts: 5 of 6, about 10 s left" in capsys.readouterr().err


def test_contexts_depend_on_seed_and_number_alone(tiny: HFEngine) -> None:
    for task in (SET, "pictures-2-4", *(f"facts-{form}" for form in FORMS)):
        few, many = (Texts(tiny, 0).contexts(task, n) for n in (2, 3))
        assert few == many[:2] and few != Texts(tiny, 1).contexts(task, 2)
        for context in many:
            sizes = {tiny.encode(chunk).tokens for chunk in context.load()}
            assert len(sizes) == 1 and 1 <= context.asked < context.placed and context.target
    with pytest.raises(ValueError, match="at most"):
        Texts(tiny, 0).contexts(SET, 10_000)
    texts = Texts(tiny, 0)
    first = len(texts._prose) // (len(texts.contexts(SET, 1)[0].chunks) * 24 + 1 + released_texts.NEXT)
    few, many = (texts.contexts(SET, n) for n in (first, first + 1))
    assert few == many[:first], "shorter docstrings follow where the long ones do not go round"
    with pytest.raises(ValueError, match="a set must be"):
        Texts(tiny, 0).contexts("facts-none", 1)


@pytest.mark.parametrize("name", ["slide0/survivor", "recall/patched:4", "floor/none", "survivor", "none"])
def test_an_arm_without_meaning_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="an arm must be"):
        split(name)


def test_every_listed_arm_has_a_meaning() -> None:
    for name in (*released.MAIN, *released.MORE):
        assert split(name) and split(released.base_of(name))
