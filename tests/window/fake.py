"""A tiny exact engine in float64 for tests of the window: its KV is a causal function of everything in front.

Each token's "KV" is ``tanh(own + mean of everything in front)``, its key additionally rotated by position. Re-prefilling a
layout and re-using spans can therefore be told apart to the last bit, and an answer names the KV it was read from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import torch

from ctxwin.chunk import Chunk, MediaPart, TextPart, TokensPart
from ctxwin.engines.base import Engine, EngineSpec
from ctxwin.engines.results import AttendedKV, EngineCounters, Generation, PrefillCost
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, MediaSpan, Segment, gap_runs
from ctxwin.errors import AnswerStopped, ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rope import angles, turn
from ctxwin.media import unpack_frames
from ctxwin.store import open_store
from ctxwin.store.base import Store
from ctxwin.store.spans import SpanRepository
from ctxwin.window.answer import PlanEntry
from ctxwin.window.assembly import Assembly
from ctxwin.window.continuation import Continuation
from ctxwin.window.layout import Work
from ctxwin.window.window import Window

LAYERS, DIM = 2, 4
_SCALES = 1e4 * (np.arange(50) + 1.3)
KV = KVSpec(
    identity="fake", family="gqa", layers=LAYERS, heads=1, k_dim=DIM, v_dim=DIM,
    rope=RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=DIM), dtype="float32",
)  # fmt: skip
FIDELITIES = [
    Fidelity("exact"),
    Fidelity("blind"),
    Fidelity("patched", rank=2),
    Fidelity("patched", rank=2, survivors="removal"),
    Fidelity("patched", rank=2, survivors="refresh"),
    Fidelity("patched", rank=2, orbit=True),
    Fidelity("patched", recompute=1),
    Fidelity("patched", recompute=1, survivors="refresh"),
]
"""One for each way to serve a chunk."""


def _positions(n: int) -> np.ndarray:
    return np.broadcast_to(np.arange(n, dtype=np.int64), (3, n)).copy()


@cache
def own_rows(token: int) -> np.ndarray:
    """What a token brings itself, ``[2, L, D]``."""
    generator = torch.Generator().manual_seed(token + 1)
    return torch.randn(2, LAYERS, DIM, generator=generator, dtype=torch.float64).numpy()


@lru_cache(maxsize=1 << 14)
def _rows_behind(total: bytes, rows: int, token_ids: tuple[int, ...]) -> np.ndarray:
    """Rows ``[2, L, T, D]`` of tokens behind so many others whose rows have this sum: an oracle asks for most of them again."""
    state = np.frombuffer(total).reshape(2, LAYERS, DIM).copy()
    made = np.empty((2, LAYERS, len(token_ids), DIM))
    for i, token in enumerate(token_ids):
        row = np.tanh(own_rows(token) + 3 * (state / (rows + i)) if rows + i else own_rows(token))
        made[:, :, i] = row
        state += row
    made.flags.writeable = False
    return made


def planned_anew(window: Window) -> tuple[list[PlanEntry], list[PlanEntry]]:
    """The entries of a window's plan, and of one that takes over nothing of those before; without prices, which may move."""
    core = window.core
    state, fidelity, goes_on = core.audits.with_fallbacks(core.state), core.fidelity, core.assembly
    apart = Assembly(core.engine, memo=goes_on.memo, missing=goes_on.missing)
    plans = goes_on.plan(state, fidelity), apart.plan(state, fidelity)
    first, second = ([replace(entry, ms=0.0) for entry in plan.entries] for plan in plans)
    return first, second


def laid_out_anew(window: Window) -> tuple[list[object], list[object]]:
    """A window's layout and what it would write back of it, and those of one that takes over nothing of those before."""
    core, both = window.core, []
    state, fidelity = core.audits.with_fallbacks(core.state), core.fidelity
    for newest in (replace(core.assembly.newest), Continuation()):
        assembly = Assembly(core.engine, memo=core.assembly.memo.copy(), newest=newest)
        layout = assembly.build_layout(state, fidelity, Work())
        kv = [(s.span and s.span.k.numpy().tobytes(), s.patch and s.patch.left.tolist()) for s in layout.segments]
        segments = [replace(segment, span=None, patch=None) for segment in layout.segments]
        numbers = layout.contents, layout.counts, layout.salt, layout.tokens, layout.exact
        after = assembly.write_back(state, layout, {}, fidelity)
        both.append([kv, segments, numbers, after, list(assembly.memo.memos.items())])
    return both[0], both[1]


