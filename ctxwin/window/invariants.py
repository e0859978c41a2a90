"""The invariants of a window state."""

from ctxwin.window.answer import Plan
from ctxwin.window.state import State


def check_state(state: State, plan: Plan) -> None:
    """Assert every invariant of ``state`` and of its plan; AssertionError names the broken one and prints the state."""

    def holds(condition: bool, what: str) -> None:
        assert condition, f"{what}\n{plan}\n{state!r}"

    entries, evicted = state.placed, state.evicted
    ids = [p.id for p in entries]
    holds(len(set(ids)) == len(ids), "a placement id occurs twice")
    holds(not set(ids) & {p.id for p in evicted}, "a chunk is both placed and evicted")
    holds(all(p.chunk_id == p.chunk.id for p in entries), "a chunk id does not fit its content")
    holds(all(p.arrival < state.arrivals for p in (*entries, *evicted)), "an arrival lies in the future")
    holds(len({p.arrival for p in (*entries, *evicted)}) == len(entries) + len(evicted), "two chunks arrived at once")
    holds(all(not p.chunk._frames for p in (*entries, *evicted)), "a state holds pixels")
    holds(state.system_prompt_tokens < state.budget, "the system prompt exceeds the budget")
    holds(plan.tokens == state.tokens, "the plan counts other tokens than the state")
    holds(tuple(e.id for e in plan.entries) == tuple(ids), "the plan lists other chunks than the state")

    offset, start, exact, preceding = state.system_prompt_tokens, state.system_prompt_advance, True, set[str]()
    for p, e in zip(entries, plan.entries, strict=True):
        holds((e.offset, e.start) == (offset, start), f"{p.id} does not follow the chunk in front of it")
        offset, start = offset + p.tokens, start + p.advance
        holds(p.tokens > 0 and p.advance > 0, f"{p.id} is empty")
        holds(e.exact == (e.depth == 0), f"{p.id} is exact at depth {e.depth}")
        holds(p.id not in p.unseen, f"{p.id} has not seen itself")
        if p.kv is not None:
            holds(p.seen, f"{p.id} has KV but was never computed")
            holds(p.kv.exact == (p.kv.depth == 0), f"{p.id}'s KV is exact at depth {p.kv.depth}")
            holds(p.kv.patch is None or not p.kv.exact, f"{p.id} is patched and exact")
            holds(p.kv.difference is None or not p.kv.exact, f"{p.id} differs from its text and is exact")
            holds(p.id not in p.kv.antecedents, f"{p.id} was conditioned on itself")
        holds(e.lane != "survivor" or not e.exact, f"{p.id} survives and is exact")
        if e.lane == "survivor" and not e.reused:
            holds(set(e.not_attended) <= set(p.unseen), f"{p.id} survives behind chunks it should have absorbed")
            holds(not preceding.intersection(e.evicted_antecedents), f"{p.id} lost an antecedent that stands in front")
        if e.lane == "edited":
            holds(not e.exact and state.fidelity.mode != "exact", f"{p.id} is edited and exact")
        if e.lane in ("computed", "formed"):
            holds(e.compute == p.tokens, f"{p.id} is computed at no cost")
            holds(e.exact == exact, f"{p.id} is exact behind an approximation, or the other way round")
        exact = exact and e.exact
        preceding.add(p.id)
