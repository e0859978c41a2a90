"""Answers without a policy are the engine's; the KV of an answer grows and shrinks as a list would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.tiny.world import make_stream, render
from ctxwin_evals.decoder import ROOM, Decoder, Held, Memory
from ctxwin_evals.generation import Reading, forced_logits, generate
from engines.oracle import teacher_forced

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

LONG = ROOM + 30


@pytest.fixture(scope="module")
def mla_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_mla_model

    opened = HFEngine(write_mla_model(tmp_path_factory.mktemp("mla") / "model"), dtype="float32")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def sliding_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    """Layers that see eight tokens, turned by a base of their own, beside one that sees all."""
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import GEMMA3, write_decoder

    opened = HFEngine(write_decoder(tmp_path_factory.mktemp("sliding") / "model", "Gemma3", **GEMMA3), dtype="float32")
    yield opened
    opened.close()


def layout_of(engine: HFEngine) -> list[Segment]:
    """A system prompt and two chunks, with pictures where the model sees."""
    frame = make_stream(0, 2)[0]
    chunks = [Chunk.text("a red circle")]
    chunks.append(Chunk.image(render(frame)) if engine.spec.vision else Chunk.text("the number of the square"))
    system_prompt = engine.encode_system_prompt("You watch a camera.")
    layout, start = [Segment(system_prompt, 0)], system_prompt.advance
    for chunk in chunks:
        layout.append(Segment(engine.encode(chunk), start))
        start += layout[-1].encoded.advance
    spans = [engine.prefill(layout[:i], segment.encoded, segment.start) for i, segment in enumerate(layout)]
    return [replace(segment, span=span) for segment, span in zip(layout, spans, strict=True)]


def placed(engine: HFEngine) -> tuple[Decoder, Memory, int, list[Segment]]:
    decoder, layout = Decoder(engine), layout_of(engine)
    begin = layout[-1].start + layout[-1].encoded.advance
    return decoder, decoder.memory([[segment.span for segment in layout if segment.span is not None]]), begin, layout


@pytest.mark.parametrize("name", ["engine", "mla_engine", "sliding_engine"])
def test_long_answers_are_the_engines(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: HFEngine = request.getfixturevalue(name)
    decoder, memory, begin, layout = placed(engine)
    query = engine.encode_query("what color is it?")
    monkeypatch.setattr(engine, "_checkpoint", replace(engine._checkpoint, eos=frozenset()))
    want = engine.generate(layout, query, Sampling(max_tokens=LONG)).token_ids
    before = memory.k.clone()
    made = generate(decoder, memory, [query], begin, max_tokens=LONG)[0]
    assert made.token_ids == list(want) and len(want) == LONG
    assert torch.equal(memory.k, before)  # what was placed is not touched
    # Row i is what token i was chosen from: teacher forcing along the answer gives the same.
    forced = teacher_forced(engine, layout, query, want)
    torch.testing.assert_close(torch.stack(made.logits).log_softmax(-1), forced, atol=2e-5, rtol=1e-4)
    stepwise = generate(decoder, memory, [query], begin, forced=[want])[0]
    assert torch.equal(torch.stack(stepwise.logits), torch.stack(made.logits))


@pytest.mark.parametrize("name", ["engine", "mla_engine"])
def test_an_answer_ends_where_the_engines_does(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: HFEngine = request.getfixturevalue(name)
    decoder, memory, begin, layout = placed(engine)
    query = engine.encode_query("what color is it?")
    monkeypatch.setattr(engine, "_checkpoint", replace(engine._checkpoint, eos=frozenset()))
    free = generate(decoder, memory, [query], begin, max_tokens=20)[0].token_ids
    end = next(t for i, t in enumerate(free) if t not in free[:i] and i)  # not the first token
    monkeypatch.setattr(engine, "_checkpoint", replace(engine._checkpoint, eos=frozenset({end})))
    made = generate(decoder, memory, [query], begin, max_tokens=20)[0]
    assert made.token_ids == free[: free.index(end)]
    assert len(made.logits) == len(made.token_ids) + 1  # the end was chosen, too
    assert tuple(made.token_ids) == tuple(engine.generate(layout, query, Sampling(max_tokens=20)).token_ids)
    # A forced answer goes on behind an end.
    assert generate(decoder, memory, [query], begin, forced=[free[:5]])[0].token_ids == free[:5]


@pytest.mark.parametrize("name", ["engine", "mla_engine", "sliding_engine"])
def test_teacher_forcing_is_the_engines(name: str, request: pytest.FixtureRequest) -> None:
    engine: HFEngine = request.getfixturevalue(name)
    decoder, memory, begin, layout = placed(engine)
    query, answer = engine.encode_query("shape?"), [(7 * i) % 200 + 10 for i in range(LONG)]
    want = teacher_forced(engine, layout, query, answer)
    have = forced_logits(decoder, memory, [query], begin, [answer])[0].log_softmax(-1)
    torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="at least one token"):
        forced_logits(decoder, memory, [query], begin, [[]])


def test_a_batch_is_answered_as_its_items_are(engine: HFEngine) -> None:
    decoder, memory, begin, _ = placed(engine)
    both = Memory(memory.k.repeat(1, 2, 1, 1, 1), memory.v.repeat(1, 2, 1, 1, 1))
    queries = [decoder.query(q) for q in ("color of 17?", "shape of 05?")]
    assert queries[0].tokens == queries[1].tokens
    reading = Reading(decoder, both)
    reading.ask(queries, begin)
    for token in (5, 6, 7):
        reading.feed([token, token + 10])
    for b, query in enumerate(queries):
        forced = [[5 + 10 * b, 6 + 10 * b, 7 + 10 * b, 0]]
        alone = generate(decoder, memory, [query], begin, forced=forced)[0]
        torch.testing.assert_close(reading.logits()[b], alone.logits[-1], atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40).map(lambda n: ("grow", n)), st.integers(0, 999).map(lambda n: ("drop", n)),
                          st.integers(1, 3).map(lambda n: ("thin", n))), max_size=30))  # fmt: skip
def test_kv_grows_and_shrinks_as_a_list(steps: list[tuple[str, int]]) -> None:
    first = torch.zeros(2, 1, 1, 3, 1)
    held, rows, new = Held(Memory(first, first + 0.5)), [0.0, 0.0, 0.0], 1
    for what, n in steps:
        if what == "grow":
            grown = held.grow(n)
            for i in range(n):
                grown.k[:, :, :, -n + i] = new + i
                grown.v[:, :, :, -n + i] = new + i + 0.5
            rows, new = [*rows, *(float(new + i) for i in range(n))], new + n
        elif what == "drop" and len(rows) > 1:
            held.drop(n % len(rows))
            rows.pop(n % len(rows))
        elif what == "thin":
            held.replace(held.memory.select(torch.arange(0, len(rows), n)))
            rows = rows[::n]
        memory = held.memory
        assert memory.k[1, 0, 0, :, 0].tolist() == rows
        assert memory.v[0, 0, 0, :, 0].tolist() == [r + 0.5 for r in rows]
        assert held.slots == len(rows)
