"""Chunks in fewer slots: the merged tier (Elastic Cache, section 3.3), see `ctxwin.kv.merge`.

What is merged is the KV as it is served. Which slots matter is told by the attention that the chunk's own tokens give each
other in one forward, behind what is in front of it, or behind the system prompt for a chunk that has left: the paper takes the
whole prompt's, which a chunk that is to move does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin.fidelity import Fidelity
from ctxwin.window.assembly import Assembly, Laid, Work
from ctxwin.window.state import Conditioning, Placed, State, merged_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ctxwin.engines.base import Encoded
    from ctxwin.kv.layout import SpanKV


def merged_in_place(
    assembly: Assembly, state: State, index: int, share: float, fidelity: Fidelity, dropped: dict[str, int]
) -> Placed:
    """The placed chunk at ``index``, merged; what its KV was is added to ``dropped``, bytes by key.

    Cost: a forward over the chunk, and over what has to be computed in front of it.
    """
    from ctxwin.kv.patch import apply_patch
    from ctxwin.kv.relocate import relocate

    work = Work(background=True)
    whole = state.placed[index]
    if whole.kv is not None and whole.kv.slots is not None:  # of what is merged no other share can be made
        whole = whole.replace(kv=None)
        state = state.replace(placed=(*state.placed[:index], whole, *state.placed[index + 1 :]))
    laid: Laid = assembly.lay_out(state, fidelity, work)
    choice, segment = laid.choices[index], laid.segments[index + 1]
    attended = assembly.engine.attended(laid.segments[: index + 1], segment.encoded, segment.start, tally=work)
    served, span = choice.served, segment.span
    if span is None or choice.linked is not None:
        served, span = choice.front.computed(whole.chunk_id, "formed"), attended.span
    elif segment.patch is not None:
        span = apply_patch(span, segment.patch, assembly.engine.spec.kv, segment.start)
    span = relocate(span, assembly.engine.spec.kv, segment.start)
    return _merged(assembly, whole, served, segment.encoded, span, attended.sums, share, laid.absorbed(index), dropped)


def merged_apart(assembly: Assembly, state: State, evicted: Placed, share: float, dropped: dict[str, int]) -> Placed:
    """An evicted chunk, merged; itself where its KV is gone or merged already. Cost: a forward over it."""
    from ctxwin.kv.patch import apply_patch

    kv, repo = evicted.kv, assembly.engine.repo
    if kv is None or kv.slots is not None or not evicted.conditioned:
        return evicted
    encoded = assembly.engine.encode(evicted.chunk)
    found = repo.get_span(kv.span, encoded.token_ids, positions=encoded.positions)
    patch = None if kv.patch is None else repo.get_patch(kv.patch)
    if found is None or (patch is None and kv.patch is not None):
        return evicted
    span, record = found
    absorbed = [*record.get("absorbed", ())]
    if patch is not None:
        span = apply_patch(span, patch, assembly.engine.spec.kv, 0)
        absorbed += patch.meta.get("absorbed", ())
    work = Work(background=True)
    front = [assembly.system_prompt(state, work)]
    attended = assembly.engine.attended(front, encoded, state.system_prompt_advance, tally=work)
    return _merged(assembly, evicted, kv, encoded, span, attended.sums, share, absorbed, dropped)


def _merged(
    assembly: Assembly,
    placed: Placed,
    served: Conditioning,
    encoded: Encoded,
    span: SpanKV,
    attended: torch.Tensor,
    share: float,
    absorbed: Sequence[str],
    dropped: dict[str, int],
) -> Placed:
    from ctxwin.kv.merge import merge, merged_slots

    slots = merged_slots(share, placed.tokens)
    if slots == placed.tokens:
        return placed
    key = merged_key(served.span, served.patch, slots)
    said = {"provenance": served.provenance, "exact": False, "absorbed": list(absorbed)}
    assembly.put(key, merge(span, attended, slots), encoded.part(0, slots), **said)
    if not assembly.has(key):
        return placed  # the store refused it
    own = served.patch or served.span
    dropped[own] = 0 if served.patch is not None else span.nbytes
    changes = {"exact": False, "depth": 1 + served.depth, "lane": "merged", "span": key, "patch": None, "base": None}
    return placed.replace(kv=served.model_copy(update={**changes, "slots": slots}), seen=True)
