"""What windows do: slide on with survivors, reorder, recall (Kamera, section 5, appendices B and D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ctxwin.evals.arms import BASES, parse_arms
from ctxwin.evals.decoder import Memory
from ctxwin.evals.group import Group
from ctxwin.evals.items import Item
from ctxwin.evals.patching import Patcher
from ctxwin.evals.probe.asking import divergence
from ctxwin.evals.probe.contexts import PLACED, Context, Kind, Stream
from ctxwin.evals.probe.listen import Clock, Heard, Listener
from ctxwin.evals.stats import bootstrap_mean, share_interval
from ctxwin.kv.patch import Layers
from ctxwin.kv.relocate import relocate

TURNED = (0, 1, PLACED - 1)
"""How many of the chunks in front are replaced between an eviction and the recall."""
_JOINED: tuple[Kind, ...] = ("cross", "yours")


@dataclass(frozen=True)
class Slid:
    """One question after some slides.

    Attributes:
        window: KL(re-prefill of what is placed || survivors), along the former's answer; nats.
        stream: the same against a re-prefill of what was seen lately, twice a window.
        as_window, as_stream: whether the answer is the same as by either.
    """

    slides: int
    cluster: str
    window: float
    stream: float
    as_window: bool
    as_stream: bool


def slide(listener: Listener, streams: Sequence[Stream], clock: Clock, end: float) -> list[Slid]:
    """Windows slide one chunk at a time; what stays is rotated and nothing else, the new chunk is computed behind it.

    Cost: three forwards a slide, one over the new chunk alone.
    """
    found: list[Slid] = []
    done = 0
    shapes: dict[object, list[Stream]] = {}
    for stream in streams:
        key = ("alone", stream.item.index) if stream.item.shape is None else stream.item.shape
        shapes.setdefault(key, []).append(stream)
    for same in shapes.values():
        for at in range(0, len(same), 8):
            part = same[at : at + 8]
            found += _slide(listener, part)
            done += len(part)
            clock.progress("survivors over slides", done, len(streams))
            if clock.begun + clock.spent > end:
                return found
    return found


def _slide(listener: Listener, streams: Sequence[Stream]) -> list[Slid]:
    group, asker = listener.group([s.item for s in streams]), listener.asker
    spec, batch = listener.decoder.spec, range(len(streams))
    held = group.prefilled([range(PLACED)] * len(streams))
    found: list[Slid] = []
    for slides in range(1, len(streams[0].questions) + 1):
        order = range(slides, slides + PLACED)
        places, newest = group.layout(order), order[-1]
        # Every span is moved from where it was computed: a key is rounded once however often its window slid.
        kept = [[relocate(held[b][i + 1], spec, places[i].start) for i in range(PLACED - 1)] for b in batch]
        before = listener.decoder.memory([[group.system_prompt_span, *row] for row in kept])
        memory, _ = listener.decoder.append(group.tokens(newest).moved(places[-1].start), before)
        lead, last = group.system_prompt_span.tokens, places[-1]
        rows = group.position_rows(newest)
        for b in batch:
            span = memory.span(b, lead + last.slot, lead + last.end, rows, last.start)
            held[b] = [*held[b][1:], span]
        texts = [s.questions[slides - 1].text for s in streams]
        begin = _end(group, order)
        placed = group.memory(group.prefilled([order] * len(streams)))
        answers = asker.greedy(placed, texts, begin)
        lately = range(max(0, slides - PLACED), slides + PLACED)
        seen = group.memory(group.prefilled([lately] * len(streams)))
        ours = asker.greedy(memory, texts, begin)
        theirs = asker.greedy(seen, texts, _end(group, lately))
        window = _apart(listener, (placed, begin), (memory, begin), texts, answers)
        stream = _apart(listener, (seen, _end(group, lately)), (memory, begin), texts, theirs)
        found += [
            Slid(slides, streams[b].item.cluster, window[b], stream[b], ours[b] == answers[b], ours[b] == theirs[b])
            for b in batch
        ]
    return found


def reorder(listener: Listener, contexts: Sequence[Context], rank: int, layers: Layers) -> list[Heard]:
    """The patch of the order that is served, of another one, and of the mean over the others; on the last chunk."""
    arms = parse_arms(f"blind,patched:{rank},transfer:{rank},orbit:{rank}")
    last = PLACED - 1
    some = [c for c in contexts if any(q.kind != "one" and (not q.needs or last in q.needs) for q in c.questions)]
    patcher = Patcher(listener.decoder.spec, layers=layers, floor=rank)
    return [h for batch in listener.batches(some) for h in listener.hear(batch, arms, kinds=_JOINED, patcher=patcher)]


def recall(listener: Listener, contexts: Sequence[Context], rank: int, layers: Layers) -> dict[int, list[Heard]]:
    """The last chunk comes back behind others: with the patch it left with, and with one of what is in front now."""
    found: dict[int, list[Heard]] = {}
    patcher = Patcher(listener.decoder.spec, layers=layers, floor=rank)
    for turned in TURNED:
        arms = [*parse_arms(f"stale:{rank},update:{rank}"), BASES["recall"]]
        found[turned] = [
            heard
            for batch in listener.batches(contexts)
            for heard in listener.hear(
                batch, arms, kinds=_JOINED, items=[_back(c.item, turned) for c in batch], patcher=patcher
            )
        ]
    return found


def _back(item: Item, turned: int) -> Item:
    """The item whose last chunk was evicted, and returns after ``turned`` chunks in front were replaced."""
    last = len(item.placed) - 1
    placed = tuple(last + 1 + i if i < turned else i for i in range(last))
    return replace(item, before=item.placed, placed=(*placed, last), asked=last)


def _end(group: Group, order: Sequence[int]) -> int:
    """Position behind chunks placed in this order."""
    return group.layout([*order, order[0]])[-1].start


def _apart(
    listener: Listener,
    reference: tuple[Memory, int],
    other: tuple[Memory, int],
    texts: Sequence[str],
    answers: Sequence[Sequence[int]],
) -> list[float]:
    said = listener.asker.forced(reference[0], texts, reference[1], answers)
    heard = listener.asker.forced(other[0], texts, other[1], answers)
    return [float(divergence(p, q).mean()) for p, q in zip(said, heard, strict=True)]


def survival(found: Sequence[Slid]) -> list[dict[str, Any]]:
    """By number of slides: mean divergences, and the share of answers by neither reference."""
    rows = []
    for slides in sorted({f.slides for f in found}):
        some = [f for f in found if f.slides == slides]
        clusters = [f.cluster for f in some]
        lost = [float(not (f.as_window or f.as_stream)) for f in some]
        rows.append(
            {
                "slides": slides,
                "n": len(some),
                "kl_window": float(np.mean([f.window for f in some])),
                "kl_window_ci95": bootstrap_mean([f.window for f in some], clusters),
                "kl_stream": float(np.mean([f.stream for f in some])),
                "kl_nearer": float(np.mean([min(f.window, f.stream) for f in some])),
                "other_than_window": float(np.mean([not f.as_window for f in some])),
                "other_than_stream": float(np.mean([not f.as_stream for f in some])),
                "other_than_both": float(np.mean(lost)),
                "other_than_both_ci95": list(share_interval(lost, clusters)),
            }
        )
    return rows
