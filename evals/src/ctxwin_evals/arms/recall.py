"""A chunk that comes back: with the patch it had, a fresh one, or the old one brought up to date."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Patch, apply_patch
from ctxwin_evals.arms.base import RANK, SHARE, Arm, RankedArm, Served
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item


@dataclass(frozen=True)
class _Rehydrated(RankedArm, settings=("recall",), argument=f"(?P<size>{RANK})(?:@(?P<at>{SHARE}))?"):
    """The recalled chunk is canonical + patch; the preceding chunks are exact, as resident chunks are.

    ``divergence`` of a sample is how far the preceding chunks are from those at forming, see `divergence`;
    ``formed`` counts the chunk's tokens where its patch takes a conditioned forward once it is back. That forward gives
    the exact KV, too: the patch is what later asks after the same chunks reuse.
    """

    at: float | None = None

    fresh: ClassVar[bool] = True

    @property
    def turnover(self) -> float | None:
        return self.at

    def patched(self, group: Group, b: int, place: int) -> tuple[SpanKV, int]:
        """The chunk in place, and the bytes kept for it."""
        patch = group.patch(b, place, self.size) if self.fresh else stale_patch(group, b, place, self.size)
        return group.patched(group.canonical[b][place], patch, place), patch.nbytes

    def serve(self, group: Group) -> list[Served | None]:
        results: list[Served | None] = []
        for b, item in enumerate(group.items):
            place = came_back(item)
            spans = list(group.exact[b])
            spans[place], stored = self.patched(group, b, place)
            extra = {"formed": float(group.places[place].tokens if self.fresh else 0)}
            if group.embeds:
                extra["divergence"] = divergence(group, b, place)
            results.append(Served(spans, stored, group.kv_bytes([place]), extra=extra))
        return results


class Stale(_Rehydrated, form="stale:M", source="Kamera, section 5, 'Recall' (stale replay); appendix D"):
    """A recalled chunk with the patch it had when it was evicted; ``stale:M@T`` at turnover T alone."""

    fresh: ClassVar[bool] = False


class Update(
    _Rehydrated,
    form="update:M",
    source="Kamera, section 5, 'Recall' (fresh patch); appendix D ('The cheapest correct refresh')",
):
    """A recalled chunk with a patch formed after the chunks that precede it now; ``update:M@T`` at turnover T alone."""


class Recall(Update, form="recall:M@T", argument=f"(?P<size>{RANK})@(?P<at>{SHARE})"):
    """`Update` of a recall at one turnover, as ``recall:M@T``."""


@dataclass(frozen=True)
class Refresh(
    _Rehydrated,
    form="refresh:M@S",
    argument=f"(?P<size>{RANK})(?:@(?P<stale>{RANK}))?",
    source="Kamera, appendix D ('The cheapest correct refresh': a patch update)",
):
    """A recalled chunk with the patch it had, and a second one of rank M for what that leaves of the present deficit.

    The first has rank M too, or S of ``refresh:M@S``; the bytes of both are counted.
    """

    stale: int | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        arm = super().parse(name)
        return arm if arm is None or "@" in name else replace(arm, stale=arm.size)

    def patched(self, group: Group, b: int, place: int) -> tuple[SpanKV, int]:
        old = stale_patch(group, b, place, self.stale)
        base = apply_patch(group.canonical[b][place], old, group.spec, 0)
        missing = deficit(group.exact[b][place], base, group.spec)
        new = group.compressed(missing, self.size, ("refresh", self.stale, b, place))
        return group.patched(base, new, place), old.nbytes + new.nbytes


class Recalled(Arm, form="blind", source="Kamera, section 5, 'Recall' (blind)", settings=("recall",)):
    """The base of a recall: the chunk's canonical after exact chunks. Asked for as ``blind``."""

    def serve(self, group: Group) -> list[Served | None]:
        rows = [list(row) for row in group.exact]
        for b, item in enumerate(group.items):
            rows[b][came_back(item)] = group.blind[b][came_back(item)]
        return [Served(row, 0, group.kv_bytes([came_back(group.items[b])])) for b, row in enumerate(rows)]


def came_back(item: Item) -> int:
    """The place of the chunk that was recalled."""
    if item.asked is None:
        raise ValueError(f"a recalled item must say what came back, got none for item {item.index} of {item.task!r}")
    return item.asked


def stale_patch(group: Group, b: int, place: int, rank: int | None) -> Patch:
    """The patch of the chunk at ``place`` as it was formed before the edit."""
    item = group.items[b]
    then = group.earlier[b][item.before.index(item.placed[place])]
    return group.compressed(deficit(then, group.canonical[b][place], group.spec), rank, ("stale", b, place))


def divergence(group: Group, b: int, place: int) -> float:
    """How far the antecedents of a chunk are from those its patch was formed after, 0 (the same) to 2: needs no forward.

    One minus the mean cosine of token embeddings at matched positions, counted from the chunk backwards; a token that has
    no counterpart counts as cosine 0. Source: Kamera, appendix D ("Divergent antecedents", cosine divergence), which does
    not say of what; embeddings are what is there before anything is computed.
    """
    item = group.items[b]
    then = _embed(group, b, item.before[: item.before.index(item.placed[place])])
    now = _embed(group, b, item.placed[:place])
    matched, most = min(len(then), len(now)), max(len(then), len(now))
    if not most:
        return 0.0
    alike = torch.cosine_similarity(then[len(then) - matched :], now[len(now) - matched :], dim=-1)
    return max(0.0, 1.0 - float(alike.sum()) / most)


def _embed(group: Group, b: int, frames: Sequence[int]) -> torch.Tensor:
    """Embeddings of chunks in order, float64 ``[tokens, hidden]``."""
    parts = [group.tokens(frame).embeds[b].double() for frame in frames]
    return torch.cat(parts) if parts else torch.empty(0, 1, dtype=torch.float64)
