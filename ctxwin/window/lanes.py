"""Which lane serves each placed chunk: the operating-point menu (Kamera, appendix B, table 2), decided by provenance.

`choose` is pure: a state, a resolved fidelity, and a predicate telling which store keys are held. Precedence is
resident > survivor > patched > orbit > formed > computed; content alone never decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.answer import Plan, PlanEntry, PlanRequest
from ctxwin.window.state import Conditioning, Placed, State, orbit_key, patch_key, provenance_of, span_key

Has = Callable[[str], bool]


@dataclass(frozen=True)
class Choice:
    """How one placed chunk is served.

    Attributes:
        served: provenance, exactness and keys of the KV as served; what later chunks are conditioned on.
        compute: whether a forward over the chunk runs in place (its KV is captured under ``served.span``).
        form_canonical: whether the canonical must first be formed by a forward behind the system prompt.
        removal: base span that a removal patch should be formed against, once the chunk has been re-formed.
    """

    placed: Placed
    lane: Lane
    served: Conditioning
    compute: bool = False
    form_canonical: bool = False
    removal: str | None = None
    unseen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def settles(self) -> bool:
        """Whether ``served`` becomes the placement's own conditioning (a survivor or toggled chunk keeps its old one)."""
        return self.lane not in ("survivor", "canonical")

    def computed_tokens(self) -> int:
        return self.placed.tokens * (int(self.compute) + int(self.form_canonical))


def canonical_key(state: State, chunk_id: str) -> tuple[str, str]:
    """Provenance and span key of a chunk behind nothing but the system prompt: its canonical.

    The canonical stands behind the window's system prompt, so a chunk that is recalled to the front is exact and free there;
    behind another system prompt it is another canonical.
    """
    provenance = provenance_of(state.system_prompt_key, chunk_id, ())
    return provenance, span_key(provenance)


def _is_survivor(placed: Placed, front: Sequence[str], everywhere: set[str]) -> bool:
    """Its antecedents now are those it was conditioned on minus evicted ones, in the same order.

    Chunks put in front later by a recall or an insertion that was not repaired (``unseen``) do not count.
    """
    if placed.kv is None:
        return False
    known = [a for a in placed.kv.antecedents if a in front]
    gone = [a for a in placed.kv.antecedents if a not in front]
    if any(a in everywhere for a in gone):  # moved behind this chunk, not evicted
        return False
    fresh = [f for f in front if f not in placed.kv.antecedents]
    return all(f in placed.unseen for f in fresh) and known == [f for f in front if f in placed.kv.antecedents]


def _approximate_depth(front: Sequence[Conditioning]) -> int:
    return 0 if all(f.exact for f in front) else 1 + max(f.depth for f in front)


def choose(state: State, fidelity: Fidelity, has: Has) -> list[Choice]:
    """The lane of every placed chunk, front to back. ``fidelity`` must be resolved. O(n^2) in placed chunks."""
    if fidelity.mode == "auto":
        raise ValueError("fidelity must be resolved before lanes are chosen, got mode='auto'")
    choices: list[Choice] = []
    everywhere = {p.id for p in state.placed}
    for placed in state.placed:
        choices.append(_choose_one(state, placed, choices, fidelity, has, everywhere))
    return choices


def _choose_one(
    state: State, placed: Placed, before: Sequence[Choice], fidelity: Fidelity, has: Has, everywhere: set[str]
) -> Choice:
    front = [c.served for c in before]
    ids = tuple(c.placed.id for c in before)
    canonical, base = canonical_key(state, placed.chunk_id)
    if not placed.conditioned or fidelity.mode == "blind":
        served = Conditioning(
            provenance=canonical,
            antecedents=(),
            exact=not front,
            depth=0 if not front else 1,
            lane="canonical",
            span=base,
        )
        return Choice(placed, "canonical", served, form_canonical=not has(base))

    now = provenance_of(state.system_prompt_key, placed.chunk_id, [f.provenance for f in front])

    def conditioned(lane: Lane, span: str, *, exact: bool, depth: int, patch: str | None = None) -> Conditioning:
        return Conditioning(
            provenance=now, antecedents=ids, exact=exact, depth=depth, lane=lane, span=span, patch=patch
        )

    if fidelity.allows("resident"):
        exactly = span_key(now)
        if has(exactly):
            return Choice(placed, "resident", conditioned("resident", exactly, exact=True, depth=0))
        own = placed.kv
        if fidelity.mode != "exact" and own and own.patch is None and own.provenance == now and _held(own, has):
            return Choice(placed, "resident", own.model_copy(update={"antecedents": ids}))
        if fidelity.mode != "exact" and has(roughly := span_key(now, front)):
            depth = max(1, _approximate_depth(front))
            return Choice(placed, "resident", conditioned("resident", roughly, exact=False, depth=depth))

    own = placed.kv
    if own is not None and own.patch and own.provenance == now and _held(own, has):
        kind: Lane = "orbit" if own.patch.startswith("orbit/") else "patched"
        if fidelity.allows(kind):
            return Choice(placed, kind, own.model_copy(update={"antecedents": ids, "lane": kind}))

    survivor = placed.kv is not None and _is_survivor(placed, ids, everywhere) and _held(placed.kv, has)
    if survivor and placed.kv is not None and fidelity.survivors == "keep" and fidelity.allows("survivor"):
        served = placed.kv.model_copy(update={"exact": False, "depth": placed.kv.depth + 1, "lane": "survivor"})
        seen = placed.kv.antecedents
        return Choice(
            placed, "survivor", served,
            unseen=tuple(i for i in ids if i not in seen), missing=tuple(a for a in seen if a not in ids),
        )  # fmt: skip

    removal = None
    if fidelity.allows("patched"):
        bases = [base]
        if survivor and placed.kv is not None and fidelity.survivors == "removal" and placed.kv.patch is None:
            removal = placed.kv.span
            bases.insert(0, removal)
        for start in bases:
            patch = patch_key(now, start, fidelity.patch_name)
            if has(patch) and has(start):
                depth = 1 + _approximate_depth(front)
                return Choice(placed, "patched", conditioned("patched", start, exact=False, depth=depth, patch=patch))

    if fidelity.allows("orbit") and front:
        patch = orbit_key(
            state.system_prompt_key, placed.chunk_id, [c.placed.chunk_id for c in before], fidelity.patch_name
        )
        if has(patch) and has(base):
            depth = 1 + _approximate_depth(front)
            return Choice(placed, "orbit", conditioned("orbit", base, exact=False, depth=depth, patch=patch))

    exact, depth = all(f.exact for f in front), _approximate_depth(front)
    lane: Lane = "formed" if placed.seen and fidelity.mode != "exact" else "computed"
    span = span_key(now, None if exact else front)
    return Choice(placed, lane, conditioned(lane, span, exact=exact, depth=depth), compute=True, removal=removal)


def _held(kv: Conditioning, has: Has) -> bool:
    return has(kv.span) and (kv.patch is None or has(kv.patch))


def plan_of(state: State, choices: Sequence[Choice], token_bytes: int, system_prompt_resident: bool) -> Plan:
    """Prices ``choices``; ``token_bytes`` is the KV bytes of one token."""
    entries, offset = [], state.system_prompt_tokens
    canonicals: dict[str, int] = {}  # tokens by chunk: placed twice, it is formed once
    for choice, start in zip(choices, state.starts(), strict=True):
        p = choice.placed
        compute = choice.computed_tokens()
        if choice.form_canonical:
            if p.chunk_id in canonicals:
                compute = 0
            canonicals[p.chunk_id] = p.tokens
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
