"""Position-free hybrids on vLLM: maps of chunks on the recurrent states, captured as they are computed and composed on a load.

vLLM's CPU kernels for recurrent layers take bfloat16 only. So maps and answers are held against transformers in float32, and
may be as far from it as transformers in bfloat16 is, within a factor; what is composed where it was computed is held to the bit
of the state in float32, and what a load brings against a forward in the first layer, which nothing conditions but the
convolution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from adapters.vllm.test_vllm_hybrid import CUT, HEADER, anew, chunk, opened, program
from ctxwin import Answer, Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Encoded
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.kv.states import compose_states, transition
from engines.conformance import ALL, QUERY, laid, picture, with_spans
from engines.hybrids import gap
from engines.models import write_hybrid

ROUNDINGS = 2 if torch.cpu._is_amx_tile_supported() else 5
"""Most error in transformers' own at bfloat16; without AMX vLLM's kernel rounds more often."""

if TYPE_CHECKING:
    from ctxwin_vllm.engine import VLLMEngine

pytestmark = [pytest.mark.slow]
HYBRID = Path(__file__).parents[2] / "models" / "hybrid"
STATES = HYBRID.with_name("hybrid-states")
TEXTS = ("the number is nine. now look:", "a camera sees 3 squares\n" * 4, "frame 2 is red\n", "x")
KINDS = ("qwen3_5_text", "qwen3_next")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model; Qwen3-Next's has two key heads of which each is read by two of values."""
    fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if request.param == "qwen3_next" else {}
    kind = "Qwen3Next" if fields else "Qwen3_5Text"
    return write_hybrid(tmp_path_factory.mktemp("maps") / request.param, kind, **fields)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    with opened(folder, position_free=True) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, HFEngine]:
    """Transformers, by dtype."""
    return {dtype: HFEngine(folder, dtype=dtype, position_free=True) for dtype in ("float32", "bfloat16")}


def encoded_by(engine: Engine) -> list[Encoded]:
    return [engine.encode_system_prompt(HEADER), *(engine.encode(Chunk.text(text)) for text in TEXTS)]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_maps_are_those_of_transformers(engine: VLLMEngine, reference: dict[str, HFEngine]) -> None:
    """Of runs of tokens, and of a single token, which vLLM gives to another rule."""
    query = engine.encode_query(QUERY)
    ours = engine.generate(laid(encoded_by(engine), capture=True), query, ALL)
    theirs, rounded = (
        reference[dtype].generate(laid(encoded_by(reference[dtype]), capture=True), query, ALL)
        for dtype in ("float32", "bfloat16")
    )
    assert engine.spec.kv.maps and set(ours.captured) == set(theirs.captured) == set(range(1 + len(TEXTS)))
    for i, span in ours.captured.items():
        assert sum(state.nbytes for state in span.states.values()) == engine.spec.kv.state_bytes
        for name, want in theirs.captured[i].states.items():
            if not name.endswith(".conv"):
                off, usual = apart(span.states[name], want), apart(rounded.captured[i].states[name], want)
                assert off < ROUNDINGS * usual + 2e-3, (i, name, off, usual)


def test_composed_where_they_were_computed_states_are_those_of_the_forward(engine: VLLMEngine) -> None:
    encoded, query = encoded_by(engine), engine.encode_query(QUERY)
    whole = engine.generate(laid(encoded, capture=True), query, ALL)
    layout = with_spans(laid(encoded), whole.captured)
    states: dict[str, torch.Tensor] = {}
    for segment in layout:
        assert segment.span is not None
        states = compose_states(states, segment.span.states)
        for name, state in states.items():
            torch.testing.assert_close(state, segment.span.states[name], rtol=1e-5, atol=1e-6)
    free = [replace(segment, approximate=i > 0) for i, segment in enumerate(layout)]  # states from maps alone
    made = engine.generate(free, query, ALL)
    assert made.computed_tokens == query.tokens and not made.fallbacks
    assert gap(made.logprobs, whole.logprobs) < 0.02


