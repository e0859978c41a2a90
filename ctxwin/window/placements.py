"""Parts of a window's edits that need the engine: placements, media sources, system prompts, rebinding and forgetting."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.validation import check_unicode
from ctxwin.window.antecedents import Numbers
from ctxwin.window.difference import Change
from ctxwin.window.lanes import MAX_ORBIT
from ctxwin.window.state import (
    ANYTHING,
    Conditioning,
    Placed,
    State,
    content_name,
    interval_union,
    orbit_keys,
    patch_key,
    span_key,
)

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine
    from ctxwin.store.spans import SpanRepository

_KEY = re.compile(r"(span|patch|orbit)/[0-9a-f]{64}")
_DEEPEST = 1 << 20  # approximation on approximation; a snapshot may claim more


def _identity(engine: Engine) -> str:
    return digest(engine.spec.name, engine.spec.identity)


def initial_state(engine: Engine, system_prompt: str, budget: int, fidelity: Fidelity) -> State:
    """Return the empty state of a window with ``system_prompt``. Raises BudgetExceeded if that alone does not fit, TypeError or
    ValueError if it is no text."""
    check_unicode("system_prompt", system_prompt)
    encoded = engine.encode_system_prompt(system_prompt)
    if encoded.tokens >= budget:
        told = f"budget must exceed the system prompt's {encoded.tokens} tokens, got {budget}"
        raise BudgetExceeded(told, needed=encoded.tokens + 1, budget=budget)
    return State(
        engine=_identity(engine), system_prompt=system_prompt, system_prompt_tokens=encoded.tokens,
        system_prompt_advance=encoded.advance, budget=budget, fidelity=fidelity,
    )  # fmt: skip


def with_system_prompt(engine: Engine, state: State, system_prompt: str) -> State:
    """Return ``state`` with another system prompt: the same chunks, with KV only where the fidelity may serve lane ``edited``."""
    new = initial_state(engine, system_prompt, state.budget, state.fidelity)
    keeps_kv = state.fidelity.mode == "auto" or state.fidelity.allows("edited")
    old_ids, new_ids = (engine.encode_system_prompt(text).token_ids for text in (state.system_prompt, system_prompt))
    change = Change.between(old_ids, new_ids)

    def behind(entry: Placed) -> Placed:
        kv = entry.kv
        if not keeps_kv or kv is None or not kv.has_known_text:
            return entry.replace(kv=None, unseen=())
        difference = change.applied_to(kv.difference)
        changes = {"exact": False, "depth": kv.depth + kv.exact, "lane": "edited", "difference": difference}
        return entry.replace(kv=kv.model_copy(update=changes), unseen=())

    entries, evicted = (tuple(map(behind, chunks)) for chunks in (state.placed, state.evicted))
    kept = ("window", "root", "low_water", "prefill", "version", "arrivals", "libraries")
    fields = {name: getattr(state, name) for name in kept}
    return new.replace(**fields, placed=entries, evicted=evicted)


def new_placement(engine: Engine, state: State, chunk: Chunk, seed: str) -> Placed:
    """Return a new placement of ``chunk``, encoded. Its id follows from ``seed``, the arrivals so far and the content."""
    encoded = engine.encode(chunk)
    alone = state.system_prompt_tokens + encoded.tokens
    if alone > state.budget:
        told = f"a chunk must fit the budget of {state.budget} tokens beside the system prompt ({state.system_prompt_tokens})"
        told += f", got a chunk of {encoded.tokens}; raise the budget or split it"
        raise BudgetExceeded(told, needed=alone, budget=state.budget)
    keep_source(engine, chunk)
    return Placed(
        id=f"{state.arrivals}-{digest('placement', seed, state.arrivals, chunk.id)[:6]}", chunk=chunk.light(),
        chunk_id=chunk.id, tokens=encoded.tokens, advance=encoded.advance, media=encoded.media_ranges,
        arrival=state.arrivals, read=state.version + 1, pinned=chunk.pin,
    )  # fmt: skip


def keep_source(engine: Engine, chunk: Chunk) -> None:
    """Store the lossless bytes of in-memory media, so that the chunk can be rebuilt after a restart."""
    if not chunk.keep_source:
        return
    for part in chunk.media:
        frames = chunk.pixels(part) if part.source is None else None
        if frames is not None and not engine.repo.contains(f"source/{part.content}"):
            engine.repo.put_source(part.content, part.pack(frames))


def rebind(engine: Engine, state: State, patch_name: str) -> State:
    """Return a snapshot's state for ``engine``: with the KV that can be proven on the same model, else encoded again.

    A snapshot may come from anybody. Ids of contents and the system prompt's length are derived; of KV only that is kept whose
    keys follow from its provenance, or whose record will be compared with it when it is loaded. Tokens are compared when the
    window is asked. Raises ValueError for a state that no window can have.

    Args:
        patch_name: `Fidelity.patch_name` of the resolved fidelity: patches of another one are not kept.
    """
    _check(state)
    system_prompt, same = engine.encode_system_prompt(state.system_prompt), state.engine == _identity(engine)
    budget, mark = min(state.budget, engine.spec.max_tokens), state.low_water
    if isinstance(mark, int):
        mark = max(1, mark * budget // state.budget)
    state = state.replace(engine=_identity(engine), budget=budget, low_water=mark)
    state = state.replace(system_prompt_tokens=system_prompt.tokens, system_prompt_advance=system_prompt.advance)
    contents = {p.id: p.chunk.id for p in (*state.placed, *state.evicted)}
    arrivals = Numbers({p.id: p.arrival for p in (*state.placed, *state.evicted)})

    def bound(entry: Placed, encode: bool) -> Placed:
        if entry.chunk_id != contents[entry.id]:
            entry = entry.replace(chunk_id=contents[entry.id])
        if same:
            kv = _proven(state, entry, contents, arrivals, patch_name)
            return entry if kv is entry.kv else entry.replace(kv=kv)
        entry = entry.replace(kv=None, seen=False, unseen=(), media=())
        if not encode:
            return entry
        encoded = engine.encode(entry.chunk)
        return entry.replace(tokens=encoded.tokens, advance=encoded.advance, media=encoded.media_ranges)

    return state.replace(
        placed=tuple(bound(p, True) for p in state.placed), evicted=tuple(bound(p, False) for p in state.evicted)
    )


def _check(state: State) -> None:
    everything = (*state.placed, *state.evicted)
    if len({p.id for p in everything}) < len(everything) or len({p.arrival for p in everything}) < len(everything):
        raise ValueError("a snapshot must hold every placement once; send it as the window gave it")
    if state.version < 0 or state.budget < 1 or any(not 0 <= p.arrival < state.arrivals for p in everything):
        raise ValueError("a snapshot must count versions, tokens and arrivals; send it as the window gave it")
    if any(p.tokens < 1 or p.advance < 1 for p in everything):
        raise ValueError("a snapshot's chunks must have at least one token and position each")


def _proven(
    state: State, entry: Placed, contents: Mapping[str, str], arrivals: Numbers, patch_name: str
) -> Conditioning | None:
    """Return the conditioning of a placement as far as its keys prove it, else None.

    Whether KV is exact shows in its key. A patch's key names what it makes of what. That a span under any other key has the
    provenance claimed is compared when it is loaded (`ctxwin.window.assembly`).
    """
    kv = entry.kv
    if kv is None or not all(_KEY.fullmatch(key) for key in (kv.span, kv.patch, kv.base) if key is not None):
        return None
    if kv.patch is not None:
        patch_keys = [patch_key(kv.provenance, kv.span, patch_name)]
        if kv.antecedents.length <= MAX_ORBIT and all(a in contents for a in kv.antecedents):
            antecedent_contents = [contents[a] for a in kv.antecedents]
            patch_keys += orbit_keys(state.system_prompt_key, entry.chunk_id, antecedent_contents, patch_name)
        if kv.patch not in patch_keys:
            return None
    exact = kv.patch is None and kv.span == span_key(kv.provenance) and kv.lane != "edited"
    absorbed = kv.absorbed if kv.absorbed or exact or not kv.antecedents else (0, state.arrivals)
    places = arrivals.of(kv.antecedents)
    if (places := places[places >= 0]).size:
        absorbed = interval_union(absorbed, (int(places.min()), int(places.max())))
    depth = 0 if exact else min(max(kv.depth, 1), _DEEPEST)
    changes = {"exact": exact, "depth": depth, "absorbed": absorbed}
    return kv if changes.items() <= vars(kv).items() else kv.model_copy(update=changes)


def forget(engine: Engine, state: State, entry: Placed, others: Iterable[Placed] = ()) -> None:
    """Delete all that the store holds of ``entry``, unless its content is still in ``state``: its embeddings and source, its
    KV, and the KV of all chunks that absorbed it, in any order, window or version.

    ``others`` are the chunks of other windows. Media that they hold stay: their pixels may be nowhere else. KV that another
    window leases stays as well, since it is served there; any other is computed again where it is missed. Cost: a read of
    every stored span and patch.
    """
    remaining = (*state.placed, *state.evicted)
    media = {part.content for part in entry.chunk.media}
    # The same picture may stand in another chunk, under another line of text.
    sharing = [p for p in (*remaining, *others) if any(part.content in media for part in p.chunk.media)]
    shared = {part.content for p in sharing for part in p.chunk.media}
    keys = {f"source/{content}" for content in media - shared}
    if media:
        keys |= engine.media_keys(entry.chunk).difference(*(engine.media_keys(p.chunk) for p in sharing))
    if all(p.chunk_id != entry.chunk_id for p in remaining):
        keys.update(stored_kv(engine.repo, {entry.chunk_id}))
    for key in keys - state.keys():
        if not engine.repo.leased(key):
            engine.repo.delete(key)


def stored_kv(repo: SpanRepository, chunks: Collection[str]) -> Iterator[str]:
    """Yield the keys of the stored KV of ``chunks`` (ids) and of all KV that absorbed one. Cost: a read of every stored span
    and patch."""
    names = {ANYTHING, *map(content_name, chunks)}
    repo.flush()
    for key in list(repo.store.list()):
        if key.startswith(("span/", "patch/", "orbit/")):
            record = repo.record_of(key)
            if record.get("chunk") in chunks or not names.isdisjoint(record.get("absorbed", [ANYTHING])):
                yield key
