"""Choice of the lane that serves each placed chunk: Kamera's operating points (appendix B, table 2), by provenance.

`choose` is pure: a state, a resolved fidelity, a predicate that is true for stored keys, and prices. Content alone never
decides. For each chunk, front to back, the cheapest admissible lane is taken:

- A lane that fidelity or provenance do not allow is not admissible at any cost.
- Stored exact KV is never given up for an approximation.
- Of the others (an approximation, another one, a forward) a later one of the order resident, patched by its own patch, merged,
  edited, survivor, patched, orbit, served before, partial, computed replaces an earlier one where it saves at least five
  milliseconds and a quarter: measured prices fluctuate, and each change of lane changes the context of later chunks.
- KV that was served after the same contents is served again rather than computed. So no ask computes more whole chunks
  than a user of a prefix cache who asks the same, unless that is measured to be faster; the canonicals of toggled chunks apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, compress, count, repeat
from operator import attrgetter
from typing import TYPE_CHECKING

from ctxwin.engines.segments import gap_runs
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.answer import Plan, PlanEntry, PlanRequest
from ctxwin.window.antecedents import Antecedents
from ctxwin.window.changes import Memo, common_prefix_length, with_fields
from ctxwin.window.choice import SAVES_MS, Choice, Premises, ServedMemo
from ctxwin.window.continuation import Selection
from ctxwin.window.edited_text import Differences, EditedText
from ctxwin.window.layout import computed_choices
from ctxwin.window.prices import Prices
from ctxwin.window.state import (
    EVERY_ARRIVAL,
    Conditioning,
    Placed,
    Prefix,
    State,
    interval_union,
    orbit_keys,
    partial_key,
    patch_key,
    placed_order,
    provenance_of,
    span_key,
)
from ctxwin.window.survival import Evicted, Survival

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.kv.layout import KVSpec

Has = Callable[[str], bool]
Memos = Mapping[str, ServedMemo]
OfLoad = Callable[[int, str, str], float]
_EXACTLY = Fidelity("exact")
MAX_ORBIT = 64
"""Most antecedents of an orbit patch; a mean over orders of more says nothing about any of them."""


def system_prompt_key(state: State) -> str:
    """Span key of the KV of the window's system prompt."""
    return span_key(provenance_of(state.system_prompt_key, "system_prompt"))


def canonical_key(state: State, chunk_id: str) -> tuple[str, str]:
    """Return provenance and span key of a chunk's canonical: its KV after nothing but the system prompt.

    The canonical stands behind the window's system prompt, so a chunk that is recalled to the front is exact and free there;
    behind another system prompt it is another canonical.
    """
    provenance = provenance_of(state.system_prompt_key, chunk_id)
    return provenance, span_key(provenance)


def neutral_key(state: State, chunk_id: str) -> str:
    """Span key of a chunk behind the empty system prompt, in which nothing of any tenant is: see `ctxwin.Library.prepare`."""
    return span_key(provenance_of(state.neutral_key, chunk_id))


