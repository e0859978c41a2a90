"""Arms that compute some tokens in context and reuse the others as they are: the token axis.

All get the same relocated KV, and what they compute sees everything in front of it (their strongest form).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ctxwin.evals.arms.base import CountedArm, Served
from ctxwin.evals.items import Setting

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class FirstK(CountedArm):
    """The first k tokens of every chunk but the first are computed in context, the rest is blind."""

    form: ClassVar[str] = "first_k:K"
    source: ClassVar[str] = "Kamera, section 4 and appendix C.3 (first-k carve)"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        at = torch.cat(
            [
                torch.arange(p.slot, p.end if self.count is None else min(p.end, p.slot + self.count))
                for p in group.places[1:]
            ]
            or [torch.arange(0)]
        )
        rows = group.recomputed(group.blind, at)
        computed = int(at.numel())
        extra = {"recomputed": computed / group.context_tokens}
        return [Served(r, 0, group.kv_bytes(), computed, int(computed > 0), extra=extra) for r in rows]
