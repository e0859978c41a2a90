"""Which lane serves each placed chunk: the operating-point menu (Kamera, appendix B, table 2), decided by provenance.

`choose` is pure: a state, a resolved fidelity, a predicate telling which store keys are held, and prices. Content alone never
decides. For each chunk, front to back, the cheapest admissible way is taken:

- What the fidelity and the provenance do not allow is not admissible, whatever it costs.
- Exact KV that is held is never given up for an approximation.
- Of the others (an approximation, another one, a forward) a later one of the order resident, patched by its own patch, merged,
  survivor, patched, orbit, served before, partial, computed replaces an earlier one where it saves at least five milliseconds
  and a quarter: prices are measured and tremble, and each change of lane changes what the chunks behind stand on.
- What was served before behind the same contents is served again rather than computed. So no ask computes more whole chunks
  than a user of a prefix cache who asks the same, unless that is measured to be faster; toggled chunks apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ctxwin.engines.base import partial_ranges
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.answer import Plan, PlanEntry, PlanRequest
from ctxwin.window.antecedents import Order
from ctxwin.window.prices import Prices
from ctxwin.window.state import (
    Conditioning,
    Front,
    Placed,
    State,
    hull,
    orbit_keys,
    partial_key,
    patch_key,
    provenance_of,
    span_key,
)

if TYPE_CHECKING:
    from ctxwin.kv.layout import KVSpec

Has = Callable[[str], bool]
MAX_ORBIT = 64
"""Most chunks that an orbit patch may stand behind; a mean over orders of more says nothing of any of them."""


@dataclass(frozen=True)
class Choice:
    """How one placed chunk is served.

    Attributes:
        front: what stands in front of it.
        served: provenance, exactness and keys of the KV as served; what later chunks are conditioned on.
        compute: whether a forward over the chunk runs in place (its KV is captured under ``served.span``).
        form_canonical: whether the canonical must first be formed by a forward behind the system prompt.
        linked: the canonical that gives what is not computed of it (MPIC); then ``served`` is what comes of both.
        recompute: with it: how many tokens of each picture are computed in place, beside all text.
        unseen: placement ids in front that its KV has not absorbed.
        missing: placement ids it has absorbed that do not stand in front any more.
        repeated: whether it is served as it was before behind the same contents, though nothing else would serve it.
        ms: what it costs, a request of its own apart.
    """

    placed: Placed
    lane: Lane
    front: Front
    served: Conditioning
    compute: bool = False
    form_canonical: bool = False
    linked: Conditioning | None = None
    recompute: int = 0
    unseen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    repeated: bool = False
    ms: float = 0.0

    @property
    def parts(self) -> list[tuple[int, bool]]:
        """Its tokens in pieces, and whether each is computed in place."""
        if self.linked is None:
            return [(self.placed.tokens, self.compute)]
        ranges = partial_ranges(self.placed.media, self.recompute, self.placed.tokens)
        cuts = [0, *(at for pair in ranges for at in pair), self.placed.tokens]
        return [(end - begin, bool(i % 2)) for i, (begin, end) in enumerate(pairwise(cuts)) if begin < end]

    @property
    def again(self) -> int:
        """How many of its tokens are computed in place though it is linked."""
        return 0 if self.linked is None else sum(tokens for tokens, compute in self.parts if compute)

    @property
    def slots(self) -> int:
        """How many slots its KV takes."""
        return self.served.slots or self.placed.tokens

    @property
    def settles(self) -> bool:
        """Whether ``served`` becomes the placement's own conditioning (a survivor or toggled chunk keeps its old one)."""
        return self.lane not in ("survivor", "canonical") and not self.repeated

    @property
    def in_place(self) -> bool:
        """Whether a forward here, behind what is in front as it is served, gives exactly this KV."""
        here = self.front.computed(self.placed.chunk_id, self.lane)
        return self.compute or (self.served.patch is None and self.served.span == here.span)


