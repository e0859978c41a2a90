"""Orbit patches: one patch for every order of the antecedents (Kamera, section 5, "Reorder").

It restores what the orders share. Where the answer depends on the order, no such patch can be right; `spread` says how
much the orders differ, so that an audit knows where to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch, compress


class OrbitMean:
    """Running mean of the deficits of the orders met so far, in the canonical frame.

    Memory: one deficit in float32, whatever the number of orders. Not thread-safe.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.count = 0
        self._mean: Deficit | None = None
        self._scatter = 0.0

    def add(self, conditioned: SpanKV, base: SpanKV) -> None:
        """Takes in one order: ``conditioned`` is the chunk behind its antecedents in that order; any frame.

        Raises:
            ValueError: spans that do not match the earlier ones. Cost: two rotations.
        """
        self.add_deficit(deficit(conditioned, base, self.spec))

    def add_deficit(self, lost: Deficit) -> None:
        """Takes in one order by its deficit."""
        mean = self._mean
        if mean is None:
            self.count, self._mean = 1, replace(lost, k=lost.k.clone(), v=lost.v.clone())
            return
        if mean.k.shape != lost.k.shape or mean.v.shape != lost.v.shape:
            raise ValueError(f"deficits must have the shape {list(mean.k.shape)}, got {list(lost.k.shape)}")
        self.count += 1
        for have, new in ((mean.k, lost.k), (mean.v, lost.v)):
            step = new - have
            have += step / self.count
            # Welford: the scatter around the mean grows by step times what is left of it.
            self._scatter += float((step * (new - have)).double().sum())

    @property
    def mean(self) -> Deficit:
        """The mean deficit; ValueError before the first order."""
        if self._mean is None:
            raise ValueError("an orbit must have met at least one order, got none")
        return self._mean

    @property
    def spread(self) -> float:
        """RMS distance of the orders' deficits from their mean, relative to the mean's norm; 0 for a single order."""
        energy = float(self.mean.energy.sum())
        return (self._scatter / self.count / energy) ** 0.5 if energy and self.count > 1 else 0.0

    def patch(self, **form: Any) -> Patch:
        """The patch of the mean; keywords as in `form_patch`. ``meta`` gains ``orders`` and ``spread``."""
        patch = compress(self.mean, self.spec, **form)
        patch.meta.update(orders=self.count, spread=self.spread)
        return patch


def orbit_mean(conditioned: Sequence[SpanKV], base: SpanKV, spec: KVSpec, **form: Any) -> Patch:
    """One patch from the same chunk behind its antecedents in several orders.

    Args:
        conditioned: the chunk's KV in each order, each in any frame.
        base: the canonical span.
        spec: layout of all.
        form: keywords of `form_patch`.

    Returns:
        The patch of the mean deficit; at full rank the mean of the orders' exact patches.

    Raises:
        ValueError: no orders, or spans that do not match.
    """
    orbit = OrbitMean(spec)
    for span in conditioned:
        orbit.add(span, base)
    return orbit.patch(**form)


def blend(patch: Patch, count: int, lost: Deficit, spec: KVSpec, **form: Any) -> Patch:
    """Moves a stored orbit patch of ``count`` orders towards a new order, without the deficits it was formed from.

    The mean is that of what the patch kept, so what truncation dropped stays dropped.

    Raises:
        ValueError: a count < 1, or a deficit that does not fit the patch.
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    if patch.tokens != lost.tokens:
        raise ValueError(f"deficit must cover {patch.tokens} tokens, got {lost.tokens}")
    k, v = lost.k / (count + 1), lost.v / (count + 1)
    for layer in patch.layers:
        delta = patch.delta(layer, k.dtype)
        assert delta is not None
        k[layer] += delta[0].to(k.device) * (count / (count + 1))
        v[layer] += delta[1].to(v.device) * (count / (count + 1))
    merged = compress(replace(lost, k=k, v=v), spec, **form)
    merged.meta.update(orders=count + 1)
    return merged