def choose(
    state: State,
    fidelity: Fidelity,
    has: Has,
    prices: Prices | None = None,
    memo: Memos | None = None,
    engine: Engine | None = None,
    previous: Sequence[Choice] = (),
    unchanged: int = 0,
    tokens: int = 0,
) -> list[Choice]:
    """Return the lane of every placed chunk, front to back. ``fidelity`` must be resolved.

    Args:
        has: returns True for a stored key.
        prices: of the engine; by default those of a new engine.
        memo: how chunks were served, by `Prefix.contents_with`.
        engine: gives the tokens of edited chunks; without it no chunk is served in lane ``edited``.
        previous: choices of the window before, in any version, without the premises of those whose lookups give other answers
            now. The others stay valid while nothing else that led to them has changed.
        unchanged: how many first ones of these stand (`Choice.stands`) of the same chunks as now, of one fidelity and at the same
            prices, with as many ``tokens`` up to their end: they are taken as they are, and another chunk follows.

    O(n) in placed chunks, as long as they were not conditioned in n different orders.
    """
    if fidelity.mode == "auto":
        raise ValueError("fidelity must be resolved before lanes are chosen, got mode='auto'")
    prices, memo, fidelity, placed = prices or Prices(), memo or {}, _interned(fidelity), (*state.placed,)
    ids, offset = placed_order(state.placed), state.system_prompt_tokens
    prefix, survival, differences = Prefix.of(state, ids), Survival(ids), None
    if engine is not None and fidelity.allows("edited"):
        differences = Differences(state, engine, fidelity.edited_tokens or 0)
    request_ms, of_load = prices.request_ms, cache(prices.of_load)
    none, choices = prefix.antecedents, list[Choice]()
    basis, same = previous[0].premises if previous else None, bool(previous) and previous[0].prefix.gives_kv_of(prefix)
    if not same or basis is None or basis.fidelity is not fidelity:
        unchanged = 0
    # A chunk that must be exact needs an exact prefix. Where this fidelity chose, there was none.
    last = max(compress(count(unchanged), map(attrgetter("exact_only"), placed[unchanged:])), default=-1)
    if unchanged and last < 0:
        choices, offset = list(previous[:unchanged]), tokens
        prefix = previous[unchanged].prefix if unchanged < len(previous) else choices[-1].next_prefix
    else:
        unchanged, prefix = 0, previous[0].prefix if same else prefix
    olds = (chain(part, repeat(None)) for part in (previous[unchanged:], previous[unchanged + 1 :]))
    for i, (entry, old, next_old) in enumerate(zip(placed[unchanged:], *olds, strict=False), unchanged):
        # A forward right after another, or right before the query, shares its request; gaps are computed at once.
        joins = entry is placed[-1] or (i > 0 and choices[-1].compute)
        allowed = _EXACTLY if i <= last else fidelity
        next_prefix, choice = next_old and next_old.prefix, None
        premises = old.premises if old is not None and old.prefix is prefix and old.entry is entry else None
        if old is not None and premises is not None and premises.fidelity is allowed:
            choice = _unchanged(old, premises, joins, offset, memo, prices, of_load)
        if choice is not None:
            choices.append(choice)
            prefix = next_prefix or prefix.extended_by(entry, choice.conditioning)
        else:
            if prefix.antecedents.run != ids.run:  # what is made anew is named by the newest order
                prefix = with_fields(prefix, antecedents=ids.through(placed[i - 1].id, i) if i else none)
            stored = Memo(has)
            admissible = _admissible(state, entry, prefix, survival, differences, allowed, stored.__getitem__, memo)
            linked = i > 0 and choices[-1].partial_base is not None
            request, lone = (0.0 if free else request_ms for free in (joins, linked))
            choice, is_first = _cheapest(admissible, prices, offset, request, lone)
            conditioning = choice.conditioning
            if not (choice.compute or choice.form_canonical or choice.partial_base):
                if old is not None and old.prefix is prefix and old.conditioning == conditioning:
                    conditioning = old.conditioning  # what is loaded goes by it
                premises = Premises(allowed, {**stored}, joins) if is_first else None
                choice = with_fields(choice, conditioning=conditioning, premises=premises)
            choices.append(choice)
            prefix = prefix.extended_by(entry, conditioning)
            if next_prefix is not None and next_prefix.antecedents.run == ids.run and next_prefix == prefix:
                prefix = next_prefix  # what is behind it goes on
        offset += entry.tokens
    return choices


@lru_cache(maxsize=64)
def _interned(fidelity: Fidelity) -> Fidelity:
    """Return the first fidelity that was equal to this one."""
    return fidelity


SAVES_SHARE = 0.25
"""Least share of the cost, beside `SAVES_MS`, for which a lane replaces an earlier one of the order."""


