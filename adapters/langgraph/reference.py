"""The small JSON value that stands for a window in graph state, and the way back from it.

A reference names a version of a window, which never changes; its manifest is in the engine's store. Beside the digest it
holds the placed chunks (text, path or digest of pictures, sampling; no KV bookkeeping), about 400 bytes each plus their text.
So a thread goes on where the store has lost its content: what is placed is rebuilt from its sources, what was evicted cannot
be recalled any more. A picture with a path survives a lost store; one that was given in memory has its pixels only there.

Plain dict, list, str, int, float: safe for every checkpoint serializer, ``LANGGRAPH_STRICT_MSGPACK=true`` included.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ctxwin.adapters.langgraph import manifest
from ctxwin.hashing import digest
from ctxwin.window.state import Placed, State
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.spans import SpanRepository

log = logging.getLogger("ctxwin")

FORMAT = 1
_DROPPED = frozenset({"kv", "seen", "unseen", "read", "chunk_id"})  # of a placed chunk: bookkeeping, or follows from it


@dataclass(frozen=True)
class Restored:
    """What a reference gave.

    Attributes:
        lost: evicted chunks that cannot be recalled any more.
        rebuilt: placed chunks whose KV bookkeeping is gone: they are computed again from their sources.
    """

    state: State
    lost: int = 0
    rebuilt: int = 0


def save(
    window: Window,
    *,
    operations: int = 0,
    adopted: int = 0,
    parent: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Stores the window's state and returns its reference.

    Args:
        operations: how many led here, over all nodes; `merge_windows` compares them where versions are equal.
        adopted: how often a branch was declared the one to go on with; `merge_windows` compares it before the version.
        parent: id of the window it was forked from.
        notes: plain JSON of the caller's, carried along.

    Cost: a few KB of writes, however much was evicted (see `ctxwin.adapters.langgraph.manifest`).
    """
    state = window.snapshot()
    head = state.model_dump(mode="json", exclude={"placed", "evicted", "format"}, exclude_defaults=True)
    placed = []
    for p in state.placed:
        record = p.model_dump(mode="json", exclude_defaults=True)
        placed.append({key: value for key, value in record.items() if key not in _DROPPED})
    beside: dict[str, Any] = {
        "parent": parent,
        "notes": copy.deepcopy(dict(notes or {})),
        "encodes": window.core.vision_encodes,  # they belong to the next answer, which may be another node's
    }
    return {
        **head,
        **{key: value for key, value in beside.items() if value},
        "format": FORMAT,
        "window": state.window,
        "version": state.version,  # as what else `merge_windows` compares, also where it is 0
        "operations": operations,
        "adopted": adopted,
        "manifest": manifest.write(window.engine.repo, state),
        "tokens": state.tokens,
        "evicted": len(state.evicted),
        "placed": placed,
    }


def load(engine: Engine, reference: Mapping[str, Any], **options: Any) -> Window:
    """The window of a reference. ``options``: as `Window.restore` (``seed``, ``eviction``, ``retrieval``).

    Raises ValueError or TypeError for what is no reference. Where content and source of a placed chunk are gone, the next
    ask raises ChunkUnavailable; the chunk can be evicted to go on without it.
    """
    return Window.restore(engine, restore(engine.repo, reference).state, **options)


def restore(repo: SpanRepository, reference: Mapping[str, Any]) -> Restored:
    """The state of a reference: from the store where it is there, else from the reference itself."""
    check(reference)
    found = manifest.read(repo, reference["manifest"])
    if found is not None and not found[1] and not found[2]:
        return Restored(found[0])
    light = _rebuilt(reference)
    if found is None:
        state, lost, rebuilt = light, reference["evicted"], len(light.placed)
    else:
        held = {p.id: p for p in found[0].placed}
        state = found[0].replace(placed=tuple(held.get(p.id, p) for p in light.placed))
        lost, rebuilt = found[2], len(found[1])
    log.warning(
        f"the store lost content of window {state.window} version {state.version}: {lost} evicted chunks cannot be "
        f"recalled, {rebuilt} placed ones are rebuilt"
    )
    return Restored(state, lost, rebuilt)


def check(reference: Any) -> None:
    """TypeError or ValueError where ``reference`` is not what `save` returns."""
    if not isinstance(reference, Mapping):
        raise TypeError(
            f"a window reference must be a dict from Session.ref(), got {type(reference).__name__}; keep the engine and "
            "the window out of the state"
        )
    missing = {"format", "window", "version", "operations", "adopted", "manifest", "placed"} - reference.keys()
    if missing:
        raise ValueError(f"a window reference must have {sorted(missing)}, got {sorted(reference)}; use Session.ref()")
    if reference["format"] != FORMAT:
        raise ValueError(
            f"a window reference must have format {FORMAT}, got {reference['format']!r}; use the ctxwin that wrote it"
        )


def _rebuilt(reference: Mapping[str, Any]) -> State:
    """The state as far as the reference itself has it: nothing computed, nothing evicted."""
    beside = {"format", "placed", "evicted"}
    head = {key: value for key, value in reference.items() if key in State.model_fields and key not in beside}
    try:
        state = State.model_validate(head)
        placed = [Placed.model_validate({**record, "chunk_id": ""}) for record in reference["placed"]]
    except ValidationError as error:
        raise ValueError(
            f"a window reference must be what Session.ref() returned, got another dict: {error}"
        ) from error
    return state.replace(placed=tuple(p.replace(chunk_id=p.chunk.id, read=state.version) for p in placed))


def merge_windows(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any] | None:
    """The reducer of a window key: which reference the state goes on with.

    Same window: the one that was adopted more often (`Session.ref` with ``adopt=True``), then the higher version, then
    more operations, then the greater digest. So the order in which parallel branches finish does not matter, the other
    branches' edits are not in the result, and a node goes back to an older version only with ``adopt=True``. Another
    window: the one written last (LangGraph applies the writes of a step in a fixed order). None changes nothing, and
    neither does the empty dict that LangGraph starts a key with.
    """
    if not left or not right:
        return right or left
    check(left)
    check(right)
    if left["window"] != right["window"]:
        return right
    ranks = ("adopted", "version", "operations", "manifest")
    return max(left, right, key=lambda made: (*(made[name] for name in ranks), digest(made.get("notes", {}))))
