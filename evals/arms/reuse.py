"""Reuse without computing anything when the question comes: blind, patched, toggled, orbit, survivors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from math import factorial
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from ctxwin.evals.arms.base import PlainArm, RankedArm, Served
from ctxwin.evals.items import Item, Setting
from ctxwin.evals.patching import parse_variant
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.orbit import OrbitMean
from ctxwin.kv.patch import Patch

if TYPE_CHECKING:
    from ctxwin.evals.group import Group

ORBIT_ORDERS = 6


@dataclass(frozen=True)
class Reprefill(PlainArm):
    """One exact forward over everything placed: the reference of all figures."""

    form: ClassVar[str] = "reprefill"
    source: ClassVar[str] = "exact forward"
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide", "recall")

    def serve(self, group: Group) -> list[Served | None]:
        tokens = group.context_tokens
        return [Served(row, 0, group.kv_bytes(), tokens, 1) for row in group.exact]


@dataclass(frozen=True)
class Blind(PlainArm):
    """Every chunk's canonical, rotated into place: position-independent reuse without repair."""

    form: ClassVar[str] = "blind"
    source: ClassVar[str] = "Kamera, section 2 (blind reuse)"
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes()) for row in group.blind]


@dataclass(frozen=True)
class Patched(RankedArm):
    """Every chunk but the first, which is exact as it is: canonical + patch formed behind exactly its antecedents.

    ``variant`` is another way to compress than the run's: ``patched:8@deep``, ``patched:8@shared+output``.
    """

    variant: str = ""

    form: ClassVar[str] = "patched:M"
    source: ClassVar[str] = "Kamera, section 3, eq. 1; layouts: appendix C.2, C.3"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        size, at, variant = argument.partition("@")
        plain = super().parse(name, size)
        if plain is None or (at and parse_variant(variant) is None):
            return None
        return replace(plain, variant=variant)

    def serve(self, group: Group) -> list[Served | None]:
        return [_patched_row(group, b, self.size, {}, self.variant) for b in range(len(group))]


@dataclass(frozen=True)
class Toggled(PlainArm):
    """Everything exact but the asked chunk, which is toggled to its context-clean view: its canonical, a copy.

    What it still answers right needed no context (the disposability test); see `ctxwin.evals.toggles` for windows.
    """

    form: ClassVar[str] = "toggled"
    source: ClassVar[str] = "Kamera, appendix E"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    @property
    def found(self) -> tuple[str, ...]:
        return ("exact",)

    def serve(self, group: Group) -> list[Served | None]:
        served: list[Served | None] = []
        for b, item in enumerate(group.items):
            place = asked_about(item)
            row = [*group.exact[b][:place], group.blind[b][place], *group.exact[b][place + 1 :]]
            served.append(Served(row, 0, group.kv_bytes([place])))
        return served


@dataclass(frozen=True)
class Orbit(RankedArm):
    """As `Patched`, but the asked chunk has one patch averaged over other orders of its antecedents.

    Six orders are averaged, or ``N`` of ``orbit:M@N``, all where there are no more; the one it is served in is held out.
    Items with fewer than two antecedents in front have no other order and are unscored. ``moved`` of a sample is the norm
    of (averaged deficit - own deficit) over the own one's.
    """

    orders: int = ORBIT_ORDERS

    form: ClassVar[str] = "orbit:M@N"
    source: ClassVar[str] = "Kamera, section 5, 'Reorder' (orbit)"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        size, at, count = argument.partition("@")
        plain = super().parse(name, size)
        if plain is None or not at:
            return plain
        return replace(plain, orders=int(count)) if count.isdecimal() and int(count) > 0 else None

    def averaged(self, item: Item, place: int) -> list[tuple[int, ...]]:
        """Orders of what is in front whose deficits are averaged."""
        return other_orders(item.placed[:place], self.orders, item.index)

    def serve(self, group: Group) -> list[Served | None]:
        asked = [asked_about(item) for item in group.items]
        plans = [self.averaged(item, place) for item, place in zip(group.items, asked, strict=True)]
        wanted = [(b, (*order, group.items[b].placed[asked[b]])) for b, plan in enumerate(plans) for order in plan]
        met = iter(group.behind(wanted))
        served: list[Served | None] = []
        for b, plan in enumerate(plans):
            spans = list(islice(met, len(plan)))
            if not spans:
                served.append(None)
                continue
            place = asked[b]
            orbit = OrbitMean(group.spec)
            for span in spans:
                orbit.add(span, group.canonical[b][place])
            patch = group.compressed(orbit.mean, self.size, (type(self).__name__, self.orders, b))
            figures = {"orders": float(len(plan)), "moved": self.moved(orbit.mean, group.deficit(b, place))}
            others = group.context_tokens - group.places[0].tokens - group.places[place].tokens
            figures["formed"] = float(others + len(plan) * group.places[place].end)
            served.append(_patched_row(group, b, self.size, {place: patch}, extra=figures))
        return served

    def moved(self, mean: Deficit, own: Deficit) -> float:
        return _distance(mean, own, own)


