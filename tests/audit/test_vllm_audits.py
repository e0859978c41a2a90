"""Audits on embedded vLLM: the figures of the transformers engine, and nothing of them in the exact prefix cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import Options, auditor_of
from ctxwin.engines.base import Engine
from ctxwin.profiles import BASIS_NAME, PROFILE_NAME
from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.world import make_stream, questions_for, render
from ctxwin_evals.probe.passages import NEXT, Passage, PassageReplays

pytest.importorskip("vllm", reason="vLLM is not installed")
SYSTEM = "You watch a camera."
LONG = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(checkpoint_dir(), made, ignore=shutil.ignore_patterns(PROFILE_NAME, BASIS_NAME))
    return made


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with open_engine(str(model), engine="vllm", dtype="float32") as made:
        auditor_of(made, Options(share=1.0))
        yield made


def blind(engine: Engine, seed: int, **options: float) -> tuple[Window, str]:
    frames = make_stream(np.random.default_rng(seed), 5, window=6)
    window = Window(engine, SYSTEM, fidelity=Fidelity("blind", advanced={"reference": "window"}, **options))
    window.extend([Chunk.image(render(frame)) for frame in frames])
    return window, questions_for(frames, 1, np.random.default_rng(0), ("multi_hop", "single_hop"))[0].text


def test_an_audit_says_what_it_says_on_transformers(model: Path, engine: Engine) -> None:
    found = []
    with open_engine(str(model), engine="hf", dtype="float32") as other:
        for one in (engine, other):
            window, query = blind(one, 3, audit=1.0)
            answer = window.ask(query, 4)
            assert auditor_of(one).drain(LONG)
            found.append(answer)
    assert found[0].token_ids == found[1].token_ids
    assert found[0].audit is not None
    assert found[0].audit > 1e-3
    assert found[0].audit == pytest.approx(found[1].audit, rel=1e-3, abs=1e-4)
    assert not engine.busy


def test_passages_lose_what_they_lose_on_transformers(model: Path, engine: Engine) -> None:
    ids = engine.text_ids("color of 17 shape of 23 color of 05 number of red " * 12)
    rows = [np.random.default_rng(seed).permutation(ids)[: 5 * 12 + 1 + NEXT].tolist() for seed in range(2)]
    passages = [
        Passage(tuple(Chunk.tokens(row[at : at + 12]) for at in range(0, 60, 12)), tuple(row[60:]), "color of 05?")
        for row in rows
    ]
    strategies, found = ["blind", "survivor", "patched:0.24", "removal:0.24"], []
    with open_engine(str(model), engine="hf", dtype="float32") as other:
        for one in (engine, other):
            found.append(PassageReplays(one, passages, SYSTEM, 4).measure(0, strategies, True))
    ours, theirs = found
    assert ours.owed == pytest.approx(theirs.owed, rel=1e-2) and ours.distances["cut"][0] < 1e-3
    for strategy in strategies:
        for harm, other_harm in zip(ours.harms[strategy], theirs.harms[strategy], strict=True):
            assert harm.kind == other_harm.kind
            assert harm.amount == pytest.approx(other_harm.amount, rel=2e-2, abs=1e-4), strategy
    assert max(harms[0].amount for harms in ours.harms.values()) > 2e-4, "it loses more than the two may differ by"


def test_audits_leave_nothing_in_the_exact_prefix_cache(engine: Engine) -> None:
    """The first exact ask over chunks finds as much there after an audit of them as without one."""
    cached = []
    for seed, audit in ((11, 0.0), (12, 1.0)):
        window, query = blind(engine, seed, audit=audit)
        answer = window.ask(query, 4)
        assert auditor_of(engine).drain(LONG)
        assert (answer.audit is not None) == bool(audit)
        exact = Window(engine, SYSTEM, fidelity=Fidelity("exact"))
        exact.extend([window.chunk(i) for i in window.ids])
        cached.append(exact.ask(query, 4).usage.cached_tokens)
    assert cached[0] == cached[1]


def test_a_tenants_evidence_is_its_own(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path))
    monkeypatch.setenv("CTXWIN_AUDITS", "1")
    from ctxwin.audit.evidence import Trial
    from ctxwin.audit.harm import Harm
    from ctxwin_vllm.engine import VLLMEngine

    assert isinstance(engine, VLLMEngine)
    with engine.view("one") as one, engine.view("two") as two:
        auditor = auditor_of(one)
        assert auditor is auditor_of(two)
        auditor.evidence_of(one).take(
            [Trial("blind", Harm("scored", 0.0), exact_computed=1, unit=str(i)) for i in range(600)]
        )
        assert Window(one, SYSTEM).fidelity.mode == "blind"
        assert Window(two, SYSTEM).fidelity.mode == "exact"