class FakeEngine(Engine):
    """See the module. Vocabulary of 50 tokens; media are one token per frame, derived from the pixels' digest."""

    def check_hold(self, sampling: Sampling) -> None:
        """Whatever is asked: nothing of it changes the answers."""

    def __init__(self, store: Store | None = None, max_tokens: int = 4096, name: str = "fake") -> None:
        self.spec = EngineSpec(name, "fake-model", digest("fake", name), KV, max_tokens, vision=True)
        self.store = store or open_store("memory:")
        self.repo = SpanRepository(self.store, self.spec.identity)
        self.counters = EngineCounters()
        self.delay = 0.0
        self.fail: Exception | None = None
        self._known: dict[int, tuple[SpanKV, np.ndarray]] = {}  # the span as well, so that no other has its id
        self._latest: tuple[list[SpanKV], np.ndarray] = ([], self._rows_of([]))

    def _text(self, text: str) -> list[int]:
        return [100 + b for b in text.encode()]

    def _plain(self, chunk_id: str, ids: Sequence[int], media: tuple[MediaSpan, ...] = ()) -> Encoded:
        return Encoded(chunk_id, tuple(ids), _positions(len(ids)), len(ids), media)

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self._plain(digest("system_prompt", system_prompt), [1, *self._text(system_prompt)])

    def encode(self, chunk: Chunk) -> Encoded:
        ids: list[int] = []
        media: list[MediaSpan] = []
        for part in chunk.parts:
            if isinstance(part, TextPart):
                ids += self._text(part.text)
            elif isinstance(part, TokensPart):
                ids += part.ids
            else:
                key = "embed/" + digest("fake", part.content)
                frames = self._see(chunk, part, key)
                media.append(MediaSpan(part.media, key, len(ids), len(frames), (len(frames), 2, 2)))
                ids += [1000 + int(f) for f in frames]
        return self._plain(chunk.id, ids, tuple(media))

    def media_keys(self, chunk: Chunk) -> set[str]:
        return {"embed/" + digest("fake", part.content) for part in chunk.media}

    def _see(self, chunk: Chunk, part: MediaPart, key: str) -> torch.Tensor:
        held = self.repo.get_embedding(key)
        if held is None:
            pixels = chunk.pixels(part)
            if pixels is None:
                stored = self.repo.get_source(f"source/{part.content}")
                if stored is None:
                    raise ChunkUnavailable(f"media {part.content[:12]} has neither pixels nor a source")
                pixels = unpack_frames(stored)
            self.counters.vision_encodes += 1
            held = torch.tensor([int(f.astype(np.int64).sum()) % 997 for f in pixels], dtype=torch.float32)
            self.repo.put_embedding(key, held)
        return held

    def encode_query(self, query: str) -> Encoded:
        return self._plain(digest("query", query), [*self._text(query), 2, 3])

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        ids = [*self.encode_query(query).token_ids, *answer_ids, 2, 4]
        return self._plain(digest("exchange", ids), ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(t) for t in token_ids)

    def embed(self, key: str) -> torch.Tensor:
        held = self.repo.get_embedding(key)
        if held is None:
            raise ChunkUnavailable(key)
        return held

    def _rows(self, front: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
        """Rows of tokens behind those of ``front``, all ``[2, L, T, D]``."""
        return _rows_behind(np.add.reduce(front, 2).tobytes(), front.shape[2], tuple(token_ids))

    def _rows_of(self, spans: list[SpanKV]) -> np.ndarray:
        rows = [np.zeros((2, LAYERS, 0, DIM)), *map(self._rows_of_one, spans)]
        return np.concatenate(rows, 2)

    def _rows_of_one(self, span: SpanKV) -> np.ndarray:
        """Each is asked for again with every span behind it."""
        known = self._known.get(id(span))
        if known is None:
            if len(self._known) >= 256:
                self._known.clear()
            own = turn(KV.rope, span.k, -angles(KV.rope, span.positions + span.start))
            rows = np.stack([own.numpy(), span.v.numpy()])[:, :, :, 0]
            known = self._known[id(span)] = span, rows
        return known[1]

    def _forward(self, front: list[SpanKV], encoded: Encoded, start: int) -> SpanKV:
        latest = self._latest
        if latest[0] is not front:  # an answer runs a forward for each of its tokens behind the same spans
            latest = self._latest = front, self._rows_of(front)
        rows = self._rows(latest[1], encoded.token_ids)
        k, v, positions = map(torch.from_numpy, (*rows[:, :, :, None].copy(), encoded.positions.copy()))
        return SpanKV(turn(KV.rope, k, angles(KV.rope, positions + start)), v.clone(), positions, start)

    def _run(self, segments: Sequence[Segment]) -> tuple[list[SpanKV], dict[int, SpanKV], int, int]:
        spans: list[SpanKV] = []
        captured: dict[int, SpanKV] = {}
        tokens = loaded = 0
        parts = [(i, part) for i, segment in enumerate(segments) for part in segment.parts()]
        kinds = [part.gap for _, part in parts]
        made: list[SpanKV] = []
        run_of: dict[int, range] = {}
        begin = 0  # of what is computed at once
        for n, (_, part) in enumerate(parts):
            if part.gap and n not in run_of:
                begin, runs = n, gap_runs(kinds, n)
                run_of |= {i: run for run in runs for i in run}
            if part.span is not None:
                made.append(relocate(part.span, KV, part.start))
                loaded += part.span.nbytes
                continue
            front = made[:]
            for m in range(begin, run_of[n].start if n in run_of else begin):
                canonical = parts[m][1].canonical
                front[m] = made[m] if canonical is None else relocate(canonical, KV, parts[m][1].start)
            made.append(self._forward(front, part.encoded, part.start))
            tokens += part.tokens
        for i, segment in enumerate(segments):
            own = [span for (j, _), span in zip(parts, made, strict=True) if j == i]
            k, v = (torch.cat([getattr(span, name) for span in own], 1) for name in "kv")
            spans.append(SpanKV(k, v, torch.from_numpy(segment.places.copy()), segment.start))
            if segment.capture and (segment.span is None or segment.recompute):
                captured[i] = spans[-1]
        return spans, captured, tokens, loaded

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: PrefillCost | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> SpanKV:
        if self.fail:
            raise self.fail
        if stopped is not None and stopped():
            raise AnswerStopped("stopped")
        spans, _, tokens, _ = self._run(context)
        self.counters.prefill_forwards += 1
        self.counters.prefill_tokens += tokens + target.tokens
        if tally is not None:
            tally.forwards += 1
            tally.tokens += tokens + target.tokens
        return self._forward(spans, target, start)

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: PrefillCost | None = None
    ) -> AttendedKV:
        """Tokens count by their id."""
        span = self.prefill(context, target, start, background=True, tally=tally)
        return AttendedKV(span, torch.tensor([target.token_ids] * LAYERS, dtype=torch.float32))

    def generate(
        self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, *, salt: str = "", capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
    ) -> Generation:  # fmt: skip
        if self.fail:
            raise self.fail
        spans, captured, tokens, loaded = self._run(layout)
        start = layout[-1].start + layout[-1].encoded.advance
        asked = self._forward(spans, query, start)
        out: list[int] = []
        logprobs: dict[int, float] = {}
        fed = query
        for _ in range(min(3, sampling.max_tokens)):
            # Very sensitive, so that a wrong antecedent anywhere shows in the answer; float64 leaves room for rounding.
            state = float(sum((i + 1) * x for i, x in enumerate(asked.v[-1, -1, 0].tolist())))
            logits = 3 * np.cos(state * _SCALES)
            token = int(logits.argmax())
            logprobs = logprobs or dict(enumerate((logits - np.log(np.exp(logits).sum())).tolist()))
            out.append(token)
            if self.delay:
                time.sleep(self.delay)
            if on_token and not on_token(token, self.decode(out)):
                break
            ids = (*fed.token_ids, token)
            fed = replace(fed, token_ids=ids, positions=_positions(len(ids)), advance=len(ids))
            asked = self._forward(spans, fed, start)
        n = query.tokens + len(out) - 1
        self.counters.prefill_forwards += 1
        self.counters.prefill_tokens += tokens + query.tokens
        return Generation(
            token_ids=out, text=self.decode(out), logprobs=logprobs if sampling.logprobs else {}, captured=captured,
            query_span=asked.slice(0, n) if capture_query else None, computed_tokens=tokens + query.tokens, forwards=1,
            bytes_loaded=loaded, ttft_s=0.001,
        )  # fmt: skip

    def close(self) -> None:
        self.store.close()
