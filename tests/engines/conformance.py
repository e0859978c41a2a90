"""What every engine must do; a test module subclasses `EngineConformance` and says how to open its engine.

A model family is held to `EngineConformance`, an engine on one model of each kind to `WholeEngineConformance`.

Everything runs in float32, on random weights: agreement is then a matter of arithmetic, not of what a model learned.
Tolerances: KV relative to its largest element, a few float32 roundings through three layers; log-probabilities 1e-5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation, PrefillCost, ScoredToken
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment, partial_ranges
from ctxwin.errors import ChunkUnavailable, UnsupportedModel
from ctxwin.fidelity import Fidelity
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import merge, merged_slots
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import relocate
from ctxwin.store import Store, open_store

HEADER = "You watch a camera."
QUERY = "what color is the square"
KV_TOLERANCE = 2e-6
LOGPROB_TOLERANCE = 1e-5
ALL = Sampling(max_tokens=1, logprobs=-1)


def picture(seed: int, size: int = 84) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def laid(encoded: Sequence[Encoded], start: int = 0, capture: bool = False) -> list[Segment]:
    """Segments one behind the other, none with a span."""
    segments = []
    for e in encoded:
        segments.append(Segment(e, start, capture=capture, span_key=e.chunk_id))
        start += e.advance
    return segments


def with_spans(segments: Sequence[Segment], spans: dict[int, SpanKV]) -> list[Segment]:
    return [
        Segment(p.encoded, p.start, spans.get(i), capture=i not in spans, span_key=f"{p.span_key}:{i}")
        for i, p in enumerate(segments)
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest element."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def assert_same_kv(got: SpanKV, want: SpanKV, tolerance: float = KV_TOLERANCE) -> None:
    assert got.start == want.start
    assert torch.equal(got.positions, want.positions)
    assert difference(got.k, want.k) <= tolerance
    assert difference(got.v, want.v) <= tolerance


def assert_same_answer(got: Generation, want: Generation) -> None:
    assert got.token_ids == want.token_ids
    assert got.logprobs.keys() == want.logprobs.keys()
    assert max(abs(got.logprobs[i] - want.logprobs[i]) for i in want.logprobs) <= LOGPROB_TOLERANCE


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) over the whole vocabulary, from log-probabilities by id."""
    ids = sorted(p)
    log_p, log_q = (torch.tensor([x[i] for i in ids], dtype=torch.float64) for x in (p, q))
    return float((log_p.exp() * (log_p - log_q)).sum())


