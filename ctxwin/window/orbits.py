"""Orbit patches: one patch for every order, from a few orders of a set or from those that windows actually meet (Kamera,
section 5, "Reorder").

A set of K chunks is prepared by K forwards, each over all of it, in orders that put every chunk at every place once. A
patch belongs to a chunk and a set of antecedents. Behind the whole set all orders count and their deficits are averaged, as
in the paper. Within it a chunk is observed behind one set of each size, and the deficit behind another set is fitted to
those (`ctxwin.kv.orbit.set_weights`), where the paper runs a forward for each order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, TypedDict

from ctxwin.engines.segments import Encoded
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import compress_deficit
from ctxwin.window.lanes import MAX_ORBIT, canonical_key, system_prompt_key
from ctxwin.window.state import OBSERVED_ORDERS, Placed, State, content_name, orbit_key

if TYPE_CHECKING:
    from ctxwin.kv.deficit import Deficit
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.layout import Work
    from ctxwin.window.protocols import SpanProvider

MAX_ORDERS = 1024
"""Most orders that may be asked for."""
MAX_COVERED = 6
"""Most chunks of a set whose own orders are covered: each has a patch for every subset of the others, 31 of six chunks."""


class OrbitPlan(TypedDict):
    """Cost of `Window.maintenance.prepare_orbit`: its ``forwards``, the ``tokens`` that they compute at most (an engine's prefix
    cache may hold some), and the number of ``patches`` that it stores."""

    forwards: int
    tokens: int
    patches: int


def observe_order(
    provider: SpanProvider, state: State, index: int, conditioned: SpanKV, fidelity: Fidelity, key: str = ""
) -> bool:
    """Add the order in which the chunk at ``index`` was just conditioned to the mean over the observed orders of this set.

    Its prefix must be exact. Nothing happens if its canonical is not stored or the order was observed before.
    The mean is kept as a patch that is never served; after 2, 4, 8, ... orders it becomes one that is (`orbit_keys`).
    Beyond 64 no order counts. Cost: an SVD, no forward. Returns whether the order was new.

    ``key``: of ``conditioned`` in the store. With it a set's first order, mostly its only one, is noted for now: it joins the
    mean with the second one if its KV is still stored then.
    """
    from ctxwin.kv.deficit import deficit
    from ctxwin.kv.orbit import mixture, update_mean

    repo = provider.engine.repo
    *preceding, entry = state.placed[: index + 1]
    _, base_key = canonical_key(state, entry.chunk_id)
    if not 2 <= len(preceding) <= MAX_ORBIT or not provider.has(base_key):
        return False
    contents = [p.chunk_id for p in preceding]
    key_of = partial(orbit_key, state.system_prompt_key, entry.chunk_id, contents)
    mean_key, order = key_of(f"{fidelity.patch_name},met"), digest("order", contents)
    encoded, spec = provider.engine.encode(entry.chunk), provider.engine.spec
    base, mean = repo.get_span(base_key, token_ids=encoded.token_ids), repo.get_patch(mean_key)
    orders = [] if mean is None else mean.meta["met"]
    if base is None or order in orders or len(orders) >= OBSERVED_ORDERS[0]:
        return False
    mean_deficit = None
    if key and not orders:
        note = f"chunk/{mean_key.removeprefix('orbit/')}"
        noted = repo.get_json(note)
        earlier, stored = noted if isinstance(noted, list) and len(noted) == 2 else ("", "")
        if earlier == order:
            return False
        first = repo.get_span(f"span/{stored}", token_ids=encoded.token_ids, exact=True) if earlier else None
        if first is None:
            return repo.put_json(note, [order, key.removeprefix("span/")])
        orders, both = [earlier], (first[0], conditioned)
        mean_deficit = mixture([deficit(span, base[0], spec.kv) for span in both], [0.5, 0.5])
    provider.know_basis(fidelity)
    mean_deficit = mean_deficit or update_mean(mean, len(orders), deficit(conditioned, base[0], spec.kv))
    patch = compress_deficit(mean_deficit, spec.model, spec.kv, fidelity)
    absorbed = [content_name(content) for content in contents]
    patch.meta.update(orders=len(orders) + 1, met=[*orders, order], chunk=entry.chunk_id, absorbed=absorbed)
    repo.put_patch(mean_key, patch, serves=False)
    if len(orders) + 1 in OBSERVED_ORDERS:
        served_key = key_of(f"{fidelity.patch_name},met={len(orders) + 1}")
        provider.missing.discard(served_key)
        repo.put_patch(served_key, patch)
    return True


def balanced_orders(k: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return up to ``count`` orders of ``range(k)``, at most ``k``: those of a Latin square, which ``seed`` draws.

    Among all ``k`` of them each chunk stands at each place once, and for an even ``k`` right behind each other one once
    (Williams 1949), so that what it absorbs is observed behind sets that differ.
    """
    zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(k)]
    names = Random(seed).sample(range(k), k) if seed else range(k)
    return [tuple(names[(place + shift) % k] for place in zigzag) for shift in range(min(k, count))]


