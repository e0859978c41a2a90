"""The probe through the engine contract alone: the figures of the batched decoder, and the same verdicts on vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ctxwin.errors import EngineFailed
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals.arms import Arm, parse_arm
from ctxwin_evals.decoder import Decoder, Reader
from ctxwin_evals.items import Item
from ctxwin_evals.measure import Measurer
from ctxwin_evals.patching import Patcher, fitted
from ctxwin_evals.probe.generated import World
from ctxwin_evals.probe.probe import Lately, Probe, Sizes, Swapped, recalled
from ctxwin_evals.probe.verdict import Limits
from ctxwin_evals.samples import Sample
from ctxwin_evals.serving import ServedMeasurer

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

SOURCE = World()
SMALL = Sizes(
    reading=24, looks=(48,), choosing=4, proving=24, fitting=2, survivors=8, streams=2, slides=2, moving=2, layouts=False,
    chunks=(32,),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Iterator[HFEngine]:
    from ctxwin.engines.hf.engine import HFEngine

    with HFEngine(checkpoint_dir(), dtype="float32") as engine:
        yield engine


def both(engine: HFEngine, items: list[Item], arms: list[Arm], **how: Any) -> list[tuple[Sample, Sample]]:
    """Samples by the decoder, in batches, and by requests to the engine."""
    patcher = fitted(Reader(engine), ("joint", "all", "none"), lambda: iter(()))
    inside = Measurer(Decoder(engine), patcher, SOURCE.system_prompt, along=True)
    outside = ServedMeasurer(Reader(engine), patcher, SOURCE.system_prompt, along=True)  # type: ignore[arg-type]
    return list(zip(inside.samples(items, arms, **how), outside.samples(items, arms, **how), strict=True))


def agree(pairs: list[tuple[Sample, Sample]]) -> None:
    for ours, theirs in pairs:
        assert (ours.arm, ours.index, ours.unscored) == (theirs.arm, theirs.index, theirs.unscored)
        assert (ours.answer, ours.reference, ours.base) == (theirs.answer, theirs.reference, theirs.base), ours.arm
        assert theirs.answer_kl == pytest.approx(ours.answer_kl, rel=0.02, abs=2e-3), ours.arm
        assert (ours.stored, ours.over) == (theirs.stored, theirs.over)


def test_every_arm_of_the_probe_gives_what_the_decoder_gives(tiny: HFEngine) -> None:
    blind = parse_arm("blind")
    placed = [blind, *map(parse_arm, ("stepwise", "patched:4", "patched:8@deep", "transfer:8", "orbit:8"))]
    pairs = both(tiny, SOURCE.items(2), placed, base=blind)
    agree(pairs)
    assert max(s.answer_kl for s, _ in pairs if s.arm == "blind") > 1, "something is lost, and seen by both"
    agree(both(tiny, SOURCE.items(2, strangers=True), [Swapped(f"swapped:{place}", place) for place in (0, 3)]))


def test_survivors_and_recalls_too(tiny: HFEngine) -> None:
    streams = [SOURCE.stream(i, 3) for i in range(2)]
    for reference in ({}, {"reference": Lately("lately")}):
        agree(both(tiny, SOURCE.slid(streams, 3), [parse_arm("survivor"), parse_arm("removal:4")], **reference))
    back = [recalled(item, 2) for item in SOURCE.items(1, strangers=True)]
    agree(both(tiny, back, [parse_arm("stale:8"), parse_arm("update:8")]))


def test_what_a_request_cannot_load_is_an_error_and_no_figure(tiny: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: object, **__: object) -> None:
        raise EngineFailed("spans could not be loaded")

    monkeypatch.setattr(tiny, "forced_logprobs", failed)
    measurer = ServedMeasurer(Reader(tiny), Patcher(tiny.spec.kv), SOURCE.system_prompt, along=True)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="could not be loaded"):
        list(measurer.samples(SOURCE.items(1), [parse_arm("blind")]))


def test_options_of_the_engine_are_checked_before_a_model_is_loaded() -> None:
    from ctxwin_evals.console import open_model_on

    for engine, options in (("jax", "{}"), ("vllm", "[1]"), ("vllm", "{"), ("hf", json.dumps({"processes": "multi"}))):
        with pytest.raises(ValueError, match="engine"):
            open_model_on(engine, options, "nowhere", None, "cpu", 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"processes": "multi"}, {"processes": "async"}], ids=str)
def test_verdicts_on_vllm_are_those_on_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    from ctxwin.opening import open_engine
    from engines.models import wide, write_vision_model

    random = wide(
        lambda folder: write_vision_model(folder, "qwen3_vl"), tmp_path / "random"
    )  # vLLM takes no smaller heads
    chaining = Path(__file__).parents[2] / "models" / "chaining"
    wanted = {checkpoint_dir(): "binds", chaining: "chains", random: "unread"}
    for model, finding in wanted.items() if not options else [(checkpoint_dir(), "binds")]:
        with open_engine(f"vllm:{model}", dtype="float32", **options) as engine:
            result = Probe(engine, [SOURCE], Limits(flips=0.2), SMALL, seconds=3600).run()
        assert result["verdict"]["finding"] == finding, (model, result["verdict"])
        assert result["engine"]["name"] == "vllm" and "oracle" not in result["arms"]["cross"]
        assert result["cost"][0]["prefill_ms"] > 0
        if finding == "binds":
            assert result["fidelity"]["mode"] == "patched" and result["arms"]["cross"]["stepwise"]["flips"] == 0