def _unchanged(
    old: Choice, premises: Premises, joins: bool, offset: int, memo: Memos, prices: Prices, of_load: OfLoad
) -> Choice | None:
    """Return an earlier choice of a chunk that has the same prefix, at its price now; None where it must be made anew."""
    kv, tokens = old.conditioning, old.entry.tokens
    if old.reused:
        last_served = memo.get(old.prefix.contents_with(old.entry))
        if last_served is None or last_served.conditioning is not kv:
            return None
    ms = of_load(kv.slots or tokens, prices.tier(kv.span), prices.tier(kv.patch) if kv.patch else "")
    if ms >= SAVES_MS and (ms, joins) != (old.ms, premises.joins):  # another lane may be cheaper; of exact KV a forward
        least = prices.model.forward_ms(tokens, offset) if kv.exact else 0.0
        return with_fields(old, ms=ms, premises=premises._replace(joins=joins)) if ms - least < SAVES_MS else None
    return old if ms == old.ms else with_fields(old, ms=ms)


def _cheapest(
    admissible: Iterator[Choice], prices: Prices, offset: int, compute_ms: float, partial_ms: float
) -> tuple[Choice, bool]:
    """Return the cheapest of ``admissible``, which come in order, and whether it is the first; see the module.

    Args:
        compute_ms: what the request of a forward costs; ``partial_ms``: that of gaps.
    """
    best, least, is_first = None, 0.0, True
    for choice in admissible:
        ms = prices.of(choice, offset)
        total = ms + compute_ms * choice.compute + partial_ms * (choice.partial_base is not None)
        if best is None or least - total >= max(SAVES_MS, SAVES_SHARE * least):
            best, least, is_first = with_fields(choice, ms=ms), total, best is None
        if least < SAVES_MS:
            break
    assert best is not None, "a forward can always serve a chunk"
    return best, is_first


def _admissible(
    state: State,
    entry: Placed,
    prefix: Prefix,
    survival: Survival,
    differences: Differences | None,
    fidelity: Fidelity,
    has: Has,
    memo: Memos,
) -> Iterator[Choice]:
    """Yield all admissible choices for a chunk, in order; a forward comes last."""
    if not entry.conditioned or fidelity.mode == "blind":
        conditioning = _canonical(state, entry, prefix, has)
        yield Choice(entry, "canonical", prefix, conditioning, form_canonical=not has(conditioning.span))
        return

    here, previous = prefix.computed(entry.chunk_id, "resident"), entry.kv
    lane: Lane = "formed" if entry.seen and fidelity.mode != "exact" else "computed"
    exactly = span_key(here.provenance)
    if fidelity.allows("resident") and has(exactly):
        conditioning = here.model_copy(update={"exact": True, "depth": 0, "span": exactly, "difference": None})
        yield Choice(entry, "resident", prefix, conditioning)
        if prefix.exact:
            yield Choice(entry, lane, prefix, here.model_copy(update={"lane": lane}), compute=True)
        return

    if fidelity.mode == "exact":
        if fidelity.allows("resident") and has(here.span):  # computed behind the same clean views
            yield Choice(entry, "resident", prefix, here)
    else:
        earlier = memo.get(prefix.contents_with(entry))
        keys = [earlier.conditioning.span, earlier.conditioning.patch] if earlier else []
        allowed = earlier and fidelity.allows(earlier.lane) and (earlier.lane != "survivor" or fidelity.keeps_survivors)
        earlier = earlier if allowed and all(has(key) for key in keys if key) else None
        if previous and earlier and previous.provenance != here.provenance == earlier.conditioning.provenance:
            previous = earlier.conditioning  # its own, until an ask in other surroundings: behind a clean view, say
        reusable = previous if previous and has(previous.span) and has(previous.patch or previous.span) else None
        if reusable and reusable.slots is not None and not fidelity.allows("merged"):
            reusable = None
        latest = reusable is not None and reusable is entry.kv
        gaps = survival.of(entry, prefix.antecedents) if latest else None
        edited = differences.of(entry, prefix.length) if latest and differences else None
        same = previous is not None and previous.provenance == here.provenance
        removes = fidelity.survivors == "removal" and previous and not previous.slots and has(previous.span)
        if previous and removes and (gaps or same or _changed_little(previous, prefix)):
            # The residue of a patch over it consists of what its base absorbed.
            absorbed = interval_union(here.absorbed, previous.absorbed)
            here = here.model_copy(update={"base": previous.span, "absorbed": absorbed})
        patches = partial(_patches, state, entry, prefix, here, canonical_key(state, entry.chunk_id)[1], fidelity, has)
        if gaps and not (same or gaps[0] or gaps[1]) and any(patches()):
            gaps = None  # none has left: it was computed behind a clean view, and a patch for what is in front now is better
        yield from _own_kv(entry, prefix, here, reusable, gaps, edited, fidelity, has)
        yield from patches()
        if earlier:
            reuse = Choice(entry, earlier.lane, prefix, earlier.conditioning, reused=True)
            yield replace(reuse, not_attended=earlier.not_attended, evicted_antecedents=earlier.evicted_antecedents)
        if fidelity.allows("partial"):
            yield from _partial(state, entry, prefix, here, fidelity, has)
    yield Choice(entry, lane, prefix, here.model_copy(update={"lane": lane}), compute=True)


