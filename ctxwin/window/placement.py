"""What stands behind a window's edits: new placements, sources of media, other headers, other engines, forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxwin.errors import BudgetExceeded, ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.media import pack_frames
from ctxwin.window.edits import absorbers
from ctxwin.window.lanes import canonical_key
from ctxwin.window.state import Placed, State, patch_key

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine


def opened(engine: Engine, system_prompt: str, budget: int, fidelity: Fidelity) -> State:
    """The empty state of a window behind ``system_prompt``; BudgetExceeded where that alone does not fit."""
    encoded = engine.encode_system_prompt(system_prompt)
    if encoded.tokens >= budget:
        raise BudgetExceeded(
            f"budget must exceed the system prompt's {encoded.tokens} tokens, got {budget}",
            needed=encoded.tokens + 1,
            budget=budget,
        )
    return State(
        engine=digest(engine.spec.name, engine.spec.identity), system_prompt=system_prompt, system_prompt_tokens=encoded.tokens,
        system_prompt_advance=encoded.advance, budget=budget, fidelity=fidelity,
    )  # fmt: skip


def behind(engine: Engine, state: State, system_prompt: str) -> State:
    """``state`` behind another system prompt: the same chunks without KV."""
    strip = {"kv": None, "unseen": ()}
    return opened(engine, system_prompt, state.budget, state.fidelity).replace(
        version=state.version,
        arrivals=state.arrivals,
        placed=tuple(p.replace(**strip) for p in state.placed),
        evicted=tuple(p.replace(**strip) for p in state.evicted),
    )


def placement(engine: Engine, state: State, chunk: Chunk, seed: str) -> Placed:
    """A new placement of ``chunk``, encoded; its id follows from ``seed``, the arrivals so far and the content."""
    encoded = engine.encode(chunk)
    alone = state.system_prompt_tokens + encoded.tokens
    if alone > state.budget:
        raise BudgetExceeded(
            f"a chunk must fit the budget of {state.budget} tokens beside the system prompt "
            f"({state.system_prompt_tokens}), got a chunk of {encoded.tokens}; raise the budget or split it",
            needed=alone, budget=state.budget,
        )  # fmt: skip
    keep_source(engine, chunk)
    return Placed(
        id=f"{state.arrivals}-{digest('placement', seed, state.arrivals, chunk.id)[:6]}", chunk=chunk.light(), chunk_id=chunk.id,
        tokens=encoded.tokens, advance=encoded.advance, arrival=state.arrivals, read=state.version + 1, pinned=chunk.pin,
    )  # fmt: skip


def keep_source(engine: Engine, chunk: Chunk) -> None:
    """Stores the lossless bytes of in-memory media, so that the chunk can be rebuilt after a restart."""
    if not chunk.keep_source:
        return
    for part in chunk.media:
        frames = chunk.pixels(part) if part.source is None else None
        if frames is not None and not engine.repo.contains(f"source/{part.content}"):
            engine.repo.put_source(part.content, pack_frames(frames))


def rebind(engine: Engine, state: State) -> State:
    """``state`` for ``engine``: as it is on the same model, encoded again without KV on another one."""
    mine = digest(engine.spec.name, engine.spec.identity)
    if state.engine == mine:
        return state
    system_prompt = engine.encode_system_prompt(state.system_prompt)

    def again(placed: Placed) -> Placed:
        encoded = engine.encode(placed.chunk)
        return placed.replace(tokens=encoded.tokens, advance=encoded.advance, kv=None, seen=False, unseen=())

    return state.replace(
        engine=mine, system_prompt_tokens=system_prompt.tokens, system_prompt_advance=system_prompt.advance,
        budget=min(state.budget, engine.spec.max_tokens),
        placed=tuple(again(p) for p in state.placed),
        evicted=tuple(p.replace(kv=None, seen=False, unseen=()) for p in state.evicted),
    )  # fmt: skip


def forget(
    engine: Engine, state: State, gone: Placed, tainted: Sequence[Placed], past: Sequence[State], patch: str
) -> None:
    """Deletes stored KV that carries something of ``gone``; its embeddings and source too, unless placed elsewhere.

    Keys that another window leases stay: it still shows the chunk.
    """
    repo = engine.repo
    carriers = [gone, *tainted]
    for old in past:  # KV of earlier orders absorbed it too
        taint = absorbers(old, gone.id) | {gone.id}
        carriers += [p for p in (*old.placed, *old.evicted) if p.id in taint]
    keys: set[str] = set()
    for p in carriers:
        if p.kv:
            base = canonical_key(state, p.chunk_id)[1]
            keys |= {p.kv.span, patch_key(p.kv.provenance, base, patch)} | ({p.kv.patch} if p.kv.patch else set())
    left = (*state.placed, *state.evicted)
    if all(p.chunk_id != gone.chunk_id for p in left):
        keys.add(canonical_key(state, gone.chunk_id)[1])
    # The same picture may stand in another chunk, under another line of text.
    shown = {part.content for p in left for part in p.chunk.media}
    keys |= {f"source/{part.content}" for part in gone.chunk.media if part.content not in shown}
    try:
        seen = {m.key for m in engine.encode(gone.chunk).media}
    except ChunkUnavailable:
        seen = set()  # neither embeddings nor pixels are left
    if seen:
        sharing = [p for p in left if {m.content for m in p.chunk.media} & {m.content for m in gone.chunk.media}]
        keys |= seen - {m.key for p in sharing for m in engine.encode(p.chunk).media}
    for key in keys - state.keys():
        if not repo.leased(key):
            repo.delete(key)
