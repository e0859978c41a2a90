"""How much a probe measures."""

from __future__ import annotations

from dataclasses import dataclass

from ctxwin.evals.probe.cost import SIZES


@dataclass(frozen=True)
class Sizes:
    """How much is measured, time permitting.

    Attributes:
        reading: contexts by which it is told whether the model reads its context.
        looks: numbers of contexts after which the loss may be called one; that there is none, only after the last.
        choosing: contexts on which ways to compress are compared.
        proving: fresh ones for the settings that were chosen.
        fitting: contexts that a shared basis is fitted on.
        survivors: windows that slide once, by which it is decided whether survivors may be kept.
        streams, slides: windows that slide further, and how far.
        moving: contexts for orders and recalls.
        layouts: whether all ways to compress are compared, or those only that windows serve.
        chunks: sizes of chunks that are timed, in tokens.
    """

    reading: int = 48
    looks: tuple[int, ...] = (64, 160, 400)
    choosing: int = 24
    proving: int = 96
    fitting: int = 16
    survivors: int = 80
    streams: int = 16
    slides: int = 8
    moving: int = 24
    layouts: bool = True
    chunks: tuple[int, ...] = SIZES