def _changed_little(previous: Conditioning, prefix: Prefix) -> bool:
    """Return True if at least half of what KV absorbed, and of what precedes it now, is the same, in any order: then a new patch
    over it corrects it (Kamera, appendix D, "The cheapest correct refresh")."""
    was, now = set(previous.antecedents), prefix.antecedents
    return 2 * sum(placement in was for placement in now) >= max(1, len(was), len(now))


def _own_kv(
    entry: Placed,
    prefix: Prefix,
    here: Conditioning,
    reusable: Conditioning | None,
    gaps: tuple[Sequence[str], Evicted] | None,
    edited: EditedText | None,
    fidelity: Fidelity,
    has: Has,
) -> Iterator[Choice]:
    """Yield choices that serve this chunk's own KV, or KV that was computed after the same approximations."""
    same = reusable is not None and reusable.provenance == here.provenance
    if fidelity.allows("resident"):
        if reusable and same and reusable.patch is None and reusable.slots is None:
            yield Choice(entry, "resident", prefix, _served_as(reusable, here, reusable.lane))
        elif has(here.span):
            yield Choice(entry, "resident", prefix, here)
    if reusable and same and reusable.patch:
        kind: Lane = "orbit" if reusable.patch.startswith("orbit/") else "patched"
        if fidelity.allows(kind):
            yield Choice(entry, kind, prefix, _served_as(reusable, here, kind))
    if reusable and same and reusable.slots is not None:
        yield Choice(entry, "merged", prefix, _served_as(reusable, here, "merged"))
    if reusable and edited:
        changes = {"exact": False, "depth": reusable.depth + 1, "lane": "edited", "difference": edited.difference}
        yield Choice(
            entry, "edited", prefix, reusable.model_copy(update=changes),
            not_attended=edited.not_attended, evicted_antecedents=edited.evicted_antecedents,
        )  # fmt: skip
    if reusable and gaps and fidelity.survivors == "slid" and not gaps[1].first:
        gaps = None  # a later chunk was taken out, or this one came back after other chunks
    if reusable and gaps and fidelity.keeps_survivors and fidelity.allows("survivor"):
        # In fewer slots it is that, whatever left in front of it.
        lane: Lane = "survivor" if reusable.slots is None else "merged"
        conditioning = reusable.model_copy(update={"exact": False, "depth": reusable.depth + 1, "lane": lane})
        yield Choice(entry, lane, prefix, conditioning, not_attended=gaps[0], evicted_antecedents=gaps[1])


def _served_as(kv: Conditioning, here: Conditioning, lane: Lane) -> Conditioning:
    """Return ``kv``, served in this lane, with its antecedents named as ``here``: itself where that changes nothing."""
    was, now = kv.antecedents, here.antecedents
    if kv.lane == lane and (was.run, was.length) == (now.run, now.length):
        return kv
    return kv.model_copy(update={"antecedents": now, "lane": lane})


