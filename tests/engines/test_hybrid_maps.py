"""Position-free hybrids on transformers: chunks as maps on the states, and patches of KV and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import Generation
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Patch, form_patch
from ctxwin.kv.states import compose_states, recondition_states, state_deficit
from ctxwin.store import open_store
from ctxwin.window.idle import prefiller_of
from engines.conformance import ALL, QUERY, laid, with_spans
from engines.hybrid_windows import CLOSE, chunk, opened, program, reprefill, window_on
from engines.hybrids import gap


def free(folder: Path, **options: object) -> HFEngine:
    return opened(folder, position_free=True, **options)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_chunks_are_maps_on_the_states(kind: str, folders: Callable[[str], Path]) -> None:
    """Composed behind the very same antecedents, states are those of one forward, and so is what follows."""
    engine, exact = free(folders(kind)), opened(folders(kind))
    assert engine.spec.kv.maps and engine.spec.identity != exact.spec.identity
    encoded = [
        engine.encode_system_prompt("watch"),
        *(engine.encode(chunk(i)) for i in range(4)),
        engine.encode(Chunk.text("x")),
    ]
    query = engine.encode_query(QUERY)
    whole = engine.generate(laid(encoded, capture=True), query, ALL)
    assert gap(whole.logprobs, exact.generate(laid(encoded), query, ALL).logprobs) < CLOSE
    layout = with_spans(laid(encoded), whole.captured)
    apart = [replace(segment, approximate=i > 0) for i, segment in enumerate(layout)]  # states from maps alone
    assert gap(engine.generate(apart, query, ALL).logprobs, whole.logprobs) < CLOSE
    last = whole.captured[len(encoded) - 1]
    assert sum(state.nbytes for state in last.states.values()) == engine.spec.kv.state_bytes
    states: dict[str, torch.Tensor] = {}
    for i in range(len(encoded)):
        states = compose_states(states, whole.captured[i].states)
    for name, state in states.items():
        torch.testing.assert_close(state, last.states[name], rtol=1e-4, atol=1e-5)


def test_a_map_is_the_same_behind_other_states(folders: Callable[[str], Path]) -> None:
    """In the first layer nothing is conditioned but by the convolution, which reaches over three tokens."""
    engine = free(folders("qwen3_5_text"))
    header = engine.encode_system_prompt("watch")
    front = [
        engine.encode(Chunk.text("the number is nine. now look:")),
        engine.encode(Chunk.text("no, it is blue. now look:")),
    ]
    target = engine.encode(chunk(3))
    spans = []
    for each in front:
        segments = laid([header, each])
        spans.append(engine.prefill(segments, target, segments[-1].start + each.advance))
    ours, theirs = (span.states for span in spans)
    torch.testing.assert_close(ours["0.map"], theirs["0.map"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["0.own"], theirs["0.own"], rtol=1e-4, atol=1e-5)
    apart = {name: float((ours[name] - theirs[name]).abs().max()) for name in ("0.own", "0.recurrent", "4.own")}
    assert apart["0.recurrent"] > 10 * apart["0.own"], "the states are of what stood in front"
    assert apart["4.own"] > 10 * apart["0.own"], "deeper layers see what was conditioned"
    moved = compose_states(
        {"0.recurrent": torch.zeros_like(ours["0.recurrent"])}, {k: v for k, v in ours.items() if k.startswith("0.")}
    )
    torch.testing.assert_close(moved["0.recurrent"], ours["0.own"], rtol=1e-5, atol=1e-6)


def test_windows_move_chunks_without_a_forward(folders: Callable[[str], Path]) -> None:
    engine = free(folders("qwen3_5_text"))
    query = engine.encode_query(QUERY).tokens
    keeps = Fidelity("patched", survivors="keep")
    with window_on(engine, keeps) as window:
        window.extend([chunk(i) for i in range(4)])
        whole = window.ask(QUERY, logprobs=-1)
        assert set(window.fidelity.advanced.forbid) == {"orbit", "partial", "merged"}
        window.slide(1)
        slid = window.ask(QUERY, logprobs=-1)
        assert slid.usage.computed_tokens == query and [e.lane for e in window.chunks] == ["survivor"] * 3
        exact = reprefill(engine, window)
        assert 0 < gap(slid.first_token_logprobs, exact) < gap(whole.first_token_logprobs, exact) + 5
        middle = window.ids[1]
        window.toggle(middle, conditioned=False)
        assert window.chunks[1].lane == "canonical"
        window.ask(QUERY)
        window.toggle(middle, conditioned=True)
        assert window.chunks[1].lane == "survivor"
        window.ask(QUERY)
        window.ask(QUERY, remember=True)
        assert window.ask(QUERY).usage.computed_tokens == query
    with window_on(engine, Fidelity("blind")) as blind:
        blind.extend([chunk(i) for i in range(3)])
        blind.ask(QUERY)
        blind.reorder(blind.ids[::-1])
        assert blind.ask(QUERY).usage.computed_tokens == query
    with window_on(engine) as auto:
        assert auto.fidelity.mode == "exact"


def test_exact_windows_are_exact_with_maps_too(folders: Callable[[str], Path]) -> None:
    engine = free(folders("qwen3_5_text"))
    for seed in range(3):
        program(engine, seed)


def formed(engine: HFEngine) -> tuple[list[Encoded], Generation, SpanKV, dict[str, torch.Tensor]]:
    """Chunks, a forward over them at position 0, the last one's canonical, and the states in front of it."""
    encoded = [engine.encode_system_prompt("watch"), *(engine.encode(chunk(i)) for i in range(4))]
    whole = engine.generate(laid(encoded, capture=True), engine.encode_query(QUERY), ALL)
    alone = engine.prefill([Segment(encoded[0], 0, whole.captured[0])], encoded[-1], encoded[0].advance)
    return encoded, whole, alone, dict(whole.captured[len(encoded) - 2].states)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_a_full_rank_patch_of_kv_and_states_serves_elsewhere(kind: str, folders: Callable[[str], Path]) -> None:
    engine = free(folders(kind))
    encoded, whole, alone, front = formed(engine)
    query, kv = engine.encode_query(QUERY), engine.spec.kv
    patch = form_patch(whole.captured[len(encoded) - 1], alone, kv, front=front, dtype=torch.float32)
    there = [replace(segment, start=segment.start + 41) for segment in laid(encoded)]
    want = engine.generate(there, query, ALL).logprobs
    layout = [replace(s, span=whole.captured[i], span_key=f"{i}") for i, s in enumerate(there)]

    def served(patch: Patch) -> float:
        layout[-1] = replace(layout[-1], span=alone, patch=patch, patch_key="p", approximate=True)
        return gap(engine.generate(layout, query, ALL).logprobs, want)

    assert served(patch) < CLOSE
    zero = {name: torch.zeros_like(state) for name, state in patch.states.items()}
    assert served(replace(patch, states=zero)) > 10 * CLOSE, "KV alone restores nothing of what lies in the states"
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        served(replace(patch, states={}))
    with pytest.raises(ValueError, match="must fit the map"):
        served(replace(patch, states={"0.left": patch.states["0.left"][:, :1], "0.right": patch.states["0.right"]}))


