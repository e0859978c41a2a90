"""Arms that only a probe has: a chunk swapped for a stranger, and a re-prefill of what a sliding window saw lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.evals.arms.base import Arm, Served

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class Swapped(Arm, form="swapped", source="exact forward", settings=("window",)):
    """A re-prefill in which a stranger of the same size stands at one place: what answers about that chunk hang on."""

    place: int

    def serve(self, group: Group) -> list[Served | None]:
        orders = []
        for item in group.items:
            stranger = len(item.placed) + self.place
            orders.append([stranger if i == self.place else frame for i, frame in enumerate(item.placed)])
        return [Served(row) for row in group.prefilled(orders)]


class Lately(
    Arm, form="lately", source="exact forward; Kamera, section 5, 'Sliding-window survival'", settings=("slide",)
):
    """A re-prefill of all that the survivors of a slide may know: what a window has shown since its last chunk came in."""

    def serve(self, group: Group) -> list[Served | None]:
        orders = [item.before[-2 * len(item.placed) :] for item in group.items]
        begin = group.layout([*orders[0], orders[0][0]])[-1].start
        return [Served(row, begin=begin) for row in group.prefilled(orders)]