def _patches(
    state: State, entry: Placed, prefix: Prefix, here: Conditioning, base: str, fidelity: Fidelity, has: Has
) -> Iterator[Choice]:
    """Yield choices that serve a base with a stored patch."""
    if fidelity.allows("patched"):
        for start in filter(None, (here.base, base)):
            patch = patch_key(here.provenance, start, fidelity.patch_name)
            if has(patch) and has(start):
                yield Choice(entry, "patched", prefix, patched_conditioning(here, "patched", start, patch))
    if fidelity.allows("orbit") and 0 < prefix.length <= MAX_ORBIT:
        contents = [p.chunk_id for p in state.placed[: prefix.length]]
        for patch in orbit_keys(state.system_prompt_key, entry.chunk_id, contents, fidelity.patch_name):
            if has(patch) and has(base):
                # Formed from observations of a larger set, and anew of another one later: it may carry something of any chunk.
                orbit = patched_conditioning(here, "orbit", base, patch)
                yield Choice(entry, "orbit", prefix, orbit.model_copy(update={"absorbed": EVERY_ARRIVAL}))
                break


def _canonical(state: State, entry: Placed, prefix: Prefix, has: Has) -> Conditioning:
    """Return the conditioning of a chunk's canonical, stored or not: after the window's system prompt, or after the empty one
    if only that is stored."""
    header = state.system_prompt_key
    _, base = canonical_key(state, entry.chunk_id)
    if entry.conditioned and not has(base) and has(neutral_key(state, entry.chunk_id)):
        header = state.neutral_key  # formed for a library, for windows of any system prompt
    alone = Prefix(Antecedents(), header, "").computed(entry.chunk_id, "canonical")
    exact = not prefix.length and header == state.system_prompt_key
    return alone.model_copy(update={"exact": exact, "depth": int(not exact)})


def _partial(
    state: State, entry: Placed, prefix: Prefix, here: Conditioning, fidelity: Fidelity, has: Has
) -> Iterator[Choice]:
    """Yield the choice that computes all text and the first tokens of each picture in context; the canonical gives the rest
    (MPIC, section 4).

    Without a stored canonical the chunk is computed whole, which takes less than forming one first.
    """
    base, count = _canonical(state, entry, prefix, has), fidelity.recompute or 0
    if not has(base.span):
        return
    key = partial_key(here.provenance, prefix.approximations, base.span, count)
    changes = {"exact": False, "depth": 1 + here.depth, "lane": "partial", "span": key, "base": None}
    conditioning = here.model_copy(update=changes)
    if has(key):
        yield Choice(entry, "resident", prefix, conditioning)
        return
    choice = Choice(entry, "partial", prefix, conditioning, partial_base=base, recompute=count)
    if choice.recomputed_tokens < entry.tokens:
        yield choice


def patched_conditioning(here: Conditioning, lane: Lane, base: str, patch: str) -> Conditioning:
    """Return the conditioning of provenance ``here`` that ``patch`` over ``base`` gives."""
    update = {"exact": False, "depth": 1 + here.depth, "lane": lane, "span": base, "patch": patch, "base": None}
    return here.model_copy(update=update)


