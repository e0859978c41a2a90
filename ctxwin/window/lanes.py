"""Which lane serves each placed chunk: the operating-point menu (Kamera, appendix B, table 2), decided by provenance.

`choose` is pure: a state, a resolved fidelity, and a predicate telling which store keys are held. Precedence is
resident > survivor > patched > orbit > formed > computed; content alone never decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.answer import Plan, PlanEntry, PlanRequest
from ctxwin.window.state import Conditioning, Front, Order, Placed, State, orbit_key, patch_key, provenance_of, span_key

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
        unseen: placement ids in front that its KV has not absorbed.
        missing: placement ids it has absorbed that are gone.
    """

    placed: Placed
    lane: Lane
    front: Front
    served: Conditioning
    compute: bool = False
    form_canonical: bool = False
    unseen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def settles(self) -> bool:
        """Whether ``served`` becomes the placement's own conditioning (a survivor or toggled chunk keeps its old one)."""
        return self.lane not in ("survivor", "canonical")

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


class _Survival:
    """Who survives: what stands in front of a chunk now is what it was conditioned on minus evicted ones, in the same order.

    Chunks put in front later by a recall or an insertion (``Placed.unseen``) do not count. Chunks that were conditioned
    together share an `Order` and are judged by running sums over it, so that a window of n chunks takes O(n).
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
        compared = self._compared[was.order]
        if not compared.in_order[n] or compared.last[n] >= index:
            return None
        fresh: tuple[str, ...] = ()
        if compared.left[n] < index:
            fresh = tuple(f for f in self._now.ids[:index] if f not in was)
            if not set(fresh) <= set(placed.unseen):
                return None
        missing = n - compared.left[n]
        return fresh, compared.missing if missing == len(compared.missing) else compared.missing[:missing]


class _Comparison:
    """An earlier order against the present one. Each list is indexed by how many ids of the earlier order count.

    Attributes:
        left: how many of those are still placed.
        last: the greatest present index of those, -1 where none is placed.
        in_order: whether those still stand in the same order.
        missing: all ids that are not placed any more.
    """

    def __init__(self, was: Order, now: Order) -> None:
        places = [now.places.get(placement, -1) for placement in was.ids]
        self.left = [0, *accumulate(int(place >= 0) for place in places)]
        self.last = [-1, *accumulate(places, max)]
        moved = [0 <= place < last for place, last in zip(places, self.last, strict=False)]
        self.in_order = [True, *(not any_moved for any_moved in accumulate(moved, max))]
        self.missing = tuple(p for p, place in zip(was.ids, places, strict=True) if place < 0)


def choose(state: State, fidelity: Fidelity, has: Has) -> list[Choice]:
    """The lane of every placed chunk, front to back. ``fidelity`` must be resolved.

    O(n) in placed chunks, as long as they were not conditioned in n different orders.
    """
    if fidelity.mode == "auto":
        raise ValueError("fidelity must be resolved before lanes are chosen, got mode='auto'")
    choices: list[Choice] = []
    front = Front.of(state)
    survival = _Survival(front.order)
    for placed in state.placed:
        choice = _choose_one(state, placed, front, survival, fidelity, has)
        choices.append(choice)
        front = front.behind(placed.arrival, choice.served)
    return choices


def _choose_one(
    state: State, placed: Placed, front: Front, survival: _Survival, fidelity: Fidelity, has: Has
) -> Choice:
    _, base = canonical_key(state, placed.chunk_id)
    if not placed.conditioned or fidelity.mode == "blind":
        alone = Front(Order(()), state.system_prompt_key).computed(placed.chunk_id, "canonical")
        served = alone.model_copy(update={"exact": not front.length, "depth": int(front.length > 0)})
        return Choice(placed, "canonical", front, served, form_canonical=not has(base))

    here = front.computed(placed.chunk_id, "resident")
    known = placed.kv
    if known and known.provenance == here.provenance:
        here = here.model_copy(update={"base": known.base})
    own = known if known and has(known.span) and (known.patch is None or has(known.patch)) else None

    if fidelity.allows("resident"):
        exactly = span_key(here.provenance)
        if has(exactly):
            served = here.model_copy(update={"exact": True, "depth": 0, "span": exactly})
            return Choice(placed, "resident", front, served)
        if fidelity.mode != "exact" and own and own.patch is None and own.provenance == here.provenance:
            return Choice(placed, "resident", front, own.model_copy(update={"antecedents": here.antecedents}))
        if fidelity.mode != "exact" and has(here.span):
            return Choice(placed, "resident", front, here)

    if own and own.patch and own.provenance == here.provenance:
        kind: Lane = "orbit" if own.patch.startswith("orbit/") else "patched"
        if fidelity.allows(kind):
            served = own.model_copy(update={"antecedents": here.antecedents, "lane": kind})
            return Choice(placed, kind, front, served)

    left = survival.of(placed, front.length) if own else None
    if own and left and fidelity.survivors == "keep" and fidelity.allows("survivor"):
        served = own.model_copy(update={"exact": False, "depth": own.depth + 1, "lane": "survivor"})
        return Choice(placed, "survivor", front, served, unseen=left[0], missing=left[1])

    if own and left and own.patch is None and fidelity.survivors == "removal" and fidelity.allows("patched"):
        here = here.model_copy(update={"base": own.span})
    if fidelity.allows("patched"):
        for start in filter(None, (here.base, base)):
            patch = patch_key(here.provenance, start, fidelity.patch_name)
            if has(patch) and has(start):
                return Choice(placed, "patched", front, _patched(here, "patched", start, patch))

    if fidelity.allows("orbit") and 0 < front.length <= MAX_ORBIT:
        contents = [p.chunk_id for p in state.placed[: front.length]]
        patch = orbit_key(state.system_prompt_key, placed.chunk_id, contents, fidelity.patch_name)
        if has(patch) and has(base):
            return Choice(placed, "orbit", front, _patched(here, "orbit", base, patch))

    lane: Lane = "formed" if placed.seen and fidelity.mode != "exact" else "computed"
    return Choice(placed, lane, front, here.model_copy(update={"lane": lane}), compute=True)


def _patched(here: Conditioning, lane: Lane, base: str, patch: str) -> Conditioning:
    """KV of the provenance ``here`` that a patch makes of ``base``."""
    return here.model_copy(update={"exact": False, "depth": 1 + here.depth, "lane": lane, "span": base, "patch": patch})


def plan_of(state: State, choices: Sequence[Choice], token_bytes: int, system_prompt_resident: bool) -> Plan:
    """Prices ``choices``; ``token_bytes`` is the KV bytes of one token."""
    entries, offset = [], state.system_prompt_tokens
    canonicals: dict[str, int] = {}  # tokens by chunk: placed twice, it is formed once
    for choice, start in zip(choices, state.starts(), strict=True):
        p = choice.placed
        compute = p.tokens if choice.compute else 0
        if choice.form_canonical and p.chunk_id not in canonicals:
            compute = canonicals[p.chunk_id] = p.tokens
        entries.append(
            PlanEntry(
                id=p.id,
                chunk_id=p.chunk_id,
                lane=choice.lane,
                tokens=p.tokens,
                offset=offset,
                start=start,
                compute=compute,
                bytes=0 if choice.compute else p.tokens * token_bytes,
                exact=choice.served.exact,
                depth=choice.served.depth,
                conditioned=p.conditioned,
                pinned=p.pinned,
                unseen=choice.unseen,
                missing=choice.missing,
            )
        )
        offset += p.tokens
    steps = _steps(state.system_prompt_tokens, system_prompt_resident, choices, list(canonicals.values()))
    return Plan(
        state.system_prompt_tokens, system_prompt_resident, tuple(entries), not all(e.exact for e in entries), steps
    )


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
    layout = [(system_prompt, not system_prompt_resident), *((c.placed.tokens, c.compute) for c in choices)]
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