@dataclass(frozen=True)
class Transfer(Orbit):
    """As `Orbit`, with the patch of a single other order: the one the item says it was stored in, else any.

    ``moved`` of a sample is the norm of (own deficit - stored deficit) over the stored one's.
    """

    orders: int = 1

    form: ClassVar[str] = "transfer:M"
    source: ClassVar[str] = "Kamera, section 5, 'Reorder' (transfer)"

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        return None if "@" in argument else super().parse(name, argument)

    def averaged(self, item: Item, place: int) -> list[tuple[int, ...]]:
        front = item.placed[:place]
        if item.before[-1:] == (item.placed[place],) and sorted(item.before[:-1]) == sorted(front):
            return [item.before[:-1]]
        return super().averaged(item, place)

    def moved(self, mean: Deficit, own: Deficit) -> float:
        return _distance(own, mean, mean)


@dataclass(frozen=True)
class Survivor(PlainArm):
    """After a slide: what stays keeps its conditioned KV and is rotated. Nothing is stored beside it."""

    form: ClassVar[str] = "survivor"
    source: ClassVar[str] = "Kamera, section 5, 'Sliding-window survival'"
    settings: ClassVar[tuple[Setting, ...]] = ("slide",)

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes()) for row in group.kept]


@dataclass(frozen=True)
class Removal(RankedArm):
    """After a slide: survivors with a patch each that takes out what they absorbed from what left.

    A patch takes a forward over all that stayed, once (``formed``), which gives the exact KV, too.
    """

    form: ClassVar[str] = "removal:M"
    source: ClassVar[str] = "Kamera, section 5, 'Sliding-window survival' (removal patch)"
    settings: ClassVar[tuple[Setting, ...]] = ("slide",)

    def serve(self, group: Group) -> list[Served | None]:
        served: list[Served | None] = []
        for b, row in enumerate(group.kept):
            patches = [group.removal(b, i, self.size) for i in range(len(row))]
            spans = [group.patched(s, p, i) for i, (s, p) in enumerate(zip(row, patches, strict=True))]
            formed = {"formed": float(group.context_tokens)}
            served.append(Served(spans, sum(p.nbytes for p in patches), group.kv_bytes(), extra=formed))
        return served


def asked_about(item: Item) -> int:
    """The place of the chunk that holds the answer; the last one where the item does not say."""
    return len(item.placed) - 1 if item.asked is None else item.asked


def other_orders(frames: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """Up to ``count`` orders of ``frames`` other than the given one; all of them where there are no more."""
    identity, n = tuple(frames), len(frames)
    if n < 2:
        return []
    if factorial(n) - 1 <= count:
        return [p for p in permutations(identity) if p != identity]
    rng = np.random.default_rng((0x6F72, n, seed))
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < count:
        order = tuple(identity[int(i)] for i in rng.permutation(n))
        if order != identity:
            chosen[order] = None
    return list(chosen)


def _patched_row(
    group: Group,
    b: int,
    rank: int | None,
    instead: dict[int, Patch],
    variant: str = "",
    extra: dict[str, float] | None = None,
) -> Served:
    """The first chunk as it is, the others patched; ``instead`` replaces patches by place."""
    row, spans, stored = group.blind[b], [group.blind[b][0]], 0
    for i in range(1, len(row)):
        patch = instead[i] if i in instead else group.patch(b, i, rank, variant)
        spans.append(group.patched(group.canonical[b][i], patch, i))
        stored += patch.nbytes
    formed = sum(p.tokens for i, p in enumerate(group.places) if i and i not in instead)
    made = {"formed": float(formed)} | (extra or {})
    return Served(spans, stored, group.kv_bytes(range(1, len(row))), extra=made)


def _distance(one: Deficit, other: Deficit, scale: Deficit) -> float:
    """Norm of the difference of two deficits over that of a third (Kamera, section 5, "Reorder")."""
    apart = float(((one.k - other.k).double().pow(2).sum() + (one.v - other.v).double().pow(2).sum()).sqrt())
    size = float(scale.energy.sum()) ** 0.5
    return apart / size if size else 0.0
