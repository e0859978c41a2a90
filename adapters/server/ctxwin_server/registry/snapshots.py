"""Validation of snapshots from clients: their claims are bounded first, then compared with their content."""

import math
from typing import Any

from ctxwin.chunk import Chunk, TextPart, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.errors import ChunkUnavailable
from ctxwin.hashing import digest
from ctxwin.window.state import Placed, State
from ctxwin_client.errors import TooLarge
from ctxwin_server.protocol.limits import Allowance, Limits
from ctxwin_server.protocol.schemas import FPS, without_sources


def read_snapshot(data: Any, limits: Limits) -> State:
    """Parse a snapshot; raise ValueError if it is malformed, TooLarge if it holds too many ids, or steps that find them."""
    state = State.model_validate(data)
    fronts = [p.kv.antecedents for p in (*state.placed, *state.evicted) if p.kv]
    if (count := sum(front.length + front.version // 16 for front in fronts)) > limits.max_json_values:
        raise TooLarge(
            f"the chunks of a snapshot must name at most {limits.max_json_values} antecedents (--max-json-values), got "
            f"{count}; take the snapshot of a smaller window, or raise it"
        )
    return state


def check_snapshot(engine: Engine, state: State, limits: Limits) -> State:
    """Validate a snapshot and return it without paths: a client must not make the server read files.

    Raises:
        ValueError: its tokens and positions, on which engine and budget rely, differ from those of its content.
        TooLarge, BudgetExceeded: beyond the limits of the server.

    Cost: encoding every placed chunk; media whose embeddings are stored take no run of the vision tower.
    """
    if not 1 <= state.budget <= engine.spec.max_tokens:
        raise ValueError(
            f"the snapshot's budget must be in 1..{engine.spec.max_tokens} (what the engine takes), got {state.budget}"
        )
    Allowance(limits).check_chunks(len(state.placed) + len(state.evicted))
    max_text = limits.text(engine.spec.max_tokens)
    if len(state.system_prompt) > max_text:
        got = len(state.system_prompt)
        raise TooLarge(f"a system prompt must have at most {max_text} characters (--max-text), got {got}")
    for entry in (*state.placed, *state.evicted):
        _check_size(entry.chunk, limits, max_text)
    text = sum(len(p.text) for entry in state.placed for p in entry.chunk.parts if isinstance(p, TextPart))
    if text > max_text:
        raise TooLarge(f"the text of a window must have at most {max_text} characters (--max-text), got {text}")
    placed, evicted = (tuple(map(_without_paths, entries)) for entries in (state.placed, state.evicted))
    state = state.replace(placed=placed, evicted=evicted)
    _check_counts(engine, state)
    return state


def _check_size(chunk: Chunk, limits: Limits, most: int) -> None:
    """Raise TooLarge or ValueError for a chunk that no request could have uploaded."""
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


def _without_paths(entry: Placed) -> Placed:
    return entry.replace(chunk=entry.chunk.model_copy(update={"parts": without_sources(entry.chunk.parts)}))


def _check_counts(engine: Engine, state: State) -> None:
    entries = (*state.placed, *state.evicted)
    if len({p.id for p in entries}) < len(entries) or min(state.version, state.arrivals) < 0:
        raise ValueError("a snapshot must hold every placement once, no negative counts; send it as the window gave it")
    for p in entries:
        if p.chunk_id != p.chunk.id:
            raise ValueError(f"the snapshot's chunk {p.id} must have the content {p.chunk_id}, got {p.chunk.id}")
    if state.engine != digest(engine.spec.name, engine.spec.identity):
        return  # of another model: everything is recounted
    system_prompt = engine.encode_system_prompt(state.system_prompt)
    claimed = state.system_prompt_tokens, state.system_prompt_advance
    counts = [("system_prompt", *claimed, system_prompt.tokens, system_prompt.advance)]
    for p in state.placed:
        try:
            encoded = engine.encode(p.chunk)
        except ChunkUnavailable:  # later use reports missing content; until then it only must stay in range
            if p.tokens < 1 or not 0 <= p.advance <= engine.spec.max_tokens:
                raise
        else:
            counts.append((f"chunk {p.id}", p.tokens, p.advance, encoded.tokens, encoded.advance))
    for name, tokens, advance, *true in counts:
        if [tokens, advance] != true:
            raise ValueError(
                f"the snapshot's {name} must have {true[0]} tokens over {true[1]} positions, got {tokens} over {advance}; "
                "send it as the window gave it"
            )
    if state.tokens > state.budget:
        raise ValueError(f"the snapshot must fit its budget of {state.budget} tokens, got {state.tokens}")