class EngineConformance:
    """Subclasses set `vision` (and `picture_tokens`), give a class-scoped fixture ``model_dir`` and `make_engine`."""

    vision = True
    fidelity = Fidelity("patched")
    picture_tokens = (9, 4)  # of the 84 px and the 56 px picture
    words = ("one ", " two ")  # in front of two pictures of a message
    gridded = True  # four patches of a picture's grid are a token
    roles_alike = True  # an answer begins behind the same header as earlier ones
    opening = 5  # tokens that open a user turn behind any other: end of turn, newline, start of turn, user, newline
    closing = 0  # tokens that have to stand behind a picture where it is cut

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model_dir: Path) -> Iterator[Engine]:
        made = cls.make_engine(model_dir, open_store("memory:"))
        yield made
        made.close()

    @classmethod
    def chunks(cls) -> list[Chunk]:
        if cls.vision:
            return [
                Chunk.image(picture(1), text="frame 1"),
                Chunk.image(picture(2, 56), text="frame 2"),
                Chunk.text("the camera is blue now"),
            ]
        return [Chunk.text(f"frame {i}: the {c} is {c} {c}\n") for i, c in enumerate(("circle", "square", "shape"))]

    @pytest.fixture(scope="class")
    @classmethod
    def encoded(cls, engine: Engine) -> list[Encoded]:
        """Header and chunks."""
        return [engine.encode_system_prompt(HEADER), *(engine.encode(c) for c in cls.chunks())]

    @pytest.fixture(scope="class")
    @classmethod
    def query(cls, engine: Engine) -> Encoded:
        return engine.encode_query(QUERY)

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, engine: Engine, encoded: list[Encoded], query: Encoded) -> Generation:
        """Everything computed by one call; its KV captured."""
        return engine.generate(laid(encoded, capture=True), query, Sampling(max_tokens=5, logprobs=-1))

    # encoding

    def test_encoding_is_by_content(self, engine: Engine) -> None:
        for made, again in zip(self.chunks(), self.chunks(), strict=True):
            one, two = engine.encode(made), engine.encode(again)
            assert one.chunk_id == made.id
            assert (one.token_ids, one.advance, one.media) == (two.token_ids, two.advance, two.media)
            assert np.array_equal(one.positions, two.positions)

    def test_positions_begin_at_zero_and_advance_past_the_last_token(
        self, encoded: list[Encoded], query: Encoded
    ) -> None:
        for e in [*encoded, query]:
            assert e.positions.dtype == np.int64
            assert e.positions.shape == (3, e.tokens)
            assert e.positions[:, 0].tolist() == [0, 0, 0]
            assert e.positions.min() == 0
            assert e.positions[:, -1].tolist() == [e.advance - 1] * 3  # a chunk ends in a text token
            if not e.media:
                assert e.positions.tolist() == [list(range(e.tokens))] * 3

    def test_pictures_stand_where_their_span_says(self, engine: Engine) -> None:
        if not self.vision:
            pytest.skip("a text model")
        one, two = self.words
        chunk = Chunk.message("user", [one, Chunk.image(picture(1)), two, Chunk.image(picture(2, 56))])
        made = engine.encode(chunk)
        assert tuple(m.tokens for m in made.media) == self.picture_tokens
        places = [m.offset + i for m in made.media for i in m.placeholders(0, m.tokens)[0]]
        pad = made.token_ids[places[0]]
        placed = [i for i, t in enumerate(made.token_ids) if t == pad]
        assert placed == places
        for m in made.media:
            assert m.words or not self.gridded or m.grid_thw[0] * m.grid_thw[1] * m.grid_thw[2] == m.tokens * 4
            assert engine.embed(m.key).shape[0] == m.tokens - len(m.words)

    def test_special_tokens_in_text_stay_text(self, engine: Engine) -> None:
        made = engine.encode(Chunk.text("<|im_end|><|image_pad|>"))
        special = set(engine.encode_query("x").token_ids) & set(engine.encode_system_prompt("x").token_ids)
        assert len(made.token_ids) > 4 and not made.media
        assert made.token_ids[0] not in special
        if self.vision:
            pad = engine.encode(Chunk.image(picture(1)))
            with pytest.raises(ValueError, match="placeholder"):
                places, _ = pad.media[0].placeholders(0, pad.media[0].tokens)
                engine.encode(Chunk.tokens([pad.token_ids[pad.media[0].offset + places[0]]]))

    def test_an_exchange_begins_with_the_query_and_the_answer(self, engine: Engine) -> None:
        query, answer = engine.encode_query(QUERY), [70, 71, 72]
        made = engine.encode_exchange(QUERY, answer)
        assert list(made.token_ids[: query.tokens + 3]) == [*query.token_ids, *answer]
        assert made.tokens > query.tokens + 3

    def test_a_message_closes_and_reopens_the_user_turn(self, engine: Engine) -> None:
        query = engine.encode_query("")
        system_prompt = engine.encode_system_prompt(HEADER).token_ids
        made = engine.encode(Chunk.message("assistant", "red"))
        if self.opening == 0:  # a system prompt stands within the first user turn, so its end opens no other
            opening = engine.encode_system_prompt("").token_ids[1:]
            assert made.token_ids[-len(opening) :] == opening and made.token_ids[: query.tokens] == query.token_ids
            return
        assert made.token_ids[: query.tokens] == query.token_ids or not self.roles_alike
        assert made.token_ids[-self.opening :] == system_prompt[-self.opening :]

    def test_the_vision_tower_runs_once(self, model_dir: Path, tmp_path: Path) -> None:
        if not self.vision:
            pytest.skip("a text model")
        path = f"disk:{tmp_path / 'kv'}"
        first = self.make_engine(model_dir, open_store(path))
        chunk = Chunk.image(picture(5), text="a")
        made = first.encode(chunk)
        first.encode(chunk)
        first.encode(Chunk.image(picture(5), text="the same picture under another label"))
        assert first.counters.vision_encodes == 1
        assert set(first.store.list()) == first.media_keys(chunk), "all that encoding leaves can be named"
        kv = first.prefill([], made, 0)
        assert first.counters.vision_encodes == 1
        first.close()
        first.store.close()

        second = self.make_engine(model_dir, open_store(path))
        gone = chunk.light()
        assert gone.pixels(gone.media[0]) is None
        again = second.encode(gone)
        assert (again.token_ids, again.media) == (made.token_ids, made.media)
        assert_same_kv(second.prefill([], again, 0), kv)
        assert second.counters.vision_encodes == 0
        with pytest.raises(ChunkUnavailable):
            second.encode(Chunk.image(picture(6)).light())
        second.close()
        second.store.close()

    def test_a_text_model_refuses_pictures(self, engine: Engine) -> None:
        if self.vision:
            pytest.skip("a vision model")
        with pytest.raises(UnsupportedModel, match="see image"):
            engine.encode(Chunk.image(picture(1)))

    # KV

    def test_prefill_in_context_is_a_slice_of_the_whole(
        self, engine: Engine, encoded: list[Encoded], whole: Generation
    ) -> None:
        segments = laid(encoded)
        assert sorted(whole.captured) == list(range(len(segments)))
        for i, segment in enumerate(segments):
            computed = engine.prefill(segments[:i], segment.encoded, segment.start)
            loaded = engine.prefill(with_spans(segments[:i], whole.captured), segment.encoded, segment.start)
            assert computed.start == segment.start
            assert_same_kv(computed, whole.captured[i])
            assert_same_kv(loaded, whole.captured[i])

    def test_a_moved_canonical_is_what_is_computed_there(self, engine: Engine, encoded: list[Encoded]) -> None:
        """The rotation itself (layer 0) is exact at any distance. Deeper layers also carry what the model's own float32
        angles lose as positions grow (3e-5 rad at 300), so the whole is compared at 100. A chunk that reaches beyond 127
        there has angles twice as coarse: LLaVA-NeXT's pictures differ by 2.9e-6, and by 0.9e-6 where they end below."""
        for e in encoded[1:]:
            stored = engine.prefill([], e, 11)
            moved = relocate(stored, engine.spec.kv, 100)
            coarser = np.spacing(np.float32(99 + e.advance)) / np.spacing(np.float32(100))
            assert_same_kv(moved, engine.prefill([], e, 100), KV_TOLERANCE * coarser)
            assert torch.equal(moved.v, stored.v)
            assert not torch.equal(moved.k, stored.k)
            far = engine.prefill([], e, 900)
            assert difference(relocate(stored, engine.spec.kv, 900).k[0], far.k[0]) <= 5e-7

    def test_loaded_kv_answers_as_computed_kv_does(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        for cached in itertools.product((True, False), repeat=len(encoded) - 1):
            spans = {i: whole.captured[i] for i, c in enumerate((True, *cached)) if c}
            segments = with_spans(laid(encoded), spans)
            got = engine.generate(segments, query, Sampling(max_tokens=5, logprobs=-1))
            assert_same_answer(got, whole)
            missing = sum(e.tokens for i, e in enumerate(encoded) if i not in spans)
            assert got.computed_tokens + got.cached_tokens >= query.tokens + missing
            assert got.computed_tokens <= query.tokens + missing
            assert sorted(got.captured) == [i for i in range(len(encoded)) if i not in spans]
            for i, span in got.captured.items():
                assert_same_kv(span, whole.captured[i])
        assert got.fallbacks == 0

    def test_recomputed_tokens_are_what_a_forward_gives(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        """Over exact spans whatever is computed again comes out the same, in whichever ranges."""
        for k in (0, 3):
            spans = with_spans(laid(encoded), whole.captured)
            linked = [
                replace(s, capture=True, recompute=partial_ranges(s.encoded.media_ranges, k, s.tokens))
                for s in spans[1:]
            ]
            got = engine.generate([spans[0], *linked], query, Sampling(max_tokens=5, logprobs=-1), salt=f"linked {k}")
            assert_same_answer(got, whole)
            again = sum(end - begin for s in linked for begin, end in s.recompute)
            assert again < sum(e.tokens for e in encoded[1:]) or not any(e.media_ranges for e in encoded)
            # Only where a picture must not be cut does vLLM go on to the end of a row.
            assert 0 <= got.computed_tokens - query.tokens - again <= 3 * self.closing and not got.fallbacks
            assert sorted(got.captured) == [i for i, s in enumerate(linked, 1) if s.recompute]
            for i, span in got.captured.items():
                assert_same_kv(span, whole.captured[i])

    def test_gaps_are_computed_at_once_each_behind_what_is_stored(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        """The oracle is a forward for each gap behind stored KV; what touches a new chunk or the question sees what is served."""
        segments = with_spans(laid([*encoded, encoded[1], encoded[1]]), {0: whole.captured[0]})
        header, new = segments[0], len(encoded)
        for i in (*range(1, new), new + 1):
            each, ranges = segments[i].encoded, [(0, 1), (2, 3)]
            alone = engine.prefill([header], each, header.encoded.advance)
            ranges += [(each.tokens - 1, each.tokens)] * (i >= new - 1)  # touches the new chunk, or the question
            uncut = [m for m in each.media if m.whole]
            ranges = [r for r in ranges if not any(m.offset < at < m.offset + m.tokens for m in uncut for at in r)]
            segments[i] = replace(segments[i], span=alone, approximate=True, capture=True, recompute=tuple(ranges))
        got = engine.generate(segments, query, ALL, salt="at once")
        assert sorted(got.captured) == list(range(1, len(segments))) and not got.fallbacks
        if not self.closing:
            assert got.forwards == 4, "gaps, the new chunk with those that touch it, gaps behind it, the question"
        flat = [(i, part) for i, segment in enumerate(segments) for part in segment.parts()]
        served, at = [], 0
        for n, (i, part) in enumerate(flat):
            at = 0 if n and flat[n - 1][0] < i else at
            served.append(got.captured[i].slice(at, at + part.tokens) if i else part.span)
            at += part.tokens
        at = next(n for n, (i, _) in enumerate(flat) if i == new)
        in_row = [
            n for n in (at - 1, at, at + 1) if flat[n][1].span is None
        ]  # the new chunk, and the gaps that touch it
        for n, (_, part) in enumerate(flat):
            if part.span is not None:
                assert_same_kv(served[n], relocate(part.span, engine.spec.kv, part.start))
                continue
            settled = len(flat) if n in in_row or n + 1 == len(flat) else max(in_row) + 1 if n > max(in_row) else 0
            front = [
                replace(other, span=served[m] if m < settled or not other.gap else other.canonical, capture=False)
                for m, (_, other) in enumerate(flat[:n])
            ]
            want = engine.prefill(front, part.encoded, part.start, salt=f"oracle {n}")
            assert_same_kv(served[n], want, 3 * KV_TOLERANCE)
        loaded = [replace(s, span=got.captured.get(i, s.span), recompute=()) for i, s in enumerate(segments)]
        again = engine.generate(loaded, query, ALL, salt="served")
        assert max(abs(got.logprobs[i] - again.logprobs[i]) for i in got.logprobs) <= LOGPROB_TOLERANCE

    def test_merged_segments_take_fewer_slots(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        """Merged to all of their slots they are what they were; to fewer, what is behind stands where it stood."""
        spans = with_spans(laid(encoded), whole.captured)
        try:
            attended = engine.attended(spans[:1], encoded[1], spans[1].start)
        except UnsupportedModel as error:
            assert "sliding layers" in str(error) or (engine.spec.name == "vllm" and "transformers" in str(error))
            sums = torch.rand(engine.spec.kv.layers, encoded[1].tokens)
        else:
            assert_same_kv(attended.span, whole.captured[1])
            sums = attended.sums
            assert tuple(sums.shape) == (engine.spec.kv.layers, encoded[1].tokens)
            assert bool(((sums.sum(1) > 0) & (sums.sum(1) <= encoded[1].tokens)).all())
        last = len(encoded) - 1
        for share, same in ((1.0, True), (0.4, False)):
            layout = list(spans)
            for i in (1, last):
                count = merged_slots(share, encoded[i].tokens)
                span = merge(
                    whole.captured[i],
                    sums[:, : encoded[i].tokens] if i == 1 else torch.rand(sums.shape[0], encoded[i].tokens),
                    count,
                )
                layout[i] = replace(layout[i], span=span, merged=True, approximate=True, span_key=f"merged-{share}-{i}")
            layout[2] = replace(layout[2], span=None, capture=True, span_key="")
            got = engine.generate(layout, query, ALL, salt=f"merged {share}", capture_query=True)
            assert got.computed_tokens == encoded[2].tokens + query.tokens and not got.fallbacks
            assert got.captured[2].start == spans[2].start
            behind = engine.prefill(
                layout, query, spans[last].start + encoded[last].advance, salt=f"merged query {share}"
            )
            assert got.query_span is not None
            assert_same_kv(relocate(got.query_span.slice(0, query.tokens), engine.spec.kv, behind.start), behind)
            if same:
                assert_same_answer(
                    replace(got, token_ids=got.token_ids[:1]), replace(whole, token_ids=whole.token_ids[:1])
                )
                assert_same_kv(got.captured[2], whole.captured[2])
            else:
                assert got.logprobs != whole.logprobs
                # What is loaded again answers the same, found in a cache or not.
                layout[2] = replace(layout[2], span=got.captured[2], capture=False, span_key="behind", approximate=True)
                again = engine.generate(layout, query, ALL, salt=f"merged {share} again")
                assert max(abs(got.logprobs[i] - again.logprobs[i]) for i in got.logprobs) <= LOGPROB_TOLERANCE
                (row,) = engine.forced_logprobs(layout, [(query, got.token_ids[:1])])
                assert row[0][got.token_ids[0]] == pytest.approx(got.logprobs[got.token_ids[0]], abs=1e-4)

    def test_a_canonical_that_is_recomputed_whole_is_computed_in_place(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        segments = with_spans(laid(encoded), whole.captured)
        last = segments[-1]
        alone = engine.prefill(segments[:1], last.encoded, encoded[0].advance)
        for ranges, same in ((((0, last.tokens),), True), (((0, 1), (2, 3)), False)):
            linked = replace(last, span=alone, approximate=True, capture=True, recompute=ranges)
            got = engine.generate([*segments[:-1], linked], query, ALL, salt=f"whole {same}")
            made = got.captured[len(encoded) - 1]
            assert (difference(made.v, whole.captured[len(encoded) - 1].v) <= KV_TOLERANCE) == same
            if not same:  # what is not in the ranges is the canonical, moved
                assert_same_kv(
                    made.slice(3, last.tokens), relocate(alone, engine.spec.kv, last.start).slice(3, last.tokens)
                )
        for wrong in (((2, 1),), ((0, last.tokens + 1),)):
            with pytest.raises(ValueError, match="recompute must be ascending ranges"):
                engine.generate([*segments[:-1], replace(linked, recompute=wrong)], query, ALL, salt="wrong")

    def test_only_the_query_is_computed_behind_loaded_kv(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        got = engine.generate(with_spans(laid(encoded), whole.captured), query, ALL, salt="loaded")
        assert got.computed_tokens <= query.tokens
        assert got.bytes_loaded == sum(span.nbytes for span in whole.captured.values())

    def test_a_full_rank_patch_formed_at_one_place_serves_at_another(
        self, engine: Engine, encoded: list[Encoded], query: Encoded
    ) -> None:
        spec, system_prompt, seen, target = engine.spec.kv, *encoded[:3]
        front = laid([system_prompt])
        base = engine.prefill(front, target, system_prompt.advance)
        here = laid([system_prompt, seen, target])
        conditioned = engine.prefill(here[:2], target, here[2].start)
        patch = form_patch(conditioned, base, spec, rank=None, dtype=torch.float32)
        there = laid([system_prompt, seen, target], start=50)
        reference = engine.generate(there, query, ALL)
        arms = {}
        for name, span in (
            ("patched", apply_patch(base, patch, spec, there[2].start)),
            ("blind", relocate(base, spec, there[2].start)),
        ):
            segments = [*there[:2], Segment(target, there[2].start, span, span_key=name)]
            arms[name] = kl(reference.logprobs, engine.generate(segments, query, ALL, salt=name).logprobs)
        assert arms["patched"] <= 1e-6
        assert arms["blind"] > 1e-4  # or the patch would have had nothing to restore

    def test_the_captured_query_is_the_exchange(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        segments = laid(encoded)
        got = engine.generate(segments, query, Sampling(max_tokens=4), capture_query=True)
        start = segments[-1].start + segments[-1].encoded.advance
        exchange = engine.encode_exchange(QUERY, got.token_ids)
        want = engine.prefill(segments, exchange, start)
        assert got.query_span is not None
        fed = got.query_span.tokens
        assert query.tokens < fed <= query.tokens + len(got.token_ids)
        assert_same_kv(got.query_span, want.slice(0, fed), 1e-5)

    # scoring a given answer

    def test_forced_logprobs(self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation) -> None:
        """Computed in place and loaded, along the engine's own answer: every row is what decoding saw."""
        ids = whole.token_ids
        again = engine.generate(laid(encoded), query, Sampling(max_tokens=5, token_logprobs=8)).token_ids
        before = engine.counters.prefill_tokens
        layouts = [laid(encoded), with_spans(laid(encoded), whole.captured)]
        for layout in (*layouts, layouts[0]):
            tally = PrefillCost()
            rows, bare = engine.forced_logprobs(layout, [(query, ids), (query, [])], best=8, tally=tally)
            assert (len(rows), len(bare)) == (len(ids) + 1, 1)
            for row, token in zip(rows, again, strict=False):
                assert isinstance(token, ScoredToken)
                assert list(token.best) == sorted(row, key=lambda i: -row[i])[:8]
                assert all(abs(row[i] - token.best[i]) <= 1e-4 for i in token.best)
                assert row[int(token)] == pytest.approx(token.logprob, abs=1e-4)
            assert bare[0] == pytest.approx(rows[0], abs=1e-4)
            missing = sum(p.tokens for p in layout if p.span is None)
            # Up to a block is computed again in front of each question, or found where the first left it.
            block = 1 if engine.spec.name == "hf" else 32
            # vLLM's MLA on CPUs has no prefix cache.
            times = 3 if (engine.spec.name, engine.spec.kv.family) == ("vllm", "mla") else 1
            assert missing + len(ids) < tally.tokens <= times * missing + 2 * query.tokens + len(ids) + 2 * block
        assert engine.counters.prefill_tokens > before
        other = [(ids[0] + 1) % 100, *ids[1:]]
        (changed,) = engine.forced_logprobs(layouts[1], [(query, other)], best=8)
        assert other[0] in changed[0]
        assert changed[1] != pytest.approx(rows[1], abs=1e-3)  # what stands in front of it is forced, too

    def test_forced_logprobs_see_what_is_served(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        """Over KV that no forward here would give, the rows are those of that KV."""
        alone = engine.prefill([], encoded[2], 0)
        layout = laid(encoded)
        layout[2] = replace(layout[2], span=relocate(alone, engine.spec.kv, layout[2].start), approximate=True)
        got = engine.generate(layout, query, Sampling(max_tokens=1, logprobs=8), salt="forced")
        (rows,) = engine.forced_logprobs(layout, [(query, [])], best=8)
        assert rows[0] == pytest.approx(got.logprobs, abs=1e-4)
        (exact,) = engine.forced_logprobs(laid(encoded), [(query, [])], best=8)
        assert exact[0] != pytest.approx(got.logprobs, abs=1e-4)
