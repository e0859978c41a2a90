"""Every fidelity on every kind of engine either opens and then answers, or is refused when the window opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import AdvancedFidelity
from engines import models
from twins import twins

QUERY = "what color?"
ON_VLLM = [
    pytest.param("vllm tiny", marks=[pytest.mark.vllm, pytest.mark.slow]),
    pytest.param("vllm hybrid", marks=[pytest.mark.vllm, pytest.mark.slow]),
    pytest.param("vllm position-free", marks=[pytest.mark.vllm, pytest.mark.slow]),
]
KINDS = ["hf tiny", "hf text", "hf sliding", "hf latent", "hf hybrid", "hf position-free", *ON_VLLM]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    name, _, kind = request.param.partition(" ")
    folder = tmp_path_factory.mktemp("model") / "model"
    options: dict[str, Any] = {"dtype": "bfloat16" if name == "vllm" and kind != "tiny" else "float32"}
    model = str(folder)
    if kind == "tiny":
        model = "tiny"
    elif kind == "text":
        models.write_text_model(folder)
    elif kind == "sliding":
        models.write_decoder(folder, "Gemma2", sliding_window=64)
    elif kind == "latent":
        models.write_mla_model(folder)
    else:
        models.write_hybrid(folder)
        options |= {"position_free": True} if kind == "position-free" else {}
    with open_engine(f"{name}:{model}", **options) as opened:
        yield opened


FIDELITIES = st.builds(
    Fidelity,
    mode=st.sampled_from(["auto", "exact", "patched", "patched", "patched", "blind"]),
    rank=st.sampled_from([None, 1, 4]),
    bytes_share=st.sampled_from([None, 0.1, 1.0]),
    layers=st.sampled_from(["all", "deep"]),
    survivors=st.sampled_from(["keep", "slid", "removal", "refresh"]),
    orbit=st.booleans(),
    recompute=st.sampled_from([None, 0, 2]),
    merge=st.sampled_from([None, 0.5]),
    edited_tokens=st.sampled_from([None, 16]),
    audit=st.sampled_from([0.0, 1.0]),
    kl_budget=st.sampled_from([None, 0.01]),
    advanced=st.builds(
        AdvancedFidelity,
        layout=st.sampled_from(["joint", "joint", "shared"]),
        eliminate=st.sampled_from([0, 1, 16]),
        merge_prompt=st.booleans(),
        reference=st.sampled_from(["stricter", "window", "stream", "nearer"]),
        forbid=st.sampled_from([(), ("resident",), ("survivor", "patched"), ("canonical",)]),
    ),
)


def contents(engine: Engine) -> list[Chunk]:
    first = Chunk.text("a red circle")
    if engine.spec.vision:
        first = Chunk.image(np.random.default_rng(1).integers(0, 255, (28, 28, 3), dtype=np.uint8), text="t=0 s")
    return [
        first,
        Chunk.text("the number 3 is blue and the number 4 is red"),
        Chunk.text("what is the shape of a frame"),
    ]


def use(window: Window) -> None:
    """Edits whose refusal is their own affair, and asks, which must be answered."""
    ids = window.extend(contents(window.engine))
    window.ask(QUERY, max_tokens=2)
    with suppress(UnsupportedModel, ValueError):
        window.maintenance.merge(ids[1])
    window.ask(QUERY, max_tokens=2)
    window.evict(ids[0])
    window.ask(QUERY, max_tokens=2)
    window.maintenance.compress()
    window.recall(ids[0])
    window.reorder([ids[2], ids[0], ids[1]])
    window.ask(QUERY, max_tokens=2)
    with suppress(UnsupportedModel):
        window.toggle(ids[1], conditioned=False)
    window.ask(QUERY, max_tokens=2, remember=True)
    window.ask(QUERY, max_tokens=2)


def check_fidelity(engine: Engine, fidelity: Fidelity) -> None:
    try:
        window = Window(engine, "watch", fidelity=fidelity)
    except (UnsupportedModel, ValueError) as refusal:
        assert "must" in str(refusal) or "has" in str(refusal)
        return
    with window:
        use(window)


test_it_answers_or_does_not_open, test_it_answers_or_does_not_open_at_length = twins(
    check_fidelity, 5, 25, fidelity=FIDELITIES
)


@pytest.mark.parametrize("advanced", [{"eliminate": True}, {"eliminate": 16, "merge_prompt": True}])
def test_tokens_are_dropped_where_the_engine_can(engine: Engine, advanced: dict[str, int]) -> None:
    fidelity = Fidelity("patched", rank=4, merge=0.5, advanced=advanced)
    try:
        engine.check_hold(Sampling(hold=0.5, merge_prompt="merge_prompt" in advanced))
        with Window(engine, "watch", fidelity=fidelity) as window:
            use(window)
    except UnsupportedModel as refusal:
        assert "must" in str(refusal) or "has" in str(refusal) or "caps" in str(refusal)
        with pytest.raises(UnsupportedModel):
            Window(engine, "watch", fidelity=fidelity)
        with Window(engine, "watch", fidelity=Fidelity("exact")) as window:
            use(window)
