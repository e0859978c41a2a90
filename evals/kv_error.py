"""How far the KV that an arm serves is from a re-prefill's, layer by layer: where in depth an arm is wrong.

Kamera, section 4 and figure 8, draws the deficit of blind reuse so: nothing in the first layer, most in the deepest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctxwin.kv.layout import SpanKV

DIGITS = 6


def by_layer(served: Sequence[SpanKV], exact: Sequence[SpanKV]) -> list[float] | None:
    """Relative distance ``|KV - exact| / |exact|`` of each layer, rope and content channel together, over all placed chunks.

    None where an arm serves other tokens than a re-prefill does (thinned out, or other chunks).
    Cost: one pass over the KV.
    """
    if [span.tokens for span in served] != [span.tokens for span in exact]:
        return None
    apart = size = torch.zeros(exact[0].k.shape[0], dtype=torch.float64)
    for ours, theirs in zip(served, exact, strict=True):
        for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
            reference = b.double()
            apart = apart + (a.double() - reference).pow(2).sum(dim=(1, 2, 3))
            size = size + reference.pow(2).sum(dim=(1, 2, 3))
    return [float(f"{x:.{DIGITS}g}") for x in (apart / size).sqrt().tolist()]