def test_behind_others_the_first_layer_is_as_after_a_forward(engine: VLLMEngine) -> None:
    """Two fronts end in the same tokens, so that the convolution gives the first layer the same inputs behind either."""
    header, target = engine.encode_system_prompt(HEADER), engine.encode(Chunk.text("frame 2 is red\n"))
    fronts = [
        engine.encode(Chunk.text(text + " now look:"))
        for text in ("the number is nine and the shape is a circle.", "no, it is blue.")
    ]
    query = engine.encode_query(QUERY)
    made = [engine.generate(laid([header, front, target], capture=True), query, ALL) for front in fronts]
    held = [with_spans(laid([header, front, target]), done.captured) for front, done in zip(fronts, made, strict=True)]
    here, there = held[0][2].span, held[1][2].span
    assert here is not None and there is not None
    assert apart(here.states["0.own"], there.states["0.own"]) < 0.02
    assert apart(here.states["0.recurrent"], there.states["0.recurrent"]) > 0.1, "states are of what stood in front"
    moved = [*held[1][:2], replace(held[1][2], span=here, span_key="moved", approximate=True)]
    found, want = (engine.generate(layout, query, ALL, capture_query=True, salt="moved") for layout in (moved, held[1]))
    assert found.computed_tokens == query.tokens and found.query_span is not None and want.query_span is not None
    assert apart(found.query_span.states["0.recurrent"], want.query_span.states["0.recurrent"]) < 0.02
    blank = {name: state * 0 if name.endswith(".map") else state for name, state in here.states.items()}
    still = [*moved[:2], replace(moved[2], span=replace(here, states=blank), span_key="blank")]
    wrong = engine.generate(still, query, ALL, capture_query=True, salt="blank")
    assert wrong.query_span is not None
    assert apart(wrong.query_span.states["0.recurrent"], want.query_span.states["0.recurrent"]) > 0.1


def moves(engine: Engine, texts: list[Chunk]) -> dict[str, Answer]:
    """Answers after moves, none of which needs a forward."""
    found: dict[str, Answer] = {}

    def ask(name: str, window: Window, computes: bool = False) -> None:
        found[name] = answer = window.ask(QUERY, max_tokens=2, logprobs=-1)
        assert computes or answer.usage.computed_tokens == engine.encode_query(QUERY).tokens, name
        assert not answer.usage.fallbacks
        window.check()

    with Window(engine, HEADER, fidelity=Fidelity("patched", survivors="keep")) as window:
        first = window.extend(texts)[0]
        ask("whole", window, computes=True)
        window.slide(1)
        ask("slid", window)
        assert [placed.lane for placed in window.chunks] == ["survivor"] * (len(texts) - 1)
        with window.fork() as branch:
            branch.evict(branch.ids[1])
            ask("evicted", branch)
        window.recall(first, 0)
        ask("recalled in front", window)
    with Window(engine, HEADER, fidelity=Fidelity("blind")) as blind:
        blind.extend(texts)
        ask("canonicals", blind, computes=True)
        blind.reorder(blind.ids[::-1])
        ask("reordered", blind)
        gone = blind.ids[0]
        blind.evict(gone)
        blind.recall(gone)
        ask("recalled at the end", blind)
    return found


def test_windows_move_chunks_without_a_forward(engine: VLLMEngine, reference: dict[str, HFEngine]) -> None:
    texts = [Chunk.text(text) for text in TEXTS[:3]]
    ours, theirs, rounded = (moves(each, texts) for each in (engine, reference["float32"], reference["bfloat16"]))
    usual = max(gap(rounded[name].first_token_logprobs, theirs[name].first_token_logprobs) for name in theirs)
    for name, want in theirs.items():
        off = gap(ours[name].first_token_logprobs, want.first_token_logprobs)
        assert ours[name].usage.exact == want.usage.exact
        if name == "slid":
            assert ours[name].usage.bytes_loaded > len(texts) * engine.spec.kv.state_bytes, "maps are counted"
        assert off < 2 * usual + 0.1, (name, off, usual)


