"""Predicted patches: what a reading is by definition, what a predictor may depend on, and the study on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from ctxwin import open_engine
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.group import Group
from ctxwin.evals.patching import Patcher
from ctxwin.evals.studies.predicted.__main__ import main
from ctxwin.evals.studies.predicted.arms import Elsewhere
from ctxwin.evals.studies.predicted.contexts import Contexts, contexts_of, readouts
from ctxwin.evals.studies.predicted.predictor import Predictor, Recipe
from ctxwin.evals.studies.predicted.study import PredictedSettings, _gate, measure, tables
from ctxwin.evals.tasks.tiny import TinyOptions, TinyTask
from ctxwin.kv.lowrank import Weight

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def group_of(engine: HFEngine, count: int = 2, frames: int = 3) -> Group:
    items = TinyTask("tiny/multi_hop", TinyOptions(seed=3, frames=(frames,))).items(count)
    return Group(Decoder(engine), items, Patcher(engine.spec.kv), "You watch a camera.")


@pytest.fixture(scope="module")
def group(engine: HFEngine) -> Group:
    return group_of(engine)


@pytest.fixture(scope="module")
def contexts(group: Group) -> Contexts:
    return contexts_of(group, taught=True)


@pytest.fixture(scope="module")
def predictor(contexts: Contexts) -> Predictor:
    made = Predictor(Recipe(layers=(0,), directions=8), Weight())
    made.fit([contexts], [contexts])
    return made


def attended(group: Group, mask: Tensor) -> Tensor:
    """What the model's own first layer attends to in place: the input of its output projection, ``[B, S, Hq * D_v]``."""
    lead, seen = group.system_prompt_span.tokens, []
    memory = group.behind_system_prompt(len(group)).grown(group.context_tokens)
    projection = group.decoder.engine.text_model.layers[0].self_attn.o_proj
    hook = projection.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    slots = torch.arange(group.context_tokens)
    group.decoder.run(group.context, memory, slots + lead, mask=mask, layers=range(1))
    hook.remove()
    return seen[0]


def test_a_reading_is_the_models_own_attention_less_what_it_is_alone(group: Group, contexts: Contexts) -> None:
    slots = torch.arange(group.context_tokens)
    system = torch.ones(len(slots), group.system_prompt_span.tokens, dtype=torch.bool)
    causal = slots[None] <= slots[:, None]
    same = contexts.chunk[None] == contexts.chunk[:, None]
    whole, alone = (attended(group, torch.cat([system, mask], 1)) for mask in (causal, causal & same))
    assert contexts.q is not None
    read = readouts(contexts, 0, contexts.q[:, 0], contexts.k[:, 0], contexts.v[:, 0])
    assert (whole - alone)[:, contexts.later].abs().max() > 1e-3
    torch.testing.assert_close(read, whole - alone, atol=1e-5, rtol=1e-4)


def test_what_a_chunk_lost_is_none_in_its_first_layer_and_nothing_for_the_first_chunk(contexts: Contexts) -> None:
    for lost, whole in zip(contexts.lost, (contexts.k, contexts.v), strict=True):
        assert lost[:, 0].abs().max() < 1e-4 * whole.abs().max()
        assert lost[:, :, ~contexts.later].abs().max() < 1e-4 * whole.abs().max()
        assert lost[:, 1:, contexts.later].abs().max() > 1e-3
    with pytest.raises(ValueError, match="taught=True"):
        _ = replace(contexts, lost_k=None).lost


def test_a_prediction_depends_on_what_stands_in_front_only(contexts: Contexts, predictor: Predictor) -> None:
    last = contexts.chunk == contexts.chunk.max()
    changed = {name: getattr(contexts, name).clone() for name in ("k", "v")}
    for x in changed.values():
        x[:, :, last] = x[:, :, last].flip(2)
    before, after = predictor.predict(contexts), predictor.predict(replace(contexts, **changed))
    torch.testing.assert_close(before.v[:, :, ~last], after.v[:, :, ~last])
    assert (before.v - after.v)[:, :, last].abs().max() > 0
    assert not before.k[:, :, ~contexts.later].any() and not before.residual[:, ~contexts.later].any()


def test_a_context_of_one_chunk_has_nothing_to_predict(engine: HFEngine, predictor: Predictor) -> None:
    items = TinyTask("tiny/single_hop", TinyOptions(frames=(2,))).items(1)
    alone = replace(items[0], placed=(0,), asked=0)
    made = predictor.predict(contexts_of(Group(Decoder(engine), [alone], Patcher(engine.spec.kv), "")))
    assert not made.k.any() and not made.v.any()


