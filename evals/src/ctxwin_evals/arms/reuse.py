"""Reuse that computes nothing when the question comes (blind, patched, toggled, orbit, survivors), and its controls.

Controls say what a figure is made of: the mask oracle loses conditioning and nothing else, stepwise nothing at all.
"""

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Self

import torch

from ctxwin.kv.deficit import Deficit
from ctxwin.kv.orbit import OrbitMean
from ctxwin.kv.patch import Patch
from ctxwin_evals.arms.base import RANK, Arm, RankedArm, Served
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item
from ctxwin_evals.patching import parse_variant
from ctxwin_evals.tasks.edits import other_orders

ORBIT_ORDERS = 6


class Reprefill(Arm, form="reprefill", source="exact forward", settings=("window", "slide", "recall")):
    """One exact forward over everything placed: the reference of all figures."""

    def serve(self, group: Group) -> list[Served | None]:
        tokens = group.context_tokens
        return [Served(row, 0, group.kv_bytes(), tokens, 1) for row in group.exact]


class Blind(Arm, form="blind", source="Kamera, section 2 (blind reuse)"):
    """Every chunk's canonical, rotated into place: position-independent reuse without repair."""

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes()) for row in group.blind]


class Oracle(
    Arm,
    form="oracle",
    source="Kamera, section 2 (the 4-D attention mask), appendix C.4, table 7",
    settings=("window",),
    inside=True,
):
    """One forward over everything placed in which no chunk sees another one, each at its own positions.

    What this loses against a re-prefill is conditioning and nothing else: no key was moved. Blind reuse forms each chunk
    right after the system prompt, and what it absorbs of that then depends on the distance: the rest of its loss is this.
    """

    def serve(self, group: Group) -> list[Served | None]:
        tokens, lead = group.context_tokens, group.system_prompt_span.tokens
        memory = group.behind_system_prompt(len(group)).grown(tokens)
        slots = torch.arange(tokens)
        whose = torch.zeros(tokens, dtype=torch.int64)
        for i, place in enumerate(group.places):
            whose[place.slot : place.end] = i
        same_frame = (whose[:, None] == whose[None]) & (slots[None] <= slots[:, None])
        mask = torch.cat([torch.ones(tokens, lead, dtype=torch.bool), same_frame], 1)
        group.decoder.run(group.context, memory, slots + lead, mask=mask)
        return [Served(row, 0, group.kv_bytes(), tokens, 1) for row in group.spans(memory)]


class Stepwise(Arm, form="stepwise", source="exact; the noise floor of this machine and dtype", settings=("window",)):
    """A re-prefill chunk by chunk instead of in one forward: equal by definition, so what differs is arithmetic."""

    def serve(self, group: Group) -> list[Served | None]:
        tokens = group.context_tokens
        return [Served(row, 0, group.kv_bytes(), tokens, len(group.places)) for row in group.stepwise()]


@dataclass(frozen=True)
class Patched(
    RankedArm,
    form="patched:M",
    argument=f"(?P<size>{RANK})(?:@(?P<variant>.+))?",
    source="Kamera, section 3, eq. 1; layouts: appendix C.2, C.3",
    settings=("window",),
):
    """Every chunk but the first, which is exact anyway: canonical + patch formed after exactly its antecedents.

    Factors are of the run's ``--layout``, joint by default. ``variant`` is another way to compress: ``patched:8@quantized``, as
    windows serve them, ``patched:8@deep``, ``patched:8@shared+output``.
    """

    variant: str = ""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        arm = super().parse(name)
        return None if arm is None or (arm.variant and parse_variant(arm.variant) is None) else arm

    def serve(self, group: Group) -> list[Served | None]:
        return [_patched_row(group, b, self.size, {}, self.variant) for b in range(len(group))]


class Toggled(Arm, form="toggled", source="Kamera, appendix E", settings=("window",)):
    """Everything is exact except the asked chunk, which is toggled to its context-clean view: a copy of its canonical.

    What it still answers right needed no context (the disposability test); windows have `Window.disposable`.
    """

    def serve(self, group: Group) -> list[Served | None]:
        results: list[Served | None] = []
        for b, item in enumerate(group.items):
            place = asked_about(item)
            row = [*group.exact[b][:place], group.blind[b][place], *group.exact[b][place + 1 :]]
            results.append(Served(row, 0, group.kv_bytes([place])))
        return results


