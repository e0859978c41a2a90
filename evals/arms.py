"""What serves the placed chunks: one dataclass an arm, each with its source, and the parser of their names.

An arm turns a `Group` into one row of spans a case, in place, ready to be asked behind. Nothing here reads an answer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, permutations
from math import factorial
from typing import ClassVar

import numpy as np
import torch

from ctxwin.evals.group import Group
from ctxwin.evals.reader import stack
from ctxwin.evals.tasks import Setting
from ctxwin.kv import SpanKV
from ctxwin.operator import Deficit, OrbitMean, Patch, deficit

ORBIT_ORDERS = 6


@dataclass(frozen=True)
class Served:
    """What an arm serves for one case.

    Attributes:
        spans: one a placed chunk, rotated in place.
        stored: bytes kept for the patched chunks beyond the KV they are applied to.
        over: bytes of those chunks' KV in bf16.
        extra: further figures of this sample.
    """

    spans: Sequence[SpanKV]
    stored: int = 0
    over: int = 0
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm(ABC):
    """A way to serve. ``name`` is the spelling it was asked for by, and does not count in comparisons."""

    name: str = field(compare=False)

    source: ClassVar[str]
    settings: ClassVar[tuple[Setting, ...]]

    @property
    def turnover(self) -> float:
        """Share of the chunks in front that changed before a recall; 0 for arms without one."""
        return 0.0

    @property
    def rank(self) -> int | None:
        """Rank of its patches; None where it has none, or full ones."""
        return None

    @abstractmethod
    def serve(self, group: Group) -> list[Served | None]:
        """One entry a case; None where this arm has no meaning for the case, which is then unscored."""


@dataclass(frozen=True)
class _Ranked(Arm):
    size: int | None

    @property
    def rank(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class Reprefill(Arm):
    """One exact forward over everything placed: the reference of all figures."""

    source: ClassVar[str] = "exact forward"
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes(len(row))) for row in group.exact]


@dataclass(frozen=True)
class Blind(Arm):
    """Every chunk's canonical, rotated into place: position-independent reuse without repair."""

    source: ClassVar[str] = "Kamera, section 2 (blind reuse)"
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes(len(row))) for row in group.blind]


@dataclass(frozen=True)
class Patched(_Ranked):
    """Every chunk but the first, which is exact as it is: canonical + patch formed behind exactly its antecedents."""

    source: ClassVar[str] = "Kamera, section 3, eq. 1"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        return [_patched_row(group, b, self.size, {}) for b in range(len(group))]


@dataclass(frozen=True)
class FirstK(Arm):
    """The first k tokens of every chunk are computed in context, the rest is blind: what attention-sink repair does.

    All k-token heads run in one forward, each seeing the blind KV in front as far as it stands in front of it.
    """

    k: int | None

    source: ClassVar[str] = "EPIC (LegoLink), MPIC; Kamera, section 4 and appendix C.3 (first-k carve)"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        reader, places = group.reader, len(group.cases[0].placed)
        tokens = reader.frame.tokens
        k = tokens if self.k is None else min(self.k, tokens)
        if k == 0 or places == 1:
            return [Served(row, 0, group.kv_bytes(places)) for row in group.blind]
        past = stack([[reader.header, row[0], *(s.slice(k, tokens) for s in row[1:])] for row in group.blind])
        embeds = group.picked([c.placed[1:] for c in group.cases])[:, :, :k].flatten(1, 2)
        positions = torch.cat([reader.positions[:, :k] + reader.start(i) for i in range(1, places)], 1)
        # Where each token stands in the prompt; a head sees what stands in front of it, blind or computed.
        lead = reader.header.tokens
        at = [lead + i * tokens + torch.arange(tokens) for i in range(places)]
        old = torch.cat([torch.arange(lead), at[0], *(a[k:] for a in at[1:])])
        new = torch.cat([a[:k] for a in at[1:]])
        mask = torch.cat([old[None] < new[:, None], new[None] <= new[:, None]], 1)
        made, _ = reader.forward(embeds, positions, past, mask)
        served: list[Served | None] = []
        for b, row in enumerate(group.blind):
            spans = [row[0]]
            for i, rest in enumerate(row[1:], start=1):
                head = made.cut(b, (i - 1) * k, i * k, reader.positions[:, :k], rest.start)
                spans.append(_joined(head, rest.slice(k, tokens)))
            served.append(Served(spans, 0, group.kv_bytes(places), {"recomputed": k / tokens}))
        return served


