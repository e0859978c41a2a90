"""Reuse that computes nothing when the question comes (blind, patched, toggled, orbit, survivors), and its controls.

Controls say what a figure is made of: the mask oracle loses conditioning and nothing else, stepwise nothing at all.
"""

from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, Self

import numpy as np
import torch

from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.orbit import mixture, set_weights
from ctxwin.kv.patch import Patch
from ctxwin.window.orbits import balanced_orders
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
        rows, places = [list(row) for row in group.exact], [asked_about(item) for item in group.items]
        for row, blind, place in zip(rows, group.blind, places, strict=True):
            row[place] = blind[place]
        return [Served(row, 0, group.kv_bytes([place])) for row, place in zip(rows, places, strict=True)]


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

    def runs(self, item: Item) -> dict[int, list[tuple[int, ...]]]:
        """The orders whose last chunk's deficits give its patch, by place."""
        place = asked_about(item)
        return {place: [(*order, item.placed[place]) for order in self.averaged(item, place)]}

    def serve(self, group: Group) -> list[Served | None]:
        plans = [self.runs(item) for item in group.items]
        conditioned = iter(
            group.last_spans([(b, run) for b, plan in enumerate(plans) for run in chain(*plan.values())])
        )
        results: list[Served | None] = []
        for b, plan in enumerate(plans):
            patches, placed, figures = dict[int, Patch](), group.items[b].placed, dict[str, float]()
            for place, runs in plan.items():
                spans = islice(conditioned, len(runs))
                if lost := [deficit(span, group.canonical[b][place], group.spec) for span in spans]:
                    weights = set_weights([frozenset(run[:-1]) for run in runs], frozenset(placed[:place]))
                    mean, own = mixture(lost, weights), group.deficit(b, place)
                    patches[place] = group.compressed(mean, self.size, (type(self).__name__, self.orders, b, place))
                    moved = _distance(mean, own, own if self.over_own else mean)
                    figures = {"orders": float(len(runs)), "moved": moved}
            every = set(chain(*plan.values()))  # the front of another one takes no forward of its own
            fronts = {run[:n] for run in every for n in range(1, len(run))}
            forwards = sum(group.layout(run)[-1].end for run in every - fronts)
            figures["formed"] = float(
                forwards + sum(p.tokens for i, p in enumerate(group.places) if i and i not in patches)
            )
            results.append(_patched_row(group, b, self.size, patches, extra=figures) if patches else None)
        return results


@dataclass(frozen=True)
class Orbits(Orbit, form="orbits:M@N", source="Kamera, section 5, 'Reorder'; `ctxwin.window.orbits`"):
    """As `Orbit`, for every chunk up to the asked one, so that no order of the antecedents takes a forward.

    Without ``N`` as windows prepare a set, from as many forwards as there are antecedents (`set_weights`).
    """

    orders: int = 0

    def runs(self, item: Item) -> dict[int, list[tuple[int, ...]]]:
        asked, placed = asked_about(item), item.placed
        if asked < 2:
            return {}
        if self.orders:
            others = {i: self.averaged(item, i) or [placed[:i]] for i in range(1, asked + 1)}
            return {i: [(*order, placed[i]) for order in orders] for i, orders in others.items()}
        rng = np.random.default_rng((0x6F72, item.index))
        stored = item.before[:-1] or [placed[i] for i in rng.permutation(asked)]  # prepared in another order
        orders = [tuple(stored[i] for i in order) for order in balanced_orders(asked, asked, 0)]
        inside = {
            i: [order[: order.index(placed[i]) + 1] for order in orders if order[0] != placed[i]]
            for i in range(1, asked)
        }
        return {**inside, asked: [(*order, placed[asked]) for order in orders]}


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
            patches = [group.patch(b, i, self.size, self.variant, against="survivor") for i in range(len(row))]
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