@dataclass(frozen=True)
class Orbit(
    RankedArm,
    form="orbit:M@N",
    argument=rf"(?P<size>{RANK})(?:@(?P<orders>0*[1-9]\d*))?",
    source="Kamera, section 5, 'Reorder' (orbit)",
    settings=("window",),
):
    """As `Patched`, but the asked chunk has one patch averaged over other orders of its antecedents.

    Six orders are averaged, or ``N`` of ``orbit:M@N``, all where there are no more; the one it is served in is held out.
    Items with fewer than two antecedents have no other order and are unscored. ``moved`` of a sample is the norm
    of (averaged deficit - own deficit) over the own one's.
    """

    orders: int = ORBIT_ORDERS
    over_own: ClassVar[bool] = True

    def averaged(self, item: Item, place: int) -> list[tuple[int, ...]]:
        """The orders of the preceding chunks whose deficits are averaged."""
        return other_orders(item.placed[:place], self.orders, 0x6F72, place, item.index)

    def serve(self, group: Group) -> list[Served | None]:
        places = [asked_about(item) for item in group.items]
        plans = [self.averaged(item, place) for item, place in zip(group.items, places, strict=True)]
        orders = [(b, (*order, group.items[b].placed[places[b]])) for b, plan in enumerate(plans) for order in plan]
        conditioned = iter(group.last_spans(orders))
        results: list[Served | None] = []
        for b, plan in enumerate(plans):
            spans = list(islice(conditioned, len(plan)))
            if not spans:
                results.append(None)
                continue
            place = places[b]
            orbit = OrbitMean(group.spec)
            for span in spans:
                orbit.add(span, group.canonical[b][place])
            patch = group.compressed(orbit.mean, self.size, (type(self).__name__, self.orders, b))
            exact_deficit = group.deficit(b, place)
            figures = {
                "orders": float(len(plan)),
                "moved": _distance(orbit.mean, exact_deficit, exact_deficit if self.over_own else orbit.mean),
            }
            others = group.context_tokens - group.places[0].tokens - group.places[place].tokens
            figures["formed"] = float(others + len(plan) * group.places[place].end)
            results.append(_patched_row(group, b, self.size, {place: patch}, extra=figures))
        return results


@dataclass(frozen=True)
class Transfer(
    Orbit, form="transfer:M", argument=f"(?P<size>{RANK})", source="Kamera, section 5, 'Reorder' (transfer)"
):
    """As `Orbit`, with the patch of a single other order: the one the item says it was stored in, else any.

    ``moved`` of a sample is the norm of (own deficit - stored deficit) over the stored one's.
    """

    orders: int = 1
    over_own: ClassVar[bool] = False

    def averaged(self, item: Item, place: int) -> list[tuple[int, ...]]:
        if item.before[-1:] == (item.placed[place],) and sorted(item.before[:-1]) == sorted(item.placed[:place]):
            return [item.before[:-1]]
        return super().averaged(item, place)


class Survivor(Arm, form="survivor", source="Kamera, section 5, 'Sliding-window survival'", settings=("slide",)):
    """After a slide: what stays keeps its conditioned KV and is rotated. Nothing else is stored."""

    def serve(self, group: Group) -> list[Served | None]:
        return [Served(row, 0, group.kv_bytes()) for row in group.survivors]


class Removal(
    Patched,
    form="removal:M",
    source="Kamera, section 5, 'Sliding-window survival' (removal patch)",
    settings=("slide",),
):
    """After a slide: survivors, each with a patch that removes what it absorbed from the chunks that left.

    A patch takes a forward over all that stayed, once (``formed``), which gives the exact KV, too; ``variant`` as in `Patched`.
    """

    def serve(self, group: Group) -> list[Served | None]:
        results: list[Served | None] = []
        for b, row in enumerate(group.survivors):
            patches = [group.removal(b, i, self.size, self.variant) for i in range(len(row))]
            spans = [group.patched(s, p, i) for i, (s, p) in enumerate(zip(row, patches, strict=True))]
            formed = {"formed": float(group.context_tokens)}
            results.append(Served(spans, sum(p.nbytes for p in patches), group.kv_bytes(), extra=formed))
        return results


def asked_about(item: Item) -> int:
    """The place of the chunk that holds the answer; the last one where the item does not say."""
    return len(item.placed) - 1 if item.asked is None else item.asked


def _patched_row(
    group: Group,
    b: int,
    rank: int | None,
    instead: dict[int, Patch],
    variant: str = "",
    extra: dict[str, float] | None = None,
) -> Served:
    """The first chunk unchanged, the others patched; ``instead`` replaces patches by place."""
    row, spans, stored = group.blind[b], [group.blind[b][0]], 0
    for i in range(1, len(row)):
        patch = instead[i] if i in instead else group.patch(b, i, rank, variant)
        spans.append(group.patched(group.canonical[b][i], patch, i))
        stored += patch.nbytes
    formed = sum(p.tokens for i, p in enumerate(group.places) if i and i not in instead)
    figures = {"formed": float(formed)} | (extra or {})
    return Served(spans, stored, group.kv_bytes(range(1, len(row))), extra=figures)


def _distance(one: Deficit, other: Deficit, scale: Deficit) -> float:
    """Norm of the difference of two deficits over that of a third (Kamera, section 5, "Reorder")."""
    distance = float(((one.k - other.k).double().pow(2).sum() + (one.v - other.v).double().pow(2).sum()).sqrt())
    size = float(scale.energy.sum()) ** 0.5
    return distance / size if size else 0.0
