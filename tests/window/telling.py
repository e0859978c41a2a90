"""An engine whose KV tells what it absorbed, over a store that loses and damages what it holds.

Every row of KV that a forward computes is entered in a book: with the whole prompt up to it, where each row in front was
what a forward gives there, else with None. A value row is found again by its bits (relocation leaves values alone), so
whether KV is exact is read off the book, without a tolerance and without any code of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ctxwin.engines.results import Generation, PrefillCost
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import ChunkUnavailable
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import apply_patch
from ctxwin.store.base import Store
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from store.wrappers import WrapperStore
from window.fake import DIM, KV, LAYERS, FakeEngine, own_rows

Prompt = tuple[int, ...]


class Unreliable(WrapperStore):
    """Loses, damages and refuses KV, as often as it is told to."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: list[str] = []  # what becomes of the next reads of KV: "", "lose" or "damage"
        self.refusals = 0  # so many puts from now on

    def get(self, key: str) -> bytes | None:
        blob = super().get(key)
        fate = self.reads.pop(0) if self.reads and key.startswith(("span/", "patch/", "orbit/")) else ""
        if fate == "lose":
            super().delete(key)
            return None
        return blob[:-8] if blob and fate == "damage" else blob  # a store that checks its bytes cuts at worst

    def put(self, key: str, value: bytes) -> bool:
        if self.refusals and key.startswith(("span/", "patch/", "orbit/")):
            self.refusals -= 1
            return False
        return super().put(key, value)


class TellingEngine(FakeEngine):
    """See the module.

    Attributes:
        served: of the last answer, by chunk: whether what it was served with is what a forward over the prompt gives.
        failures: how many of the next calls fail to load their spans and compute the prompt instead.
    """

    def __init__(self) -> None:
        self.unreliable = Unreliable(MemoryStore())
        super().__init__(self.unreliable)
        self.repo = SpanRepository(self.store, self.spec.identity, max_live_bytes=0)  # every use is a read
        self.book: dict[bytes, Prompt | None] = {}
        self.served: list[bool] = []
        self.failures = 0

    def prompt_of(self, spans: Sequence[SpanKV]) -> Prompt | None:
        """The prompt that ``spans`` one behind the other are a forward over; None where they are not of one forward."""
        rows = [row for span in spans for row in self._bytes_of(span)]
        prompt = self.book.get(rows[-1]) if rows else ()
        fits = prompt is not None and len(prompt) == len(rows)
        return prompt if fits and all(self.book.get(r) == prompt[: i + 1] for i, r in enumerate(rows)) else None

    def told(self, span: SpanKV) -> Prompt | None:
        """The prompt that a forward computed ``span`` at the end of; None where it is nothing that one forward gives."""
        prompts = [self.book.get(row) for row in self._bytes_of(span)]
        last = prompts[-1]
        return (
            last if last and all(p == last[: len(last) - span.tokens + i + 1] for i, p in enumerate(prompts)) else None
        )

    def _bytes_of(self, span: SpanKV) -> list[bytes]:
        values = span.v.double()
        return [values[:, i].contiguous().numpy().tobytes() for i in range(span.tokens)]

    def _rows(self, front: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
        """Rows in another order give something else: a mean would give two prompts the same KV now and then."""
        begin = front.shape[2]
        context = np.empty((2, LAYERS, begin + len(token_ids), DIM))
        context[:, :, :begin] = front
        for i, token in enumerate(token_ids, begin):
            weights = 1 + 1 / np.arange(i, 0, -1)
            seen = 3 * np.add.reduce(context[:, :, :i] * weights[:, None], 2) / i if i else 0.0
            context[:, :, i] = np.tanh(own_rows(token) + seen)
        return context[:, :, begin:]

    def _forward(self, front: list[SpanKV], encoded: Encoded, start: int) -> SpanKV:
        made = super()._forward(front, encoded, start)
        prompt = self.prompt_of(front)
        for i, row in enumerate(self._bytes_of(made)):
            true = None if prompt is None else (*prompt, *encoded.token_ids[: i + 1])
            assert self.book.setdefault(row, true) == true, "two prompts gave the same KV"
        return made

    def _run(self, segments: Sequence[Segment]) -> tuple[list[SpanKV], dict[int, SpanKV], int, int]:
        for segment in segments:
            for media in segment.encoded.media:
                if segment.span is None and not self.repo.contains(media.key):
                    raise ChunkUnavailable(f"the embeddings {media.key} are gone")
        spans = [
            apply_patch(s.span, s.patch, KV, s.start) if s.span is not None and s.patch is not None else s.span
            for s in segments
        ]
        return super()._run([replace(s, span=span) for s, span in zip(segments, spans, strict=True)])

    def _loaded(self, segments: Sequence[Segment]) -> tuple[list[Segment], int]:
        """The segments, bare where their load fails, and how many loads failed."""
        if not self.failures or all(segment.span is None for segment in segments):
            return list(segments), 0
        self.failures -= 1
        return [replace(s, span=None, patch=None, approximate=False, recompute=(), merged=False) for s in segments], 1

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: PrefillCost | None = None,
    ) -> SpanKV:
        context, failed = self._loaded(context)
        made = super().prefill(context, target, start, salt=salt, background=background, tally=tally)
        if tally is not None:
            tally.fallbacks += failed
        return made

    def generate(self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, **options: Any) -> Generation:
        layout, failed = self._loaded(layout)
        made = super().generate(layout, query, sampling, **options)
        spans = self._run(layout)[0]
        want = [self.prompt_of(spans[: i + 1]) for i in range(len(spans))]
        tokens = [t for segment in layout for t in segment.encoded.token_ids]
        ends = [sum(s.tokens for s in layout[: i + 1]) for i in range(len(layout))]
        first = [self.told(span) == tuple(tokens[:end]) for span, end in zip(spans, ends, strict=True)]
        assert all(one or other is None for one, other in zip(first, want, strict=True))
        self.served = first[1:]
        return replace(made, fallbacks=failed)
