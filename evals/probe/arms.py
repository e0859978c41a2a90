"""Arms that only a probe has: a chunk swapped for a stranger, and a re-prefill of what a sliding window saw lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxwin.evals.arms.base import PlainArm, Served
from ctxwin.evals.items import Setting

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class Swapped(PlainArm):
    """A re-prefill in which a stranger of the same size stands at one place: what answers about that chunk hang on."""

    place: int

    form: ClassVar[str] = "swapped"
    source: ClassVar[str] = "exact forward"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        orders = []
        for item in group.items:
            stranger = len(item.placed) + self.place
            orders.append([stranger if i == self.place else frame for i, frame in enumerate(item.placed)])
        return [Served(row) for row in group.prefilled(orders)]


@dataclass(frozen=True)
class Lately(PlainArm):
    """A re-prefill of all that the survivors of a slide may know: what a window has shown since its last chunk came in."""

    form: ClassVar[str] = "lately"
    source: ClassVar[str] = "exact forward; Kamera, section 5, 'Sliding-window survival'"
    settings: ClassVar[tuple[Setting, ...]] = ("slide",)

    def serve(self, group: Group) -> list[Served | None]:
        orders = [item.before[-2 * len(item.placed) :] for item in group.items]
        begin = group.layout([*orders[0], orders[0][0]])[-1].start
        return [Served(row, begin=begin) for row in group.prefilled(orders)]