def plan(provider: SpanProvider, state: State, k: int, orders: Sequence[Sequence[int]]) -> OrbitPlan:
    """Return the cost of `prepare`."""
    entries, _, _, unformed = _extent(provider, state, k, orders)
    system_prompt = state.system_prompt_tokens * (not provider.has(system_prompt_key(state)))
    tokens = len(orders) * sum(p.tokens for p in entries) + sum(entries[i].tokens for i in unformed) + system_prompt
    within = k * (2 ** (k - 1) - 1) if k <= MAX_COVERED else 0
    return OrbitPlan(
        forwards=len(orders) + len(unformed) + bool(system_prompt), tokens=tokens, patches=within + len(entries) - k
    )


def prepare(
    provider: SpanProvider, state: State, k: int, orders: Sequence[Sequence[int]], fidelity: Fidelity, work: Work
) -> list[int]:
    """Form patches for the first ``k`` chunks in every order and for those behind them; return the indices of the chunks that
    got all of theirs. ``orders``: `balanced_orders`.

    Cost: `plan`, together where the engine batches; no vision encode. Memory: the KV of the set, ``k`` times. Over a shared
    basis deficits are projected.
    """
    import torch

    from ctxwin.kv.deficit import deficit
    from ctxwin.kv.orbit import OrbitMean, mixture, set_weights

    engine, repo = provider.engine, provider.repo
    entries, keys, patched, unformed = _extent(provider, state, k, orders)
    spec, encodeds = engine.spec, [engine.encode(p.chunk) for p in entries]
    system_prompt = provider.computed_system_prompt(provider.system_prompt(state, work), work)
    bases: dict[str, SpanKV | None] = {}
    means = {i: OrbitMean(spec.kv) for i in patched if i >= k}
    observed: dict[int, list[tuple[frozenset[int], SpanKV]]] = {i: [] for i in patched if i < k}

    def base_of(i: int) -> SpanKV | None:
        if keys[i] not in bases:
            stored = repo.get_span(keys[i], token_ids=encodeds[i].token_ids)
            bases[keys[i]] = stored and stored[0]
        return bases[keys[i]]

    # Canonicals first: deficits are counted from them.
    runs = [*([i] for i in unformed), *([*order, *range(k, len(entries))] for order in orders)]
    origin, targets = system_prompt.encoded.advance, [Encoded.joined([encodeds[i] for i in run]) for run in runs]
    for run, whole in zip(runs, provider.prefill_all(system_prompt, targets, origin, work, entries), strict=True):
        begin, start = 0, origin
        for j, i in enumerate(run):
            encoded, end = encodeds[i], begin + encodeds[i].tokens
            part = replace(whole.slice(begin, end), positions=torch.from_numpy(encoded.positions.copy()), start=start)
            begin, start = end, start + encoded.advance
            if i in means and len(run) > 1:
                if (base := base_of(i)) is not None:
                    means[i].add(part, base)
                continue
            if len(run) > 1:
                part = replace(part, k=part.k.clone(), v=part.v.clone())  # not all of the forward with it
            if j and i in observed:
                observed[i].append((frozenset(run[:j]), part))
            elif not j and (len(run) == 1 or (i in observed and not spec.kv.recurrent)):  # a part has no states
                bases[keys[i]] = part
                if not provider.has(keys[i]):
                    provenance, _ = canonical_key(state, entries[i].chunk_id)
                    provider.put(keys[i], part, encoded, provenance=provenance)
    provider.know_basis(fidelity)

    def store(i: int, preceding: Sequence[int], mean: Deficit, among: Sequence[int], orders: int) -> bool:
        patch = compress_deficit(mean, spec.model, spec.kv, fidelity)
        absorbed = [content_name(entries[a].chunk_id) for a in among]
        patch.meta.update(chunk=entries[i].chunk_id, absorbed=absorbed, orders=orders)
        contents = [entries[a].chunk_id for a in preceding]
        key = orbit_key(state.system_prompt_key, entries[i].chunk_id, contents, fidelity.patch_name)
        provider.missing.discard(key)
        return repo.put_patch(key, patch)

    covered = []
    for i in patched:
        base = base_of(i)
        if base is None:
            continue
        if i in means:
            done = [store(i, range(i), means[i].mean, range(i), means[i].count)]
        else:
            sets = [preceding for preceding, _ in observed[i]]
            deficits = [deficit(span, base, spec.kv) for _, span in observed[i]]
            others = [a for a in range(k) if a != i]
            done = []
            for preceding in (c for n in range(1, k) for c in combinations(others, n)):
                among = frozenset(preceding)
                mean = mixture(deficits, set_weights(sets, among))
                done.append(store(i, preceding, mean, others, sets.count(among)))
        if all(done):
            covered.append(i)
    return covered


def _extent(
    provider: SpanProvider, state: State, k: int, orders: Sequence[Sequence[int]]
) -> tuple[tuple[Placed, ...], list[str], range, list[int]]:
    """Return the chunks of each forward, the keys of their canonicals, the indices of those that get patches, and of those
    whose canonicals take a forward of their own: those that no order begins with."""
    entries = state.placed[: MAX_ORBIT + 1]
    keys = [canonical_key(state, p.chunk_id)[1] for p in entries]
    patched = range(0 if 1 < k <= MAX_COVERED else k, len(entries))
    led = set() if provider.engine.spec.kv.recurrent else {keys[order[0]] for order in orders}
    unformed = {keys[i]: i for i in patched if (i >= k or keys[i] not in led) and not provider.has(keys[i])}
    return entries, keys, patched, list(unformed.values())
