"""Orbit patches: one patch for every order, from sampled orders or from those that windows actually meet (Kamera, section 5,
"Reorder")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import compress_deficit
from ctxwin.window.lanes import MAX_ORBIT, canonical_key
from ctxwin.window.state import OBSERVED_ORDERS, State, content_name, orbit_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.layout import Work
    from ctxwin.window.protocols import SpanProvider


def observe_order(provider: SpanProvider, state: State, index: int, conditioned: SpanKV, fidelity: Fidelity) -> bool:
    """Add the order in which the chunk at ``index`` was just conditioned to the mean over the observed orders of this set.

    Its prefix must be exact. Nothing happens if its canonical is not stored or the order was observed before.
    The mean is kept as a patch that is never served; after 2, 4, 8, ... orders it becomes one that is (`orbit_keys`).
    Beyond 64 no order counts. Cost: an SVD, no forward. Returns whether the order was new.
    """
    from ctxwin.kv.deficit import deficit
    from ctxwin.kv.orbit import update_mean

    repo = provider.engine.repo
    *front, entry = state.placed[: index + 1]
    _, base_key = canonical_key(state, entry.chunk_id)
    if not 2 <= len(front) <= MAX_ORBIT or not provider.has(base_key):
        return False
    contents = [p.chunk_id for p in front]
    key_of = partial(orbit_key, state.system_prompt_key, entry.chunk_id, contents)
    mean_key, order = key_of(f"{fidelity.patch_name},met"), digest("order", contents)
    encoded, spec = provider.engine.encode(entry.chunk), provider.engine.spec
    base, mean = repo.get_span(base_key, token_ids=encoded.token_ids), repo.get_patch(mean_key)
    orders = [] if mean is None else mean.meta["met"]
    if base is None or order in orders or len(orders) >= OBSERVED_ORDERS[0]:
        return False
    provider.know_basis(fidelity)
    patch = compress_deficit(
        update_mean(mean, len(orders), deficit(conditioned, base[0], spec.kv)), spec.model, spec.kv, fidelity
    )
    absorbed = [content_name(content) for content in contents]
    patch.meta.update(orders=len(orders) + 1, met=[*orders, order], chunk=entry.chunk_id, absorbed=absorbed)
    repo.put_patch(mean_key, patch, serves=False)
    if len(orders) + 1 in OBSERVED_ORDERS:
        key = key_of(f"{fidelity.patch_name},met={len(orders) + 1}")
        provider.missing.discard(key)
        repo.put_patch(key, patch)
    return True


def prepare(
    provider: SpanProvider, state: State, index: int, orders: Iterable[Sequence[int]], fidelity: Fidelity, work: Work
) -> str | None:
    """Form one patch for the chunk at ``index`` from the mean over ``orders`` of the chunks before it.

    Each order is a permutation of ``range(index)``. Cost: a forward of everything in front and of the chunk per order, no
    vision encode. Kamera, section 5 "Reorder". Over a shared basis the mean is projected. Returns the patch key.
    """
    from ctxwin.kv.orbit import OrbitMean

    engine, entries = provider.engine, state.placed[: index + 1]
    spec, repo = engine.spec, engine.repo
    *fronts, encoded = [engine.encode(p.chunk) for p in entries]
    system_prompt = provider.system_prompt(state, work)
    base_key, _ = provider.canonical(state, entries[index], system_prompt, work)
    base = repo.get_span(base_key, token_ids=encoded.token_ids)
    if base is None:
        return None
    mean = OrbitMean(spec.kv)
    for order in orders:
        segments, at = [system_prompt], state.system_prompt_advance
        for front in (fronts[i] for i in order):
            segments.append(Segment(front, at, span=provider.prefill(segments, front, at, work, entries)))
            at += front.advance
        mean.add(provider.prefill(segments, encoded, at, work, entries), base[0])  # holds one order's KV at a time
    provider.know_basis(fidelity)
    patch = compress_deficit(mean.mean, spec.model, spec.kv, fidelity)
    contents = [p.chunk_id for p in entries[:index]]
    absorbed = [content_name(content) for content in contents]
    patch.meta.update(orders=mean.count, spread=mean.spread, chunk=entries[index].chunk_id, absorbed=absorbed)
    key = orbit_key(state.system_prompt_key, entries[index].chunk_id, contents, fidelity.patch_name)
    repo.put_patch(key, patch)
    provider.missing.discard(key)
    return key