def test_what_is_linear_in_a_reading_is_found(contexts: Contexts) -> None:
    assert contexts.q is not None
    read = readouts(contexts, 0, contexts.q[:, 0], contexts.k[:, 0], contexts.v[:, 0])
    width = contexts.v[0, 0, 0].numel()
    made = read @ torch.randn(read.shape[-1], width, generator=torch.Generator().manual_seed(0))
    lost_v = torch.zeros_like(contexts.v)
    lost_v[:, 1] = made.view(lost_v[:, 1].shape) * contexts.later[:, None, None]
    taught = replace(contexts, lost_k=torch.zeros_like(contexts.k), lost_v=lost_v)
    sighted, blind = (
        Predictor(Recipe(q, layers, directions=width, penalty=1e-6), Weight()) for q, layers in (("from_kv", (0,)), ("none", ()))
    )  # fmt: skip
    for one in (sighted, blind):
        one.fit([taught], [taught])
    assert sighted.explained > 0.999 > blind.explained


def test_patches_from_elsewhere_are_of_other_items(engine: HFEngine) -> None:
    patcher = Patcher(engine.spec.kv)
    assert Elsewhere("elsewhere", 4).serve(group_of(engine, 1)) == [None]
    items = TinyTask("tiny/multi_hop", TinyOptions(seed=3, frames=(3,))).items(1)
    twins = [replace(items[0], index=i, context=str(i)) for i in (0, 1)]
    group = Group(Decoder(engine), twins, patcher, "")
    for served, exact in zip(Elsewhere("elsewhere", None).serve(group), group.exact, strict=True):
        assert served is not None  # the other item has the same chunks: its patches are this one's own
        for ours, theirs in zip(served.spans, exact, strict=True):
            torch.testing.assert_close(ours.v, theirs.v, atol=2e-2, rtol=2e-2)


def test_a_gate_serves_what_is_expected_to_be_right() -> None:
    class Row:
        def __init__(self, residual: float, answer: str) -> None:
            self.extra, self.answer, self.reference, self.kl = (
                {"residual": residual},
                answer,
                "a",
                float(answer != "a") + residual,
            )

    rows: list[Any] = [Row(i, "a" if i < 6 else "b") for i in range(11)]
    made = _gate(rows)
    assert made["auc"] == 1.0 and made["at"][0]["changed"] == 0.0 and made["at"][-1]["changed"] == 5 / 11
    assert made["rank_correlation"] == pytest.approx(1)
    assert _gate(rows[:6])["auc"] is None


@pytest.mark.parametrize("wrong", [["--variants", "guess"], ["--tasks", "recall"], ["--frames", "two"]])
def test_bad_options_are_one_line(wrong: list[str]) -> None:
    app = typer.Typer()
    app.command()(main)
    ran = CliRunner().invoke(app, ["--quick", *wrong])
    assert ran.exit_code == 2 and ran.output.startswith("error: ") and ran.output.count("\n") == 1


def test_readings_restore_answers_that_pooled_neighbours_do_not() -> None:
    """Few items and few contexts: what is far apart shows, and the figures are the command's to give."""
    settings = PredictedSettings(
        8, 20, (3,), ("multi_hop",), variants=("pooled", "layer-1", "layers-01"), arms="mpic:4"
    )
    steps: list[int] = []
    with open_engine("tiny:hf", dtype="float32") as engine:
        with pytest.raises(ValueError, match="rank must be at most 64"):
            measure(engine, replace(settings, rank=1000))  # type: ignore[arg-type]
        result = measure(engine, settings, steps.append)  # type: ignore[arg-type]
    assert sum(steps) == settings.steps and len(tables(result)) == 2
    rows = {row["arm"]: row for row in result["rows"]}
    assert rows["blind"]["accuracy"] < 0.3 and rows["elsewhere"]["accuracy"] < 0.5
    assert rows["predicted layers-01"]["accuracy"] >= 0.8 > rows["predicted pooled"]["accuracy"]
    assert result["explained"]["layers-01"] > 0.7 > result["explained"]["pooled"]
    work = [rows[f"predicted {name}"]["work"] for name in ("pooled", "layer-1", "layers-01")]
    assert 0 < work[0] < work[1] < work[2] < 0.3