@dataclass(frozen=True)
class Orbit(_Ranked):
    """As `Patched`, but the asked chunk has one patch averaged over other orders of its antecedents.

    Up to six orders are averaged; the one it is served in is held out. Cases with fewer than two antecedents in front
    have no other order and are unscored.
    """

    source: ClassVar[str] = "Kamera, section 5, 'Reorder' (orbit)"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)
    orders: ClassVar[int] = ORBIT_ORDERS

    def serve(self, group: Group) -> list[Served | None]:
        plans = [other_orders(c.placed[: c.asked], self.orders, c.index) for c in group.cases]
        wanted = [
            (b, (*order, group.cases[b].placed[group.cases[b].asked])) for b, plan in enumerate(plans) for order in plan
        ]
        met = iter(group.behind(wanted))
        served: list[Served | None] = []
        for b, plan in enumerate(plans):
            spans = list(islice(met, len(plan)))
            if not spans:
                served.append(None)
                continue
            place = group.cases[b].asked
            orbit = OrbitMean(group.spec)
            for span in spans:
                orbit.add(span, group.canonical[b][place])
            patch = group.compressed(orbit.mean, self.size, (type(self).__name__, b))
            moved = _distance(orbit.mean, group.deficit(b, place))
            served.append(_patched_row(group, b, self.size, {place: patch}, orders=len(plan), moved=moved))
        return served


@dataclass(frozen=True)
class Transfer(Orbit):
    """As `Orbit`, with the patch of a single other order."""

    source: ClassVar[str] = "Kamera, section 5, 'Reorder' (transfer)"
    orders: ClassVar[int] = 1


@dataclass(frozen=True)
class Survivor(Arm):
    """After a slide: what stays keeps its conditioned KV and is rotated. Nothing is stored beside it."""

    source: ClassVar[str] = "Kamera, section 5, 'Sliding-window survival'"
    settings: ClassVar[tuple[Setting, ...]] = ("slide",)

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes(len(row))) for row in group.kept]


@dataclass(frozen=True)
class Removal(_Ranked):
    """After a slide: survivors with a patch each that takes out what they absorbed from what left."""

    source: ClassVar[str] = "Kamera, section 5, 'Sliding-window survival' (removal patch)"
    settings: ClassVar[tuple[Setting, ...]] = ("slide",)

    def serve(self, group: Group) -> list[Served | None]:
        served: list[Served | None] = []
        for b, row in enumerate(group.kept):
            patches = [group.removal(b, i, self.size) for i in range(len(row))]
            spans = [group.patched(s, p, i) for i, (s, p) in enumerate(zip(row, patches, strict=True))]
            served.append(Served(spans, sum(p.nbytes for p in patches), group.kv_bytes(len(row))))
        return served


@dataclass(frozen=True)
class _Recalled(_Ranked):
    """The chunk that was recalled is canonical + patch; what stands in front is exact, as resident chunks are."""

    changed: float

    settings: ClassVar[tuple[Setting, ...]] = ("recall",)

    @property
    def turnover(self) -> float:
        return self.changed

    @abstractmethod
    def patch(self, group: Group, b: int) -> Patch: ...

    def serve(self, group: Group) -> list[Served | None]:
        served: list[Served | None] = []
        for b, case in enumerate(group.cases):
            patch = self.patch(group, b)
            spans = list(group.exact[b])
            spans[case.asked] = group.patched(group.canonical[b][case.asked], patch, case.asked)
            served.append(Served(spans, patch.nbytes, group.kv_bytes()))
        return served


@dataclass(frozen=True)
class Stale(_Recalled):
    """A recalled chunk with the patch it had when it was evicted."""

    source: ClassVar[str] = "Kamera, section 5, 'Recall' (stale replay)"

    def patch(self, group: Group, b: int) -> Patch:
        case = group.cases[b]
        then = group.earlier[b][case.before.index(case.placed[case.asked])]
        lost = deficit(then, group.canonical[b][case.asked], group.spec)
        return group.compressed(lost, self.size, ("stale", b))


@dataclass(frozen=True)
class Recall(_Recalled):
    """A recalled chunk with a patch formed behind what is in front of it now."""

    source: ClassVar[str] = "Kamera, section 5, 'Recall' (fresh patch)"

    def patch(self, group: Group, b: int) -> Patch:
        return group.patch(b, group.cases[b].asked, self.size)