def plan_of(
    state: State,
    selection: Selection,
    kv: KVSpec,
    system_prompt: str,
    has: Has,
    prices: Prices,
    previous: tuple[Sequence[Choice], Sequence[PlanEntry], Sequence[float]] = ((), (), ()),
) -> Plan:
    """Return the plan of ``selection`` on a model with this KV layout; other arguments as in `steps_of`.

    ``previous``: choices of the window before with the entries of their plan, which hold for the first ones that are still
    there, and their prices.
    """
    token_bytes = kv.span_bytes(1, 4 if kv.dtype == "float32" else 2)
    choices, entries = selection.choices, list[PlanEntry]()
    offset, start = state.system_prompt_tokens, state.system_prompt_advance
    if unchanged := common_prefix_length(previous[0], choices):
        old_entries, ms = previous[1][:unchanged], selection.ms[:unchanged]
        same = ms == previous[2][:unchanged]
        entries += old_entries if same else [with_fields(e, ms=price) for e, price in zip(old_entries, ms, strict=True)]
        last = entries[-1]
        offset, start = last.offset + last.tokens, last.start + choices[unchanged - 1].entry.advance
    canonicals: set[str] = set()  # placed twice, one is formed once
    for choice, price in zip(choices[unchanged:], selection.ms[unchanged:], strict=True):
        p = choice.entry
        compute = p.tokens if choice.compute else choice.recomputed_tokens
        if choice.form_canonical and p.chunk_id not in canonicals:
            canonicals.add(p.chunk_id)
            compute = p.tokens
        entries.append(
            PlanEntry(
                p.id, p.chunk_id, choice.lane, p.tokens, offset, start, compute,
                bytes=0 if choice.compute else choice.slots * token_bytes + kv.state_bytes,
                exact=choice.conditioning.exact, depth=choice.conditioning.depth, ms=price, conditioned=p.conditioned,
                pinned=p.pinned, not_attended=choice.not_attended, evicted_antecedents=choice.evicted_antecedents,
                reused=choice.reused, exact_only=p.exact_only,
            )
        )  # fmt: skip
        offset, start = offset + p.tokens, start + p.advance
    salted = bool(choices) and not choices[-1].ends_exact
    steps, total = steps_of(state, selection, system_prompt, has, prices)
    return Plan(state.system_prompt_tokens, has(system_prompt), tuple(entries), salted, steps, total)


def computed_plan(state: State, plan: Plan, kv: KVSpec, prices: Prices) -> Plan:
    """Return the plan of an ask whose last request computes and merges everything, whatever is formed in front of it."""
    forming = [step for step in plan.steps if step.purpose in ("system_prompt", "canonical")]
    choices, key = computed_choices(state, prices), system_prompt_key(state)
    whole = plan_of(state, Selection().followed_by(choices, state), kv, key, lambda _: False, prices)
    return replace(whole, steps=(*forming, *whole.steps), merges_prompt=True)


def steps_of(
    state: State, selection: Selection, system_prompt: str, has: Has, prices: Prices
) -> tuple[tuple[PlanRequest, ...], float]:
    """Return the engine's requests for ``selection``, and milliseconds up to the first token without the query's tokens.

    They come in order: canonicals after the system prompt, one for each run of computed chunks that is followed by loaded
    ones, with all gaps that are computed at once as one, then the answer. ``system_prompt`` is the key of its KV, stored or not.
    """
    choices, standing, prompt_tokens = selection.choices, selection.standing, state.system_prompt_tokens
    canonicals = {c.entry.chunk_id: c.entry.tokens for c in choices[standing:] if c.form_canonical}
    was_resident = resident = has(system_prompt)
    steps: list[PlanRequest] = []
    if canonicals and prompt_tokens and not resident:
        steps.append(PlanRequest("system_prompt", prompt_tokens, prompt_tokens))
        resident = True
    steps += [PlanRequest("canonical", prompt_tokens + tokens, tokens) for tokens in canonicals.values()]
    layout = [(prompt_tokens, None if resident else False)]
    rest = (i for i, c in enumerate(choices[standing:], standing) if c.compute or c.partial_base is not None)
    loaded = next(rest, len(choices))
    layout.append((selection.ends[loaded - 1] - prompt_tokens if loaded else 0, None))
    pieces = ((c.partial_base is not None, *part) for c in choices[loaded:] for part in c.parts)
    layout += [(tokens, is_partial if compute else None) for is_partial, tokens, compute in pieces]
    layout = [(tokens, gap) for tokens, gap in layout if tokens]  # an empty system prompt is neither
    gaps = [gap for _, gap in layout]
    total = computed = until = 0
    for i, (tokens, gap) in enumerate(layout):
        if gap and i >= until and (runs := gap_runs(gaps, i)):
            until = runs[-1].stop
        if computed and gap is None and i >= until:
            steps.append(PlanRequest("chunks", total, computed))
            computed = 0
        total += tokens
        computed += tokens * (gap is not None)
    steps.append(PlanRequest("answer", total, computed))
    return tuple(steps), prices.of_ask(selection.ms, len(steps), prompt_tokens, was_resident, system_prompt)
