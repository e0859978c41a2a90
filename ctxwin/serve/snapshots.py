"""Snapshots that come from outside: what they claim is bounded first, then compared with what their content has.

And the compact form in which the server keeps windows in its store.
"""

from __future__ import annotations

import math
from typing import Any

from ctxwin.chunk import Chunk, TextPart, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.errors import ChunkUnavailable
from ctxwin.hashing import digest
from ctxwin.serve.errors import TooLarge
from ctxwin.serve.limits import Allowance, Limits
from ctxwin.serve.specs import FPS, without_sources
from ctxwin.window.state import Antecedents, Order, Placed, State

_ANTECEDENTS = {name: {"__all__": {"kv": {"antecedents"}}} for name in ("placed", "evicted")}


def pack(state: State) -> dict[str, Any]:
    """A snapshot as JSON of O(n) for the usual n chunks: what stood in front of each is a slice of one list of ids.

    A plain snapshot has O(n^2) ids, too many to be written after every edit of a long window.
    """
    ids: list[str] = []
    places: dict[str, int] = {}
    slices: list[tuple[int, int] | None] = []
    for placed in (*state.placed, *state.evicted):
        if placed.kv is None:
            slices.append(None)
            continue
        front = list(placed.kv.antecedents)
        begin = places.get(front[0], len(ids)) if front else 0
        known = len(ids[begin : begin + len(front)])
        if ids[begin : begin + known] != front[:known]:  # another order of the same chunks
            begin, known = len(ids), 0
        for placement in front[known:]:
            places[placement] = len(ids)
            ids.append(placement)
        slices.append((begin, len(front)))
    return {"state": state.model_dump(mode="json", exclude=_ANTECEDENTS), "ids": ids, "fronts": slices}


def unpack(packed: dict[str, Any]) -> State:
    """What was packed; ValueError, TypeError or KeyError for anything else."""
    data, ids, fronts = packed["state"], [str(i) for i in packed["ids"]], packed["fronts"]
    longest: dict[int, int] = {}
    for begin, length in filter(None, fronts):
        if not 0 <= begin <= begin + length <= len(ids):
            raise ValueError(f"a packed snapshot must name ids that it has, got {length} from {begin}")
        longest[begin] = max(length, longest.get(begin, 0))
    orders = {begin: Order(ids[begin : begin + length]) for begin, length in longest.items()}
    given = iter(fronts)

    def whole(placed: dict[str, Any]) -> dict[str, Any]:
        front = next(given)
        if front is None:
            return placed
        return {**placed, "kv": {**placed["kv"], "antecedents": Antecedents(orders[front[0]], front[1])}}

    if len(fronts) != len(data["placed"]) + len(data["evicted"]):
        raise ValueError(f"a packed snapshot must have a front for every chunk, got {len(fronts)}")
    lists = {name: list(map(whole, data[name])) for name in ("placed", "evicted")}
    return State.model_validate({**data, **lists})


def check_snapshot(engine: Engine, state: State, limits: Limits) -> State:
    """The snapshot without paths: a client must not make the server read files.

    Raises:
        ValueError: no window on ``engine`` gave it: the engine and the budget go by its tokens and positions, which must be
            those that its content has.
        TooLarge, BudgetExceeded: beyond the limits of the server.

    Cost: encoding every placed chunk; media whose embeddings are stored take no run of the vision tower.
    """
    if not 1 <= state.budget <= engine.spec.max_tokens:
        raise ValueError(
            f"the snapshot's budget must be in 1..{engine.spec.max_tokens} (what the engine takes), got {state.budget}"
        )
    Allowance(limits).check_chunks(len(state.placed) + len(state.evicted))
    most = limits.text(engine.spec.max_tokens)
    if len(state.system_prompt) > most:
        raise TooLarge(
            f"a system prompt must have at most {most} characters (--max-text), got {len(state.system_prompt)}"
        )
    for placed in (*state.placed, *state.evicted):
        _check_size(placed.chunk, limits, most)
    text = sum(len(p.text) for placed in state.placed for p in placed.chunk.parts if isinstance(p, TextPart))
    if text > most:
        raise TooLarge(f"the text of a window must have at most {most} characters (--max-text), got {text}")
    state = state.replace(
        placed=tuple(map(_without_paths, state.placed)), evicted=tuple(map(_without_paths, state.evicted))
    )
    _check_counts(engine, state)
    return state


def _check_size(chunk: Chunk, limits: Limits, most: int) -> None:
    """Raises TooLarge or ValueError for a chunk that no request could have uploaded."""
    allowance = Allowance(limits)
    text = sum(len(part.text) for part in chunk.parts if isinstance(part, TextPart))
    ids = sum(len(part.ids) for part in chunk.parts if isinstance(part, TokensPart))
    if max(text, ids) > most:
        raise TooLarge(f"a chunk must have at most {most} characters (--max-text), got {max(text, ids)}")
    for part in chunk.media:
        frames, height, width = part.shape
        if min(part.shape) < 1:
            raise ValueError(f"media must have frames, height and width >= 1, got {list(part.shape)}")
        allowance.take_frames(frames, frames * height * width)
        if part.fps is not None and not (math.isfinite(part.fps) and FPS[0] <= part.fps <= FPS[1]):
            raise ValueError(f"fps must be in {FPS[0]}..{FPS[1]}, got {part.fps}")


def _without_paths(placed: Placed) -> Placed:
    parts = without_sources(placed.chunk.parts)
    return placed.replace(chunk=placed.chunk.model_copy(update={"parts": parts}))


def _check_counts(engine: Engine, state: State) -> None:
    everything = (*state.placed, *state.evicted)
    if len({p.id for p in everything}) < len(everything) or min(state.version, state.arrivals) < 0:
        raise ValueError(
            "a snapshot must hold every placement once, and no negative counts; send it as the window gave it"
        )
    for p in everything:
        if p.chunk_id != p.chunk.id:
            raise ValueError(f"the snapshot's chunk {p.id} must have the content {p.chunk_id}, got {p.chunk.id}")
    if state.engine != digest(engine.spec.name, engine.spec.identity):
        return  # of another model: everything is counted again
    system_prompt = engine.encode_system_prompt(state.system_prompt)
    claimed = state.system_prompt_tokens, state.system_prompt_advance
    counts = [("system_prompt", *claimed, system_prompt.tokens, system_prompt.advance)]
    for p in state.placed:
        try:
            encoded = engine.encode(p.chunk)
        except ChunkUnavailable:  # what needs its content will say so; until then it only must not lead out of range
            if p.tokens < 1 or not 0 <= p.advance <= engine.spec.max_tokens:
                raise
        else:
            counts.append((f"chunk {p.id}", p.tokens, p.advance, encoded.tokens, encoded.advance))
    for what, tokens, advance, *true in counts:
        if [tokens, advance] != true:
            raise ValueError(
                f"the snapshot's {what} must have {true[0]} tokens over {true[1]} positions, got {tokens} over {advance}; "
                "send it as the window gave it"
            )
    if state.tokens > state.budget:
        raise ValueError(f"the snapshot must fit its budget of {state.budget} tokens, got {state.tokens}")
