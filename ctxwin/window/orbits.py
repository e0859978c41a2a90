"""Orbit patches: one patch for every order, from sampled orders or from those that windows actually meet (Kamera, section 5,
"Reorder")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ctxwin.engines.base import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import compressed
from ctxwin.window.lanes import MAX_ORBIT, canonical_key
from ctxwin.window.state import ORDERS_MET, State, content_name, orbit_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.assembly import Assembly, Work


def meet(assembly: Assembly, state: State, index: int, conditioned: SpanKV, fidelity: Fidelity) -> bool:
    """Takes the order in which the chunk at ``index`` was just conditioned into the mean over the orders met of this set.

    What stood in front must be exact. Nothing happens where the chunk's canonical is not held or the order was met before.
    The mean is kept as a patch that is never served; after 2, 4, 8, ... orders it becomes one that is (`orbit_keys`).
    Beyond 64 no order counts. Cost: an SVD, no forward. Returns whether the order was new.
    """
    from ctxwin.kv.deficit import deficit
    from ctxwin.kv.orbit import met_again

    repo = assembly.engine.repo
    *front, placed = state.placed[: index + 1]
    _, base_key = canonical_key(state, placed.chunk_id)
    if not 2 <= len(front) <= MAX_ORBIT or not assembly.has(base_key):
        return False
    contents = [p.chunk_id for p in front]
    where = partial(orbit_key, state.system_prompt_key, placed.chunk_id, contents)
    mean_key, order = where(f"{fidelity.patch_name},met"), digest("order", contents)
    encoded, spec = assembly.engine.encode(placed.chunk), assembly.engine.spec
    base, mean = repo.get_span(base_key, token_ids=encoded.token_ids), repo.get_patch(mean_key)
    met = [] if mean is None else mean.meta["met"]
    if base is None or order in met or len(met) >= ORDERS_MET[0]:
        return False
    assembly.know_basis(fidelity)
    patch = compressed(met_again(mean, len(met), deficit(conditioned, base[0], spec.kv)), spec.model, spec.kv, fidelity)
    absorbed = [content_name(content) for content in contents]
    patch.meta.update(orders=len(met) + 1, met=[*met, order], chunk=placed.chunk_id, absorbed=absorbed)
    repo.put_patch(mean_key, patch, serves=False)
    if len(met) + 1 in ORDERS_MET:
        key = where(f"{fidelity.patch_name},met={len(met) + 1}")
        assembly.missing.discard(key)
        repo.put_patch(key, patch)
    return True


def prepare(
    assembly: Assembly, state: State, index: int, orders: Iterable[Sequence[int]], fidelity: Fidelity, work: Work
) -> str | None:
    """Forms one patch for the chunk at ``index`` from the mean over ``orders`` of the chunks in front of it.

    Each order is a permutation of ``range(index)``. Cost: a forward of everything in front and of the chunk per order, no
    vision encode. Kamera, section 5 "Reorder". Over a shared basis the mean is projected. Returns the patch key.
    """
    from ctxwin.kv.orbit import OrbitMean

    engine, placed = assembly.engine, state.placed[: index + 1]
    spec, repo = engine.spec, engine.repo
    *fronts, encoded = [engine.encode(p.chunk) for p in placed]
    system_prompt = assembly.system_prompt(state, work)
    base_key, _ = assembly.canonical(state, placed[index], system_prompt, work)
    base = repo.get_span(base_key, token_ids=encoded.token_ids)
    if base is None:
        return None
    mean = OrbitMean(spec.kv)
    for order in orders:
        segments, at = [system_prompt], state.system_prompt_advance
        for front in (fronts[i] for i in order):
            segments.append(Segment(front, at, span=assembly.prefill(segments, front, at, work, placed)))
            at += front.advance
        mean.add(assembly.prefill(segments, encoded, at, work, placed), base[0])  # holds one order's KV at a time
    assembly.know_basis(fidelity)
    patch = compressed(mean.mean, spec.model, spec.kv, fidelity)
    contents = [p.chunk_id for p in placed[:index]]
    absorbed = [content_name(content) for content in contents]
    patch.meta.update(orders=mean.count, spread=mean.spread, chunk=placed[index].chunk_id, absorbed=absorbed)
    key = orbit_key(state.system_prompt_key, placed[index].chunk_id, contents, fidelity.patch_name)
    repo.put_patch(key, patch)
    assembly.missing.discard(key)
    return key