def test_where_a_map_costs_more_than_a_forward_there_is_a_forward(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps have so many bytes whatever the chunk's length, so they are in what a span costs."""
    with Window(engine, HEADER, fidelity=Fidelity("patched", survivors="keep")) as window:
        window.extend([chunk(300 + i) for i in range(3)])
        window.ask(QUERY)
        window.slide(1)
        assert [entry.lane for entry in window.plan().entries] == ["survivor"] * 2
        monkeypatch.setattr(engine.costs.engine, "rates", (1.0, 0.1, 0.0, 0.0, 30.0, 0.0))
        assert {entry.lane for entry in window.plan().entries} <= {"computed", "formed"}
        usage = window.ask(QUERY).usage
        assert usage.exact and usage.computed_tokens > engine.encode_query(QUERY).tokens


def test_exact_windows_are_exact_with_maps_too(engine: VLLMEngine, folder: Path) -> None:
    """To the bit those of an engine without maps; and nothing is approximate unless it is asked for."""
    assert sum(program(engine, seed) for seed in range(2)) < 4 * CUT
    encoded, query = encoded_by(engine), engine.encode_query(QUERY)
    made = engine.generate(laid(encoded, capture=True), query, ALL)
    served = engine.generate(with_spans(laid(encoded), made.captured), query, ALL)
    with Window(engine, HEADER) as window:
        window.extend([chunk(i) for i in range(3)])
        assert window.fidelity.mode == "exact" and window.ask(QUERY).usage.exact
        kv = engine.spec.kv
        entry = window.plan().entries[0]
        assert entry.bytes == entry.tokens * kv.token_bytes + kv.state_bytes
    with opened(folder) as plain:
        assert plain.spec.identity != engine.spec.identity and not plain.spec.kv.maps
        exact = plain.generate(laid(encoded, capture=True), query, ALL)
        assert gap(exact.logprobs, made.logprobs) == gap(exact.logprobs, served.logprobs) == 0
        for i, span in exact.captured.items():
            assert torch.equal(span.k, made.captured[i].k) and torch.equal(span.v, made.captured[i].v)
            ours = made.captured[i].states
            for name, state in span.states.items():
                assert torch.equal(state.flatten(), ours[name].flatten()), name


def test_an_exchange_is_remembered_with_its_map(engine: VLLMEngine) -> None:
    query = engine.encode_query(QUERY).tokens
    with Window(engine, HEADER, fidelity=Fidelity("patched", survivors="keep")) as window:
        window.extend([chunk(201), chunk(202)])
        window.ask(QUERY, max_tokens=4, remember=True)
        answer = window.ask(QUERY, logprobs=-1)
        assert gap(answer.first_token_logprobs, anew(engine, window)[1]) < 2 * CUT
        window.slide(1)
        assert window.ask(QUERY).usage.computed_tokens == query
        assert [placed.lane for placed in window.chunks] == ["survivor", "survivor"]


def test_a_chunk_without_its_map_is_refused_behind_others(engine: VLLMEngine) -> None:
    encoded, query = encoded_by(engine)[:3], engine.encode_query(QUERY)
    made = engine.generate(laid(encoded, capture=True), query, ALL)
    layout = with_spans(laid(encoded), made.captured)
    span = made.captured[2]
    bare = replace(span, states={n: s for n, s in span.states.items() if n.endswith((".conv", ".recurrent"))})
    moved = replace(layout[2], span=bare, span_key="bare", approximate=True)
    with pytest.raises(UnsupportedModel, match="served after exactly the same tokens"):
        engine.generate([*layout[:2], moved], query, ALL, salt="bare")
    half = replace(span, states={n: s for n, s in span.states.items() if n != "1.map"})
    moved = replace(layout[2], span=half, span_key="half", approximate=True)
    served = engine.generate([*layout[:2], moved], query, ALL, salt="half")
    whole = engine.generate(laid(encoded), query, ALL)
    assert served.fallbacks == 1 and gap(served.logprobs, whole.logprobs) == 0, "computed in place instead"


def test_no_capture_outlives_its_request(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of chunks that were read back nor of one whose request ended unread."""
    from ctxwin_vllm.transport import LocalTransport

    encoded, query = encoded_by(engine), engine.encode_query(QUERY)
    transport = engine.core.transport
    assert isinstance(transport, LocalTransport) and transport.states is not None
    captures = transport.states._transitions
    assert captures is not None
    engine.generate(laid(encoded, capture=True), query, ALL)
    assert captures.idle
    with monkeypatch.context() as patch, pytest.raises(EngineFailed, match="not captured"):
        patch.setattr(transport, "read_now", lambda save, job: True)
        engine.prefill([], encoded[1], 0)
    engine.generate(laid(encoded), query, ALL)
    assert captures.idle


def test_chunks_are_captured_side_by_side(engine: VLLMEngine) -> None:
    """Each has its own map, also of a batch of several, some of which nobody listens to."""
    query = engine.encode_query(QUERY)
    layouts = [
        laid([engine.encode_system_prompt(HEADER), *(engine.encode(chunk(5 * i + j)) for j in range(3))], capture=i < 4)
        for i in range(6)
    ]
    alone = [engine.generate(layout, query, ALL) for layout in layouts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda layout: engine.generate(layout, query, ALL), layouts))
    for want, got in zip(alone, together, strict=True):
        assert not got.fallbacks
        for i, span in want.captured.items():
            for name, state in span.states.items():
                if name.endswith(".map"):
                    assert apart(got.captured[i].states[name], state) < 0.2, "what is rounded depends on the batch"
                    if name == "0.map":
                        assert apart(got.captured[i].states[name], state) < 0.02


@pytest.mark.parametrize("processes", ["multi", "async"])
def test_in_processes_of_their_own(processes: str, tmp_path: Path) -> None:
    """And with prompts that are computed in several steps."""
    folder = write_hybrid(tmp_path / "model")
    reference = HFEngine(folder, dtype="float32", position_free=True)
    options: dict[str, object] = {"max_num_batched_tokens": 32, "max_num_seqs": 4} if processes == "multi" else {}
    with opened(folder, processes=processes, position_free=True, **options) as engine:
        query, texts = engine.encode_query(QUERY), [Chunk.text(text) for text in TEXTS[:3]]
        assert engine.encode(texts[1]).tokens > 32
        ours, theirs = (
            each.generate(laid(encoded_by(each), capture=True), query, ALL).captured for each in (engine, reference)
        )
        for i, span in ours.items():
            assert apart(span.states["0.map"], theirs[i].states["0.map"]) < 0.02
        found, want = moves(engine, texts), moves(reference, texts)
        for name, answer in want.items():
            assert gap(found[name].first_token_logprobs, answer.first_token_logprobs) < CUT, name
            assert found[name].usage.bytes_loaded > 0 or name in ("whole", "canonicals")


def test_what_a_start_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin_vllm import transitions

    folder = write_hybrid(tmp_path / "model")
    with pytest.raises(ValueError, match="enforce_eager must be True"):
        opened(folder, position_free=True, enforce_eager=False)
    monkeypatch.setattr(transitions, "HOOKED", ("0.30",))
    with pytest.raises(UnsupportedModel, match=r"position_free=True needs vLLM 0\.30, .*got 0\.3"):
        opened(folder, position_free=True)


def test_a_layer_on_a_gpu_is_hooked() -> None:
    """By a stand-in that calls its rules as vLLM's layers do on GPUs, which no test has run."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    from ctxwin_vllm import transitions

    torch.manual_seed(0)
    state = torch.randn(4, 4, 32, 16)
    keys = torch.nn.functional.normalize(torch.randn(1, 12, 2, 16), dim=-1)
    decay, beta = -torch.rand(1, 12, 4), torch.rand(1, 12, 4)
    kind = type("Layer", (), {"__module__": module.__name__})
    layer: Any = kind()
    layer.prefix, layer.kv_cache = "0", (torch.zeros(4, 3, 8), state)
    layer.enable_packed_recurrent_decode = True
    layer.chunk_gated_delta_rule = SimpleNamespace(_forward_method=lambda **given: (None, given["initial_state"]))
    one = transitions._decode_gates(
        {"a": torch.ones(1, 4), "b": torch.zeros(1, 4), "dt_bias": torch.zeros(4), "A_log": torch.zeros(4)}
        | {"k": keys[:, :1], "use_qk_l2norm_in_kernel": True}
    )
    metadata = {"0": SimpleNamespace(prefill_state_indices=torch.tensor([1, 3]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fused_sigmoid_gating_delta_rule_update", lambda **given: (None, None))
        patch.setattr(transitions, "_hook_cpu", lambda: transitions._hook_gpu([layer]))
        patch.setattr("vllm.forward_context.get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
        captures = transitions.Transitions([layer])
        captures.capture(state, 3, 8)
        rule = layer.chunk_gated_delta_rule._forward_method
        token = {"k": keys[:, :1], "a": torch.ones(1, 4), "b": torch.zeros(1, 4), "cu_seqlens": torch.tensor([0, 1])}
        token |= {"dt_bias": torch.zeros(4), "A_log": torch.zeros(4), "use_qk_l2norm_in_kernel": True}
        # A step in which another sequence decodes: its rule gets the blocks of both.
        both = torch.tensor([1, 3])
        module.fused_sigmoid_gating_delta_rule_update(initial_state=state, ssm_state_indices=both, **token)
        given = {"k": keys, "g": decay, "beta": beta, "cu_seqlens": torch.tensor([0, 5, 12])}
        rule(q=keys, v=None, initial_state=state[[1, 3]] * 2, use_qk_l2norm_in_kernel=False, **given)
        module.fused_sigmoid_gating_delta_rule_update(initial_state=state, ssm_state_indices=torch.tensor([3]), **token)
        found = captures.take(state, 3)
        assert found is not None and captures.take(state, 3) is None and not layer.enable_packed_recurrent_decode
    run = transition(keys[0, 5:].repeat_interleave(2, dim=1), decay[0, 5:], beta[0, 5:])
    torch.testing.assert_close(found[0], transition(*one) @ run)
    assert torch.equal(found[1], 2 * state[3])


def test_the_trained_hybrid_answers_as_on_transformers() -> None:
    """Over held-out items with pictures, moved without a forward."""
    from ctxwin.tiny.world import make_item, render

    def answers(engine: Engine, i: int) -> list[Answer]:
        item, found = make_item(1_000_000 + i, "multi_hop", 2 + i % 3, conflict=0.8), []
        question, query = item.questions[0].text, engine.encode_query(item.questions[0].text).tokens
        shown = [Chunk.image(picture(i, 224)), *(Chunk.image(render(frame)) for frame in item.frames)]
        for fidelity in (Fidelity("patched", survivors="keep"), Fidelity("blind")):
            with Window(engine, "You watch a camera.", fidelity=fidelity) as window:
                first = window.extend(shown)[0]
                found.append(window.ask(question, 4, logprobs=-1))
                if fidelity.mode == "blind":
                    window.reorder(window.ids[::-1])
                else:
                    window.slide(1)
                found.append(window.ask(question, 4, logprobs=-1))
                assert found[-1].usage.computed_tokens == query
                if first not in window.ids:
                    window.recall(first)
                    found.append(window.ask(question, 4, logprobs=-1))
                    assert found[-1].usage.computed_tokens == query
        return found

    reference = open_engine(f"hf:{HYBRID}", dtype="float32", position_free=True)
    with open_engine(f"vllm:{HYBRID}", dtype="bfloat16", position_free=True) as engine:
        pairs = [zip(answers(engine, i), answers(reference, i), strict=True) for i in range(12)]
    found = [
        (ours.text == theirs.text, gap(ours.first_token_logprobs, theirs.first_token_logprobs))
        for pair in pairs
        for ours, theirs in pair
    ]
    assert len(found) == 60 and sum(same for same, _ in found) >= 57, sum(same for same, _ in found)
    assert sorted(off for _, off in found)[-4] < 0.2, "what bfloat16 rounds, not another state"


@pytest.mark.parametrize("processes", ["single", "multi"])
def test_patched_states_of_a_trained_hybrid(processes: str) -> None:
    """What it binds lies in its states alone: patches of them bring the answers back without a forward, blind reuse none."""
    from ctxwin.tiny.world import make_item, render

    right: dict[str, int] = defaultdict(int)
    with open_engine(f"vllm:{STATES}", dtype="bfloat16", position_free=True, processes=processes) as engine:
        for i in range(12):
            item = make_item(2_000_000 + i, "multi_hop", 2 + i % 3, conflict=0.8)
            question = item.questions[0].text
            query = engine.encode_query(question).tokens
            for fidelity in (Fidelity("patched", rank=32), Fidelity("blind")):
                with Window(engine, "You watch a camera.", fidelity=fidelity) as window:
                    window.extend([Chunk.image(render(frame)) for frame in item.frames])
                    whole = window.ask(question, 4, logprobs=-1)
                    if fidelity.mode == "patched":
                        right["computed"] += whole.text == item.questions[0].answer
                        window.maintenance.compress()
                        assert {c.lane for c in window.chunks[1:]} == {"patched"}
                        whole = window.ask(question, 4, logprobs=-1)
                        assert whole.usage.computed_tokens == query
                    right[fidelity.mode] += whole.text == item.questions[0].answer
    assert right["computed"] >= 11 and right["patched"] >= right["computed"] - 1 and right["blind"] <= 1, right
