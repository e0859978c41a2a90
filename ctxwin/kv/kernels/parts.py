"""What a load is made of: the parts that stand one behind the other, and the checks that every kernel relies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch


@dataclass(frozen=True)
class Part:
    """Tokens ``[begin, end)`` of one stored span and the place its origin goes to.

    Attributes:
        span: KV in any frame, usually the canonical one (``start == 0``).
        start: position of the span's origin where it is served (>= 0); the same whatever ``begin`` is.
        patch: factors to add in the canonical frame; formed on the whole span.
        begin, end: the tokens to serve, counted within the span; ``end=None`` is the span's end. A prefix hit may cut a
            span anywhere.
    """

    span: SpanKV
    start: int
    patch: Patch | None = None
    begin: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """``end`` as a number."""
        return self.span.tokens if self.end is None else self.end

    @property
    def tokens(self) -> int:
        """Tokens that are served."""
        return self.stop - self.begin

    def validate(self, spec: KVSpec) -> None:
        """Raises ValueError where it does not fit ``spec``; O(1)."""
        self.span.validate(spec)
        if self.start < 0:
            raise ValueError(f"start must be >= 0, got {self.start}")
        if not 0 <= self.begin < self.stop <= self.span.tokens:
            raise ValueError(
                f"begin and end must cut at least one token out of {self.span.tokens}, got [{self.begin}, {self.stop})"
            )
        if self.patch is not None:
            self.patch.check_fits(self.span, spec)


def check_parts(parts: Sequence[Part], spec: KVSpec) -> tuple[Part, ...]:
    """The parts as a tuple; ValueError where there are none or one does not fit ``spec``."""
    if not parts:
        raise ValueError("parts must hold at least one part, got none")
    for part in parts:
        part.validate(spec)
    return tuple(parts)


def head_range(heads: slice | None, count: int) -> tuple[int, int]:
    """First and last-plus-one of the KV heads that ``heads`` selects out of ``count``.

    Raises ValueError for a step or where no head is selected.
    """
    if heads is None:
        return 0, count
    first, stop, step = heads.indices(count)
    if step != 1 or first >= stop:
        raise ValueError(f"heads must be a slice of at least one of {count} KV heads without a step, got {heads}")
    return first, stop


def compute_dtype(parts: Sequence[Part]) -> torch.dtype:
    """float32, as the engines compute; float64 where a span is."""
    return torch.float64 if any(part.span.k.dtype == torch.float64 for part in parts) else torch.float32