def test_what_is_kept_of_states_grows_with_rank_and_bytes(folders: Callable[[str], Path]) -> None:
    engine = free(folders("qwen3_5_text"))
    encoded, whole, alone, front = formed(engine)
    last, kv = whole.captured[len(encoded) - 1], engine.spec.kv
    want = state_deficit(last.states, front, alone.states)
    missed = []
    for rank in (0, 1, 4, None):
        patch = form_patch(last, alone, kv, front=front, rank=rank, dtype=torch.float32)
        assert patch.nbytes == sum(t.nbytes for t in patch.tensors().values())
        assert all(
            t.shape[-1] == (rank if rank is not None else len(t)) for n, t in patch.states.items() if "left" in n
        )
        lost = compose_states(front, recondition_states(alone.states, patch.states))
        missed.append(sum(float((lost[n] - last.states[n]).norm()) for n in want))
    assert missed == sorted(missed, reverse=True) and missed[-1] < 1e-4 * missed[0]
    for share in (0.05, 0.5):
        made = form_patch(last, alone, kv, front=front, bytes_share=share, dtype=torch.float32).states
        for name, lack in want.items():
            layer, _, kind = name.partition(".")
            sides = [t.numel() for n, t in made.items() if n in (f"{layer}.left", f"{layer}.right")]
            assert kind == "conv" or sum(sides) <= share * lack.numel()
    assert not form_patch(last, alone, kv).states, "without the states in front it is a patch of KV alone"


