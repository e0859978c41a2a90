"""Chunks in fewer slots: the merged tier (Elastic Cache, section 3.3), see `ctxwin.kv.merge`.

What is merged is the KV as it is served. Which slots matter is told by the attention that the chunk's own tokens give each
other in one forward, behind what is in front of it, or behind the system prompt for a chunk that has left: the paper takes the
whole prompt's, which a chunk that is to move does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin.fidelity import Fidelity
from ctxwin.window.assembly import Assembly
from ctxwin.window.layout import Layout, Work
from ctxwin.window.state import Conditioning, Placed, State, merged_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ctxwin.engines.segments import Encoded
    from ctxwin.kv.layout import SpanKV


def merge_placed(
    assembly: Assembly, state: State, index: int, share: float, fidelity: Fidelity, dropped: dict[str, int]
) -> Placed:
    """Return the placed chunk at ``index``, merged; its former KV is added to ``dropped``, bytes by key.

    Cost: a forward over the chunk, and over what has to be computed in front of it.
    """
    from ctxwin.kv.patch import apply_patch
    from ctxwin.kv.relocate import relocate

    work = Work(background=True)
    entry = state.placed[index]
    if entry.kv is not None and entry.kv.slots is not None:  # of what is merged no other share can be made
        entry = entry.replace(kv=None)
        state = state.replace(placed=state.placed.splice(index, index + 1, [entry]))
    layout: Layout = assembly.build_layout(state, fidelity, work)
    choice, segment = layout.choices[index], layout.segments[index + 1]
    attended = assembly.engine.attended(layout.segments[: index + 1], segment.encoded, segment.start, tally=work)
    conditioning, span = choice.conditioning, segment.span
    if span is None or choice.partial_base is not None or choice.lane == "edited":
        conditioning, span = choice.prefix.computed(entry.chunk_id, "formed"), attended.span
    elif segment.patch is not None:
        span = apply_patch(span, segment.patch, assembly.engine.spec.kv, segment.start)
    span = relocate(span, assembly.engine.spec.kv, segment.start)
    absorbed = layout.absorbed(index)
    return _merge(assembly, entry, conditioning, segment.encoded, span, attended.sums, share, absorbed, dropped)


def merge_evicted(assembly: Assembly, state: State, evicted: Placed, share: float, dropped: dict[str, int]) -> Placed:
    """Return an evicted chunk, merged; unchanged if its KV is gone or merged already. Cost: a forward over it."""
    from ctxwin.kv.patch import apply_patch

    kv, repo = evicted.kv, assembly.engine.repo
    if kv is None or kv.slots is not None or kv.lane == "edited" or not evicted.conditioned:
        return evicted
    encoded = assembly.engine.encode(evicted.chunk)
    stored = repo.get_span(kv.span, encoded.token_ids, positions=encoded.positions)
    patch = None if kv.patch is None else repo.get_patch(kv.patch)
    if stored is None or (patch is None and kv.patch is not None):
        return evicted
    span, record = stored
    absorbed = [*record.get("absorbed", ())]
    if patch is not None:
        span = apply_patch(span, patch, assembly.engine.spec.kv, 0)
        absorbed += patch.meta.get("absorbed", ())
    work = Work(background=True)
    preceding = [assembly.system_prompt(state, work)]
    attended = assembly.engine.attended(preceding, encoded, state.system_prompt_advance, tally=work)
    return _merge(assembly, evicted, kv, encoded, span, attended.sums, share, absorbed, dropped)


def _merge(
    assembly: Assembly,
    entry: Placed,
    conditioning: Conditioning,
    encoded: Encoded,
    span: SpanKV,
    attended: torch.Tensor,
    share: float,
    absorbed: Sequence[str],
    dropped: dict[str, int],
) -> Placed:
    from ctxwin.kv.merge import merge, merged_slots

    slots = merged_slots(share, entry.tokens)
    if slots == entry.tokens:
        return entry
    key = merged_key(conditioning.span, conditioning.patch, slots)
    record = {"provenance": conditioning.provenance, "exact": False, "absorbed": list(absorbed)}
    assembly.put(key, merge(span, attended, slots), encoded.part(0, slots), **record)
    if not assembly.has(key):
        return entry  # the store refused it
    replaced = conditioning.patch or conditioning.span
    dropped[replaced] = 0 if conditioning.patch is not None else span.nbytes
    changes = {"exact": False, "depth": 1 + conditioning.depth, "lane": "merged", "span": key, "slots": slots}
    return entry.replace(kv=conditioning.model_copy(update={**changes, "patch": None, "base": None}), seen=True)