def canonical_key(state: State, chunk_id: str) -> tuple[str, str]:
    """Provenance and span key of a chunk behind nothing but the system prompt: its canonical.

    The canonical stands behind the window's system prompt, so a chunk that is recalled to the front is exact and free there;
    behind another system prompt it is another canonical.
    """
    provenance = provenance_of(state.system_prompt_key, chunk_id)
    return provenance, span_key(provenance)


def neutral_key(state: State, chunk_id: str) -> str:
    """Span key of a chunk behind the empty system prompt, in which nothing of any tenant is: see `ctxwin.Library.prepare`."""
    return span_key(provenance_of(state.neutral_key, chunk_id))


@dataclass(frozen=True)
class Before:
    """How a chunk was served, to be served so again behind the same contents (`Front.contents_behind`)."""

    lane: Lane
    served: Conditioning
    unseen: tuple[str, ...]
    missing: tuple[str, ...]

    @classmethod
    def of(cls, choice: Choice) -> Before:
        """How ``choice`` serves its chunk."""
        lane: Lane = "resident" if choice.compute else choice.lane
        return cls(lane, choice.served, choice.unseen, choice.missing)


class _Survival:
    """Who survives: what stands in front of a chunk is what it was conditioned on minus what left the front, in the same order.

    What it absorbed leaves the front by an eviction, or by being placed behind it again. Chunks put in front later by a recall
    or an insertion (``Placed.unseen``) do not count. Chunks that were conditioned together share an `Order` and are judged by
    running sums over it, so that a window of n chunks takes O(n); O(n^2) simple steps where what they absorbed went behind.
    """

    def __init__(self, now: Order) -> None:
        self._now = now
        self._compared: dict[Order, _Comparison] = {}

    def of(self, placed: Placed, index: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """``unseen`` and ``missing`` of the placed chunk at ``index`` if it survives; None if it does not."""
        if placed.kv is None:
            return None
        was, n = placed.kv.antecedents, placed.kv.antecedents.length
        if was.order not in self._compared:
            self._compared[was.order] = _Comparison(was.order, self._now)
        found = self._compared[was.order].front(n, index)
        if found is None:
            return None
        left, missing = found
        fresh: tuple[str, ...] = ()
        if left < index:
            fresh = tuple(f for f in self._now.ids[:index] if f not in was)
            if not set(fresh) <= set(placed.unseen):
                return None
        return fresh, missing


class _Comparison:
    """An earlier order against the present one."""

    def __init__(self, was: Order, now: Order) -> None:
        self._was = was
        places = [now.places.get(placement, -1) for placement in was.ids]
        self._places = np.array(places, dtype=np.int64)
        # Each list is indexed by how many ids of the earlier order count: how many of those are placed, the greatest index of
        # those, and whether they stand in the same order.
        self._left = [0, *accumulate(int(place >= 0) for place in places)]
        self._last = [-1, *accumulate(places, max)]
        moved = [0 <= place < last for place, last in zip(places, self._last, strict=False)]
        self._in_order = [True, *(not any_moved for any_moved in accumulate(moved, max))]
        self._gone = tuple(p for p, place in zip(was.ids, places, strict=True) if place < 0)

    def front(self, n: int, index: int) -> tuple[int, tuple[str, ...]] | None:
        """How many of the first ``n`` ids stand in front of ``index``, and which do not; None where they are in another order."""
        if self._last[n] < index:
            left = self._left[n]
            return (left, self._gone[: n - left]) if self._in_order[n] else None
        places = self._places[:n]
        here = (places >= 0) & (places < index)
        if (np.diff(places[here]) < 0).any():
            return None
        return int(here.sum()), tuple(self._was.ids[i] for i in np.flatnonzero(~here))


def choose(
    state: State, fidelity: Fidelity, has: Has, prices: Prices | None = None, before: Mapping[str, Before] | None = None
) -> list[Choice]:
    """The lane of every placed chunk, front to back. ``fidelity`` must be resolved.

    Args:
        has: whether a store key is held.
        prices: of the engine at hand; by default those that an engine begins with.
        before: how chunks were served before, by `Front.contents_behind`.

    O(n) in placed chunks, as long as they were not conditioned in n different orders.
    """
    if fidelity.mode == "auto":
        raise ValueError("fidelity must be resolved before lanes are chosen, got mode='auto'")
    choices: list[Choice] = []
    prices = prices or Prices()
    front, offset = Front.of(state), state.system_prompt_tokens
    survival = _Survival(front.order)
    # What must be exact needs everything in front of it to be.
    last = max((i for i, placed in enumerate(state.placed) if placed.exact_only), default=-1)
    exactly = Fidelity("exact")
    for i, placed in enumerate(state.placed):
        # A forward right behind another, or in front of the query, shares its request.
        joins = placed is state.placed[-1] or (bool(choices) and choices[-1].compute)
        allowed = exactly if i <= last else fidelity
        admissible = _admissible(state, placed, front, survival, allowed, has, before or {})
        choice = _cheapest(admissible, prices, offset, 0.0 if joins else prices.request_ms)
        choices.append(choice)
        front, offset = front.behind(placed, choice.served), offset + placed.tokens
    return choices


SAVES_MS, SAVES_SHARE = 5.0, 0.25
"""What a lane must save to replace one that comes before it in order: so many milliseconds, and this share."""


def _cheapest(admissible: Iterator[Choice], prices: Prices, offset: int, request_ms: float) -> Choice:
    """The cheapest of ``admissible``, which come in order; see the module."""
    best, least = None, 0.0
    for choice in admissible:
        ms = prices.of(choice, offset)
        # What is loaded behind what is computed begins a request of its own.
        pieces = sum(compute for _, compute in choice.parts) if choice.linked else 0
        whole = ms + request_ms * choice.compute + prices.request_ms * pieces
        if best is None or least - whole >= max(SAVES_MS, SAVES_SHARE * least):
            best, least = replace(choice, ms=ms), whole
        if least < SAVES_MS:
            break
    assert best is not None, "a forward can always serve a chunk"
    return best


def _admissible(
    state: State,
    placed: Placed,
    front: Front,
    survival: _Survival,
    fidelity: Fidelity,
    has: Has,
    before: Mapping[str, Before],
) -> Iterator[Choice]:
    """All ways in which a chunk may be served, in order; a forward comes last."""
    _, base = canonical_key(state, placed.chunk_id)
    if not placed.conditioned or fidelity.mode == "blind":
        served = _alone(state, placed, front, has)
        yield Choice(placed, "canonical", front, served, form_canonical=not has(served.span))
        return

    here = front.computed(placed.chunk_id, "resident")
    known = placed.kv
    lane: Lane = "formed" if placed.seen and fidelity.mode != "exact" else "computed"
    exactly = span_key(here.provenance)
    if fidelity.allows("resident") and has(exactly):
        served = here.model_copy(update={"exact": True, "depth": 0, "span": exactly})
        yield Choice(placed, "resident", front, served)
        if front.exact:
            yield Choice(placed, lane, front, here.model_copy(update={"lane": lane}), compute=True)
        return

    if fidelity.mode != "exact":
        own = known if known and has(known.span) and (known.patch is None or has(known.patch)) else None
        if own and own.slots is not None and not fidelity.allows("merged"):
            own = None
        left = survival.of(placed, front.length) if own else None
        same = known is not None and known.provenance == here.provenance
        if known and not known.slots and has(known.span) and fidelity.survivors == "removal" and (left or same):
            # What a patch over it leaves uncorrected is of what its base absorbed.
            here = here.model_copy(update={"base": known.span, "absorbed": hull(here.absorbed, known.absorbed)})
        yield from _held(placed, front, here, own, left, fidelity, has)
        yield from _patches(state, placed, front, here, base, fidelity, has)
        again = before.get(front.contents_behind(placed))
        keys = [again.served.span, again.served.patch] if again else []
        allowed = again and fidelity.allows(again.lane) and (again.lane != "survivor" or fidelity.keeps_survivors)
        if again and allowed and all(has(key) for key in keys if key):
            repeated = Choice(placed, again.lane, front, again.served, repeated=True)
            yield replace(repeated, unseen=again.unseen, missing=again.missing)
        if fidelity.allows("partial"):
            yield from _linked(state, placed, front, here, fidelity, has)
    yield Choice(placed, lane, front, here.model_copy(update={"lane": lane}), compute=True)


def _held(
    placed: Placed,
    front: Front,
    here: Conditioning,
    own: Conditioning | None,
    left: tuple[tuple[str, ...], tuple[str, ...]] | None,
    fidelity: Fidelity,
    has: Has,
) -> Iterator[Choice]:
    """Serving KV that this chunk has, or that was computed behind the very same approximations."""
    same = own is not None and own.provenance == here.provenance
    if fidelity.allows("resident"):
        if own and same and own.patch is None and own.slots is None:
            yield Choice(placed, "resident", front, own.model_copy(update={"antecedents": here.antecedents}))
        elif has(here.span):
            yield Choice(placed, "resident", front, here)
    if own and same and own.patch:
        kind: Lane = "orbit" if own.patch.startswith("orbit/") else "patched"
        if fidelity.allows(kind):
            served = own.model_copy(update={"antecedents": here.antecedents, "lane": kind})
            yield Choice(placed, kind, front, served)
    if own and same and own.slots is not None:
        yield Choice(
            placed, "merged", front, own.model_copy(update={"antecedents": here.antecedents, "lane": "merged"})
        )
    if own and left and fidelity.survivors == "slid" and tuple(own.antecedents[: len(left[1])]) != left[1]:
        left = None  # something was taken out behind what stays, or this one came back behind other chunks
    if own and left and fidelity.keeps_survivors and fidelity.allows("survivor"):
        served = own.model_copy(update={"exact": False, "depth": own.depth + 1, "lane": "survivor"})
        yield Choice(placed, "survivor", front, served, unseen=left[0], missing=left[1])


def _patches(
    state: State, placed: Placed, front: Front, here: Conditioning, base: str, fidelity: Fidelity, has: Has
) -> Iterator[Choice]:
    """Serving a base with a stored patch."""
    if fidelity.allows("patched"):
        for start in filter(None, (here.base, base)):
            patch = patch_key(here.provenance, start, fidelity.patch_name)
            if has(patch) and has(start):
                yield Choice(placed, "patched", front, patched(here, "patched", start, patch))
    if fidelity.allows("orbit") and 0 < front.length <= MAX_ORBIT:
        contents = [p.chunk_id for p in state.placed[: front.length]]
        for patch in orbit_keys(state.system_prompt_key, placed.chunk_id, contents, fidelity.patch_name):
            if has(patch) and has(base):
                yield Choice(placed, "orbit", front, patched(here, "orbit", base, patch))
                break


def _alone(state: State, placed: Placed, front: Front, has: Has) -> Conditioning:
    """A chunk's canonical, held or not: behind the window's system prompt, or behind none where only that one is held."""
    header = state.system_prompt_key
    _, base = canonical_key(state, placed.chunk_id)
    if placed.conditioned and not has(base) and has(neutral_key(state, placed.chunk_id)):
        header = state.neutral_key  # formed for a library, for windows of any system prompt
    alone = Front(Order(()), header, "").computed(placed.chunk_id, "canonical")
    exact = not front.length and header == state.system_prompt_key
    return alone.model_copy(update={"exact": exact, "depth": int(not exact)})


def _linked(
    state: State, placed: Placed, front: Front, here: Conditioning, fidelity: Fidelity, has: Has
) -> Iterator[Choice]:
    """Computing all text and the first tokens of each picture in context; its canonical gives the rest (MPIC, section 4).

    Where no canonical is held the chunk is computed whole, which takes less than forming one first.
    """
    base, count = _alone(state, placed, front, has), fidelity.recompute or 0
    if not has(base.span):
        return
    key = partial_key(here.provenance, front.approximations, base.span, count)
    changes = {"exact": False, "depth": 1 + here.depth, "lane": "partial", "span": key, "base": None}
    served = here.model_copy(update=changes)
    if has(key):
        yield Choice(placed, "resident", front, served)
        return
    made = Choice(placed, "partial", front, served, linked=base, recompute=count)
    if made.again < placed.tokens:
        yield made


def patched(here: Conditioning, lane: Lane, base: str, patch: str) -> Conditioning:
    """KV of the provenance ``here`` that a patch makes of ``base``."""
    update = {"exact": False, "depth": 1 + here.depth, "lane": lane, "span": base, "patch": patch, "base": None}
    return here.model_copy(update=update)


def plan_of(state: State, choices: Sequence[Choice], kv: KVSpec, system_prompt: str, has: Has, prices: Prices) -> Plan:
    """What ``choices`` cost on a model of this layout; the rest as in `steps_of`."""
    token_bytes = kv.span_bytes(1, 4 if kv.dtype == "float32" else 2)
    entries, offset = [], state.system_prompt_tokens
    canonicals: set[str] = set()  # placed twice, one is formed once
    for choice, start in zip(choices, state.starts(), strict=True):
        p = choice.placed
        compute = p.tokens if choice.compute else choice.again
        if choice.form_canonical and p.chunk_id not in canonicals:
            canonicals.add(p.chunk_id)
            compute = p.tokens
        entries.append(
            PlanEntry(
                id=p.id,
                chunk_id=p.chunk_id,
                lane=choice.lane,
                tokens=p.tokens,
                offset=offset,
                start=start,
                compute=compute,
                bytes=0 if choice.compute else choice.slots * token_bytes + kv.state_bytes,
                exact=choice.served.exact,
                depth=choice.served.depth,
                ms=choice.ms,
                conditioned=p.conditioned,
                pinned=p.pinned,
                unseen=choice.unseen,
                missing=choice.missing,
                repeated=choice.repeated,
                fallen=p.exact_only,
            )
        )
        offset += p.tokens
    salted = not all(e.exact for e in entries)
    steps, ms = steps_of(state, choices, system_prompt, has, prices)
    return Plan(state.system_prompt_tokens, has(system_prompt), tuple(entries), salted, steps, ms)


def steps_of(
    state: State, choices: Sequence[Choice], system_prompt: str, has: Has, prices: Prices
) -> tuple[tuple[PlanRequest, ...], float]:
    """The engine's requests for ``choices``, and milliseconds up to the first token, what the query's tokens take apart.

    ``system_prompt`` is the key of its KV, held or not.
    """
    resident, tokens = has(system_prompt), state.system_prompt_tokens
    canonicals = {c.placed.chunk_id: c.placed.tokens for c in choices if c.form_canonical}
    steps = _steps(tokens, resident, choices, list(canonicals.values()))
    return steps, prices.of_ask(choices, len(steps), tokens, resident, system_prompt)


def _steps(
    system_prompt: int, system_prompt_resident: bool, choices: Sequence[Choice], canonicals: Sequence[int]
) -> tuple[PlanRequest, ...]:
    """The engine's requests in order: canonicals behind the system prompt, then one for each run of computed chunks with held
    ones behind it, then the answering one."""
    steps: list[PlanRequest] = []
    if canonicals and system_prompt and not system_prompt_resident:
        steps.append(PlanRequest("system_prompt", system_prompt, system_prompt))
        system_prompt_resident = True
    steps += [PlanRequest("canonical", system_prompt + tokens, tokens) for tokens in canonicals]
    layout = [(system_prompt, not system_prompt_resident), *(part for c in choices for part in c.parts)]
    layout = [(tokens, compute) for tokens, compute in layout if tokens]  # an empty system prompt is neither
    last = max((i for i, (_, compute) in enumerate(layout) if not compute), default=0)
    total = computed = 0
    for i, (tokens, compute) in enumerate(layout):
        if computed and not compute and i <= last:
            steps.append(PlanRequest("chunks", total, computed))
            computed = 0
        total += tokens
        computed += tokens * compute
    return (*steps, PlanRequest("answer", total, computed))