def test_windows_serve_patched_states_without_a_forward(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """And after a restart, from the store."""
    folder, where = folders("qwen3_5_text"), f"disk:{tmp_path / 'kv'}"
    engine = free(folder, store=open_store(where))
    query = engine.encode_query(QUERY).tokens
    window = window_on(engine, Fidelity("patched", rank=32))
    window.extend([chunk(i) for i in range(4)])
    whole = window.ask(QUERY, logprobs=-1)
    freed = window.maintenance.compress()
    kept = [window.snapshot().placed[i].kv for i in range(4)]
    assert [kv.lane for kv in kept if kv] == ["computed", "patched", "patched", "patched"]
    patches = [engine.repo.get_patch(kv.patch) for kv in kept if kv and kv.patch]
    spans = [engine.repo.get_span(kv.span) for kv in kept if kv and kv.patch]
    assert freed == sum(s[0].nbytes - p.nbytes for s, p in zip(spans, patches, strict=True) if s and p)
    served = window.ask(QUERY, logprobs=-1)
    assert served.usage.computed_tokens == query and served.usage.reused_tokens["patched"] and not served.usage.exact
    close = gap(served.first_token_logprobs, whole.first_token_logprobs)
    blind = window_on(engine, Fidelity("blind"))
    blind.extend([chunk(i) for i in range(4)])
    assert close < 0.5 * gap(blind.ask(QUERY, logprobs=-1).first_token_logprobs, whole.first_token_logprobs)
    said = window.snapshot().model_dump_json()
    engine.store.close()
    back = Window.restore(again := free(folder, store=open_store(where)), said)
    found = back.ask(QUERY, logprobs=-1)
    assert found.usage.computed_tokens == query and [c.lane for c in back.chunks][1:] == ["patched"] * 3
    assert gap(found.first_token_logprobs, served.first_token_logprobs) < 1e-6
    for old, kv in zip(patches, kept[1:], strict=True):
        new = again.repo.get_patch(kv.patch) if kv and kv.patch else None
        assert old and new and all(torch.equal(t, new.tensors()[name]) for name, t in old.tensors().items())


def test_chunks_behind_patched_ones_are_patched_as_they_are_served(folders: Callable[[str], Path]) -> None:
    """A chunk that is computed behind patches, and one whose neighbours are gone from the store."""
    engine = free(folders("qwen3_5_text"))
    window = window_on(engine, Fidelity("patched", rank=32))
    window.extend([chunk(i) for i in range(3)])
    window.ask(QUERY)
    window.maintenance.compress()
    window.append(chunk(3))
    before = window.ask(QUERY, logprobs=-1)
    window.maintenance.compress()
    after = window.ask(QUERY, logprobs=-1)
    assert [c.lane for c in window.chunks] == ["resident", "patched", "patched", "patched"]
    assert gap(before.first_token_logprobs, after.first_token_logprobs) < 0.05
    other = window_on(engine, Fidelity("patched", rank=32))
    other.extend([chunk(i) for i in (2, 1, 0)])
    other.ask(QUERY)
    first = other.snapshot().placed[0].kv
    assert first is not None
    engine.repo.delete(first.span)
    other.maintenance.compress()
    assert other.snapshot().placed[1].kv.patch is None, "what stood in front is not known"  # type: ignore[union-attr]
    window.reorder(window.ids[::-1])
    assert all(c.lane != "patched" for c in window.chunks), "a patch is of one order"


def test_removal_patches_correct_states(folders: Callable[[str], Path]) -> None:
    engine = free(folders("qwen3_5_text"))
    query = engine.encode_query(QUERY).tokens
    with window_on(engine, Fidelity("patched", survivors="removal", rank=32)) as window:
        window.extend([chunk(i) for i in range(4)])
        window.ask(QUERY)
        window.slide(1)
        formed = window.ask(QUERY)
        assert formed.usage.computed_tokens > query
        served = window.ask(QUERY, logprobs=-1)
        assert served.usage.computed_tokens == query and [c.lane for c in window.chunks][1:] == ["patched"] * 2
        exact = reprefill(engine, window)
        assert gap(served.first_token_logprobs, exact) < 0.05


def test_removal_patches_formed_ahead_correct_states(folders: Callable[[str], Path]) -> None:
    engine = free(folders("qwen3_5_text"))
    fidelity = Fidelity("patched", survivors="removal", rank=32)
    with Window(engine, "watch a camera", fidelity=fidelity, prefill="idle") as window:
        window.extend([chunk(i) for i in range(4)])
        window.ask(QUERY)
        window.slide(1)
        assert prefiller_of(engine).drain(60)
        served = window.ask(QUERY, logprobs=-1)
        assert served.usage.computed_tokens == engine.encode_query(QUERY).tokens and served.usage.prefilled_tokens
        assert [c.lane for c in window.chunks][1:] == ["patched"] * 2
        assert gap(served.first_token_logprobs, reprefill(engine, window)) < 0.05