@dataclass(frozen=True)
class RecalledBlind(Arm):
    """The base of a recall: the chunk's canonical behind exact chunks. Not an arm of its own."""

    source: ClassVar[str] = "Kamera, section 5, 'Recall' (blind)"
    settings: ClassVar[tuple[Setting, ...]] = ("recall",)

    def serve(self, group: Group) -> list[Served | None]:
        rows = [list(row) for row in group.exact]
        for b, case in enumerate(group.cases):
            rows[b][case.asked] = group.blind[b][case.asked]
        return [Served(row, 0, group.kv_bytes()) for row in rows]


REFERENCE = Reprefill("reprefill")
BASES: dict[Setting, Arm] = {"window": Blind("blind"), "slide": Survivor("survivor"), "recall": RecalledBlind("blind")}

_PLAIN: dict[str, type[Arm]] = {"reprefill": Reprefill, "blind": Blind, "survivor": Survivor}
_RANKED: dict[str, type[_Ranked]] = {"patched": Patched, "orbit": Orbit, "transfer": Transfer, "removal": Removal}
_TURNED: dict[str, type[_Recalled]] = {"stale": Stale, "recall": Recall}
ARM_FORMS = (
    "reprefill, blind, survivor, patched:M, orbit:M, transfer:M, removal:M (M: a rank >= 0, or full), "
    "first_k:K (K: tokens >= 0, or all), stale:M@T, recall:M@T (T: turnover 0..1)"
)


def parse_arm(text: str) -> Arm:
    """The arm a name stands for; ValueError, naming the forms, for anything else."""
    name = text.strip()
    head, _, argument = name.partition(":")
    if head in _PLAIN and name == head:
        return _PLAIN[head](name)
    if head == "first_k" and (match := re.fullmatch(r"(\d+)|all", argument)):
        return FirstK(name, int(match[1]) if match[1] else None)
    if head in _RANKED and (match := re.fullmatch(r"(\d+)|full", argument)):
        return _RANKED[head](name, int(match[1]) if match[1] else None)
    if head in _TURNED and (match := re.fullmatch(r"(?:(\d+)|full)@(\d+(?:\.\d*)?|\.\d+)", argument)):
        turnover = float(match[2])
        if turnover <= 1:
            return _TURNED[head](name, int(match[1]) if match[1] else None, turnover)
    raise ValueError(f"an arm must be one of {ARM_FORMS}; got {text!r}")


def parse_arms(text: str) -> list[Arm]:
    """A comma-separated list of arms, in order; ValueError where it is empty or names one twice."""
    arms = [parse_arm(part) for part in text.split(",") if part.strip()]
    if not arms:
        raise ValueError(f"arms must name at least one of {ARM_FORMS}; got {text!r}")
    twice = sorted({a.name for a in arms if sum(b.name == a.name for b in arms) > 1})
    if twice:
        raise ValueError(f"arms must be named once each, got {', '.join(twice)} again")
    return arms


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


def _patched_row(group: Group, b: int, rank: int | None, instead: dict[int, Patch], **extra: float) -> Served:
    """The first chunk as it is, the others patched; ``instead`` replaces patches by place."""
    row, spans, stored = group.blind[b], [group.blind[b][0]], 0
    for i in range(1, len(row)):
        patch = instead[i] if i in instead else group.patch(b, i, rank)
        spans.append(group.patched(group.canonical[b][i], patch, i))
        stored += patch.nbytes
    return Served(spans, stored, group.kv_bytes(len(row) - 1), extra)


def _joined(head: SpanKV, rest: SpanKV) -> SpanKV:
    return SpanKV(
        torch.cat([head.k, rest.k], 1), torch.cat([head.v, rest.v], 1), torch.cat([head.positions, rest.positions], 1),
        rest.start,
    )  # fmt: skip


def _distance(mean: Deficit, own: Deficit) -> float:
    """How far the orbit's mean is from the deficit of the order it is served in, relative to the latter."""
    apart = float(((mean.k - own.k).double().pow(2).sum() + (mean.v - own.v).double().pow(2).sum()).sqrt())
    size = float(own.energy.sum()) ** 0.5
    return apart / size if size else 0.0
