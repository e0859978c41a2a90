"""Items of one shape with everything the arms share: embeddings, exact spans, canonicals, deficits, patches.

Every forward is run once for the whole group, when the first arm asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from ctxwin.evals.patching import Patcher
from ctxwin.evals.reader import Picture, Reader
from ctxwin.evals.tasks import Case
from ctxwin.kv import KVSpec, SpanKV
from ctxwin.operator import Deficit, Patch, apply_patch, deficit, relocate

Pictures = Callable[[Case], Sequence[Picture]]


class Group:
    """A batch of cases of one shape.

    Args:
        reader: the model.
        cases: all of one `Case.shape`.
        patcher: how deficits are compressed.
        pictures: renders the frames of a case.

    ``b`` below is the index of a case, ``place`` the position of a chunk among the placed ones.
    """

    def __init__(self, reader: Reader, cases: Sequence[Case], patcher: Patcher, pictures: Pictures) -> None:
        if len({c.shape for c in cases}) != 1:
            raise ValueError(f"cases of a group must have one shape, got {sorted({c.shape for c in cases})}")
        self.reader = reader
        self.cases = tuple(cases)
        self.patcher = patcher
        self._pictures = pictures
        self._deficits: dict[tuple[int, int, str], Deficit] = {}
        self._patches: dict[object, Patch] = {}
        self._orders: dict[tuple[int, tuple[int, ...]], SpanKV] = {}

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def spec(self) -> KVSpec:
        return self.reader.spec

    @cached_property
    def embeds(self) -> torch.Tensor:
        """``[B, frames, T, hidden]``: every frame of every case, seen once."""
        seen = self.reader.see([p for case in self.cases for p in self._pictures(case)])
        return seen.view(len(self), -1, *seen.shape[1:])

    @cached_property
    def exact(self) -> list[list[SpanKV]]:
        """Re-prefill of what is placed: spans by case and place, rotated in place. One forward."""
        return self.reader.run(self.picked([c.placed for c in self.cases]))

    @cached_property
    def earlier(self) -> list[list[SpanKV]]:
        """Spans as they were conditioned before the edit (slide, recall), rotated where they were then. One forward."""
        return self.reader.run(self.picked([c.before for c in self.cases]))

    @cached_property
    def canonical(self) -> list[list[SpanKV]]:
        """Canonicals of the placed chunks, formed behind the header alone, in the canonical frame. One forward."""
        count, places = len(self), len(self.cases[0].placed)
        flat = self.picked([c.placed for c in self.cases]).flatten(0, 1)
        alone = [row[0] for row in self.reader.run(flat[:, None])]
        spans = [relocate(span, self.spec, 0) for span in alone]
        return [spans[b * places : (b + 1) * places] for b in range(count)]

    @cached_property
    def blind(self) -> list[list[SpanKV]]:
        """Canonicals rotated into place."""
        return [
            [relocate(span, self.spec, self.reader.start(i)) for i, span in enumerate(row)] for row in self.canonical
        ]

    @cached_property
    def kept(self) -> list[list[SpanKV]]:
        """Placed chunks with the KV they had before the edit, rotated into place: survivors."""
        rows = []
        for case, spans in zip(self.cases, self.earlier, strict=True):
            by_frame = dict(zip(case.before, spans, strict=True))
            rows.append([relocate(by_frame[f], self.spec, self.reader.start(i)) for i, f in enumerate(case.placed)])
        return rows

    def behind(self, wanted: Sequence[tuple[int, tuple[int, ...]]]) -> list[SpanKV]:
        """The last frame of each wanted order, conditioned on the others in that order.

        Args:
            wanted: (case, frames in order). Orders of one length share a forward; each is computed once.
        """
        missing = [w for w in dict.fromkeys(wanted) if w not in self._orders]
        for length in sorted({len(order) for _, order in missing}):
            some = [w for w in missing if len(w[1]) == length]
            for at in range(0, len(some), 32):
                part = some[at : at + 32]
                embeds = torch.stack([self.embeds[b, list(order)] for b, order in part])
                for w, row in zip(part, self.reader.run(embeds), strict=True):
                    self._orders[w] = row[-1]
        return [self._orders[w] for w in wanted]

    def deficit(self, b: int, place: int, *, against: str = "canonical") -> Deficit:
        """What the exact span has over the canonical, or over the survivor (``against="kept"``)."""
        key = (b, place, against)
        if key not in self._deficits:
            base = self.canonical if against == "canonical" else self.kept
            self._deficits[key] = deficit(self.exact[b][place], base[b][place], self.spec)
        return self._deficits[key]

    def patch(self, b: int, place: int, rank: int | None) -> Patch:
        """The patch on the canonical, formed behind exactly what is in front of it."""
        return self.patcher.patch(self.deficit(b, place), rank, self._patches, ("canonical", b, place))

    def removal(self, b: int, place: int, rank: int | None) -> Patch:
        """The patch on the survivor that takes out what left the window."""
        lost = self.deficit(b, place, against="kept")
        return self.patcher.patch(lost, rank, self._patches, ("kept", b, place))

    def compressed(self, lost: Deficit, rank: int | None, key: object) -> Patch:
        """The patch of a deficit of an arm's own; ``key`` tells it from others of this group."""
        return self.patcher.patch(lost, rank, self._patches, key)

    def patched(self, base: SpanKV, patch: Patch, place: int) -> SpanKV:
        """``base`` reconditioned and rotated to ``place``."""
        return apply_patch(base, patch, self.spec, self.reader.start(place))

    def kv_bytes(self, chunks: int = 1) -> int:
        """Bytes of the KV of ``chunks`` chunks in bf16."""
        return chunks * self.spec.span_bytes(self.reader.frame.tokens)

    def picked(self, frames: Sequence[Sequence[int]]) -> torch.Tensor:
        """Embeddings ``[B, n, T, hidden]`` of the named frames of each case."""
        return torch.stack([self.embeds[b, list(row)] for b, row in enumerate(frames)])
