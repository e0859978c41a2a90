"""Hybrids (Gated DeltaNet beside attention) on transformers: states travel with the KV, behind exactly the same only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.audit import attach_audits
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Patch, form_patch
from ctxwin.kv.states import compose_states, recondition_states, state_deficit
from ctxwin.store import Store, open_store
from engines.conformance import ALL, QUERY, WholeEngineConformance, laid, picture, with_spans
from engines.hybrids import WRITERS, edited, gap
from engines.oracle import assert_answers, real_answer

SEEING = ("qwen3_5", "qwen3_5_moe")
CLOSE = 1e-4
"""Log-probabilities in float32; the kernel sums in blocks of 64 tokens from wherever a forward begins."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's random model, written once."""
    base, made = tmp_path_factory.mktemp("hybrids"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = WRITERS[name](base / name)
        return made[name]

    return folder


def opened(folder: Path, **options: object) -> HFEngine:
    return HFEngine(folder, dtype="float32", **options)  # type: ignore[arg-type]


def refused(test: Callable[..., None], *given: object) -> None:
    """What the suite holds of approximations: a state is of all that stood in front, and of nothing else."""
    with pytest.raises((UnsupportedModel, ValueError), match=r"recurrent layers|must hold the states after it"):
        test(*given)


class OnTransformers(WholeEngineConformance):
    fidelity = Fidelity("exact")

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)

    def test_recomputed_tokens_are_what_a_forward_gives(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        refused(super().test_recomputed_tokens_are_what_a_forward_gives, engine, encoded, query, whole)

    def test_merged_segments_take_fewer_slots(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        with pytest.raises(UnsupportedModel, match="recurrent layers, whose states cannot be merged"):
            engine.attended([], encoded[1], 0)
        layout = with_spans(laid(encoded), whole.captured)
        layout[1] = replace(layout[1], merged=True)
        refused(engine.generate, layout, query, ALL)

    def test_a_canonical_that_is_recomputed_whole_is_computed_in_place(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        refused(super().test_a_canonical_that_is_recomputed_whole_is_computed_in_place, engine, encoded, query, whole)

    def test_a_full_rank_patch_formed_at_one_place_serves_at_another(
        self, engine: Engine, encoded: list[Encoded], query: Encoded
    ) -> None:
        refused(super().test_a_full_rank_patch_formed_at_one_place_serves_at_another, engine, encoded, query)

    def test_forced_logprobs_see_what_is_served(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        """Not what a state is of."""
        alone = engine.prefill([], encoded[1], 0)
        bare = replace(alone, states={})
        layout = with_spans(laid(encoded[:2]), {1: bare})
        with pytest.raises(ValueError, match="must hold the states after it"):
            engine.forced_logprobs(layout, [(query, [5])])


class TestQwen35(OnTransformers):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qwen3_5")


class TestQwen3Next(OnTransformers):
    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qwen3_next")


@pytest.mark.parametrize("kind", [name for name in WRITERS if name not in SEEING])
def test_text_against_the_real_model_path(kind: str, folders: Callable[[str], Path]) -> None:
    engine = opened(folders(kind))
    assert engine.spec.kv.recurrent and engine.spec.kv.layers == 2
    encoded = [
        engine.encode_system_prompt("watch"),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(3)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(folders(kind), ids), CLOSE)


@pytest.mark.parametrize("kind", SEEING)
def test_pictures_against_the_real_model_path(kind: str, folders: Callable[[str], Path]) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    folder = folders(kind)
    engine, shown = opened(folder), (picture(1), picture(2, 56))
    encoded = [engine.encode_system_prompt("watch"), *(engine.encode(Chunk.image(pixels)) for pixels in shown)]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    processor = AutoProcessor.from_pretrained(folder)
    made = processor.image_processor([Image.fromarray(pixels) for pixels in shown], return_tensors="pt")
    assert engine._checkpoint.media is not None
    kinds = torch.tensor([[1 if i == engine._checkpoint.media.image else 0 for i in ids]])
    assert_answers(engine, encoded, real_answer(folder, ids, mm_token_type_ids=kinds, **made), CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_what_the_layout_says(dtype: str, folders: Callable[[str], Path]) -> None:
    engine = HFEngine(folders("qwen3_5_text"), dtype=dtype)
    encoded = engine.encode(Chunk.text("a red square"))
    span = engine.prefill([], encoded, 0)
    assert sum(state.nbytes for state in span.states.values()) == engine.spec.kv.state_bytes
    assert (
        len(span.states) == 12
        and span.nbytes == encoded.tokens * engine.spec.kv.token_bytes + engine.spec.kv.state_bytes
    )
    assert not span.slice(0, span.tokens - 1).states and span.slice(1, span.tokens).states


TEXTS = ("frame {} is red", "a camera sees {} squares", "now {}", "the number is {} and the shape is a circle")


def window_on(engine: Engine, fidelity: Fidelity | None = None) -> Window:
    return Window(engine, "watch a camera", fidelity=fidelity)


def chunk(i: int) -> Chunk:
    return Chunk.text(TEXTS[i % len(TEXTS)].format(i) + "\n")


def reprefill(engine: Engine, window: Window) -> dict[int, float]:
    encoded = [engine.encode_system_prompt(window.system_prompt), *(engine.encode(window.chunk(i)) for i in window.ids)]
    return engine.generate(laid(encoded), engine.encode_query(QUERY), ALL, salt="reference").logprobs


def program(engine: Engine, seed: int) -> None:
    """Random edits, each followed by an ask that is held against a re-prefill of what is placed."""
    rng = np.random.default_rng(seed)
    windows = [window_on(engine)]
    windows[0].extend([chunk(i) for i in range(3)])
    for step in range(8):
        window = edited(rng, windows, chunk)
        answer = window.ask(QUERY, max_tokens=2, logprobs=-1, remember=bool(rng.integers(5) == 0))
        assert answer.usage.exact
        if answer.remembered is None:
            assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE, (seed, step)
            assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == engine.encode_query(QUERY).tokens
        window.check()


@pytest.mark.parametrize("count", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_random_edits_against_a_re_prefill(count: int, folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    for seed in range(count):
        program(engine, seed)


def test_what_needs_no_forward(folders: Callable[[str], Path]) -> None:
    """Appends compute what is new; forks, earlier versions, and a recall behind the system prompt alone compute nothing."""
    engine = opened(folders("qwen3_5_text"))
    query = engine.encode_query(QUERY).tokens
    window = window_on(engine)
    first = window.append(chunk(0))
    window.ask(QUERY)
    second = window.append(chunk(1))
    assert window.ask(QUERY).usage.computed_tokens == window.chunks[1].tokens + query
    assert window.fork().ask(QUERY).usage.computed_tokens == query
    version = window.version
    window.evict(first)
    window.evict(second)
    assert window.at(version).ask(QUERY).usage.computed_tokens == query
    window.recall(first)
    assert window.ask(QUERY).usage.computed_tokens == query, "only the system prompt is in front"
    window.recall(second)
    assert window.ask(QUERY).usage.computed_tokens == query, "behind the same neighbours"
    with window_on(engine) as other:
        other.extend([chunk(0), chunk(1), chunk(2)])
        assert other.ask(QUERY).usage.computed_tokens == other.chunks[2].tokens + query, "in another window, too"


def test_a_stream_of_pictures_computes_each_once(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5"))
    query = engine.encode_query(QUERY).tokens
    with Window(engine, "watch", 1024) as window:
        for i in range(24):
            window.append(Chunk.image(picture(i)))
            want = window.chunks[-1].tokens + query + (window.core.state.system_prompt_tokens if not i else 0)
            assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == want
        assert window.ask(QUERY, max_tokens=1).usage.vision_encodes == 0 and engine.counters.vision_encodes == 24


def test_states_outlive_the_process_and_are_missed_where_they_are_lost(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, where = folders("qwen3_5_text"), f"disk:{tmp_path / 'kv'}"
    engine = opened(folder, store=open_store(where))
    window = window_on(engine)
    window.extend([chunk(i) for i in range(3)])
    answer, said = window.ask(QUERY, logprobs=-1), window.snapshot().model_dump_json()
    engine.store.close()
    again = opened(folder, store=open_store(where))
    back = Window.restore(again, said)
    query = again.encode_query(QUERY).tokens
    found = back.ask(QUERY, logprobs=-1)
    assert found.usage.computed_tokens == query
    assert gap(found.first_token_logprobs, answer.first_token_logprobs) < 1e-6
    kv = back.snapshot().placed[2].kv
    assert kv is not None
    held = again.repo.get_span(kv.span)
    assert held is not None
    again.repo.put_span(kv.span, replace(held[0], states={}), held[1])
    mended = back.ask(QUERY, logprobs=-1)
    assert mended.usage.computed_tokens == query + back.chunks[2].tokens and mended.usage.exact
    assert gap(mended.first_token_logprobs, answer.first_token_logprobs) < CLOSE


def test_remembered_exchanges(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    window = window_on(engine)
    window.extend([chunk(0), chunk(1)])
    plain = window.ask(QUERY, max_tokens=4)
    window.ask(QUERY, max_tokens=4, remember=True)
    answer = window.ask(QUERY, logprobs=-1)
    assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE
    stop = engine.decode(plain.token_ids[1:2])
    if stop:
        window.ask(QUERY, max_tokens=4, stop=stop, remember=True)
        answer = window.ask(QUERY, logprobs=-1)
        assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE


def test_what_a_hybrid_does_not_do(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    for mode in ("patched", "blind"):
        with pytest.raises(UnsupportedModel, match=f"mode must be 'exact' or 'auto', got '{mode}'"):
            window_on(engine, Fidelity(mode))  # type: ignore[arg-type]
    attach_audits(engine)
    window = window_on(engine)
    a = window.append(chunk(0))
    assert window.fidelity.mode == "exact" and not window.core.audits.earns
    with pytest.raises(UnsupportedModel, match="no view without its context"):
        window.toggle(a, conditioned=False)
    with pytest.raises(ValueError, match="must allow merged KV"):
        window.maintenance.merge(a)
    with pytest.raises(UnsupportedModel, match="hold must be 1"):
        engine.generate([Segment(engine.encode_system_prompt("x"), 0)], engine.encode_query("y"), Sampling(hold=0.5))
    window.ask(QUERY)
    plan, kv = window.plan(), engine.spec.kv
    assert plan.entries[0].bytes == plan.entries[0].tokens * kv.token_bytes + kv.state_bytes
    assert window.bytes == window.tokens * kv.token_bytes + 2 * kv.state_bytes


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
