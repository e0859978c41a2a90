"""`Maintenance`: computing KV ahead, re-forming approximations, compressing KV, and forming orbit patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ctxwin.errors import BudgetExceeded, ReadOnlyWindow
from ctxwin.validation import check_integer
from ctxwin.window import edits, orbits
from ctxwin.window.core import WindowCore
from ctxwin.window.idle import PrefillCounts
from ctxwin.window.in_place import compute_chunk, reform
from ctxwin.window.lanes import MAX_ORBIT, canonical_key, patched_conditioning
from ctxwin.window.layout import Work
from ctxwin.window.merging import merge_evicted, merge_placed
from ctxwin.window.orbits import observe_order
from ctxwin.window.recurrent import states_at_conditioning
from ctxwin.window.state import Placed, State
from ctxwin.window.storage_policy import Demand, likely_form


@dataclass(frozen=True)
class Maintenance:
    """Work on a window besides the edits and questions of an agent, most of it for idle time: `Window.maintenance`."""

    core: WindowCore

    def check(self) -> None:
        """Assert every invariant of the window; AssertionError prints the state. Cost: a plan."""
        self.core.check()

    def dependents(self, placement: str) -> tuple[str, ...]:
        """Placed chunks whose KV absorbed ``placement`` directly: edges of the cascade graph."""
        return tuple(p.id for p in self.core.state.placed if p.kv and placement in p.kv.antecedents)

    def touch(self, placement: str) -> None:
        """Mark a chunk as just read: others leave before it (`ctxwin.policies.LeastRecentlyRead`). Raises UnknownChunk."""
        with self.core.writing() as state:
            reads = state.placed[state.index(placement)].reads + 1
            new = edits.update_entry(state, placement, read=state.version + 1, reads=reads, tail=False)
            self.core.commit(new, "touch", [placement])

    def forget_beyond(self, most: int) -> None:
        """Forget the oldest evicted chunks beyond ``most``, so that an endless stream stays bounded. KV that others use stays.

        No edit; `Window.undo` brings them back with the versions that it returns to. O(evicted).
        """
        check_integer("most", most, 0)
        with self.core.writing() as state:
            if len(state.evicted) > most:
                self.core.commit(state.edited(evicted=state.evicted.newest(most)), remember=False)

    @property
    def prefill_counts(self) -> PrefillCounts | None:
        """Work ahead of the window's asks so far, and how many of its slides were predicted; None without ``prefill="idle"``."""
        return replace(self.core.idle.counts) if self.core.idle is not None else None

    def prefill(self) -> list[str]:
        """Compute now what the next `ask` would have to compute of the placed chunks; return their placement ids.

        For content that arrives before anybody asks: the answer then begins after a forward over its query. Runs behind what
        others wait for. Raises BudgetExceeded, EngineFailed, ChunkUnavailable. Cost: a forward over each of them; no encode.
        """
        work, done, assembly = Work(background=True), set[int](), self.core.assembly
        with self.core.writing(edit=False) as state:
            if state.tokens >= (most := self.core.engine.spec.max_tokens):
                told = f"system prompt and chunks must leave a question room in the engine's {most} tokens, got {state.tokens}"
                raise BudgetExceeded(f"{told}; slide() the window", needed=state.tokens + 1, budget=most)
            state, fidelity = self.core.audits.with_fallbacks(state), self.core.fidelity
            while True:  # what is computed changes the lanes of what stands behind it: look again
                layout = assembly.build_layout(state, fidelity, work)
                due = [i for i, choice in enumerate(layout.choices) if choice.compute and i not in done]
                if not due:
                    return [p.id for i, p in enumerate(state.placed) if i in done]
                spans, fallbacks = dict[int, Any](), work.fallbacks
                try:
                    for i in due:
                        layout = compute_chunk(assembly, state, layout, i, work, store=False)
                        spans[i + 1] = layout.segments[i + 1].span
                        if work.fallbacks > fallbacks:  # it could load nothing, and computed what stands in front, too
                            layout, spans = layout.as_computed(state), {i + 1: spans[i + 1]}
                            break
                finally:  # an error leaves what was computed before it
                    if spans:
                        state = assembly.write_back(state, layout, spans, fidelity)
                        self.core.commit(state)
                done.update(i - 1 for i in spans)

    def plan_orbit(self, ids: Sequence[str], orders: int = 6, seed: int = 0) -> orbits.OrbitPlan:
        """Return what `prepare_orbit` would cost, before it is paid. Raises like it."""
        state = self.core.state
        k, chosen = _orders(state, ids, orders, seed)
        return orbits.plan(self.core.assembly, state, k, chosen)

    def prepare_orbit(
        self, ids: Sequence[str], orders: int = 6, seed: int = 0, token_limit: int | None = None
    ) -> list[str]:
        """Form patches with which the window is served without a forward in any order of ``ids``, its first chunks.

        Kamera, section 5 "Reorder". At most 64 ids; of at most six each chunk gets a patch for every set of the others, and
        always each chunk behind them one for the whole set. Patches hold what at most ``orders`` orders share, so they must fail
        where the answer depends on the order; used only with ``Fidelity(orbit=True)``. Returns the placement ids that got all
        of theirs.

        Args:
            token_limit: most tokens to compute; BudgetExceeded, and nothing is computed, where `plan_orbit` says more.

        Cost: a forward of the window for each order, of which there are no more than ids; one of each chunk behind them whose
        canonical is not held, and of the system prompt if it is not held; no encode. On vLLM they share steps, eight at a time.
        """
        with self.core.writing() as state:
            k, chosen = _orders(state, ids, orders, seed)
            needed = orbits.plan(self.core.assembly, state, k, chosen)["tokens"]
            if token_limit is not None and needed > token_limit:
                told = f"token_limit must be at least {needed} to prepare these chunks, got {token_limit}; name fewer, or orders"
                raise BudgetExceeded(told, needed=needed, budget=token_limit)
            work = Work(background=True)
            covered = orbits.prepare(self.core.assembly, state, k, chosen, self.core.fidelity, work)
            ids = [state.placed[i].id for i in covered]
            self.core.announce(self.core.event("prepare_orbit", ids))
        return ids

    def apply_pending(self) -> tuple[str, ...]:
        """Apply the edits that wait for a break of the prefix (``lazy=True``) now; return the ids of their chunks."""
        with self.core.writing() as state:
            ids = tuple(p.id for p in state.placed if p.pending)
            if ids:
                new, applied = edits.apply_pending(state)
                self.core.commit(new if new.version != state.version else new.edited())
                self.core.announce_applied(applied)
        return ids

    def refresh(self, count: int | None = None, *, ids: Sequence[str] | None = None) -> list[str]:
        """Re-form the ``count`` front-most approximations (all by default) behind what is in front of them now.

        Args:
            ids: only these placed chunks, those of them that are approximations: where an audit saw drift, for one.

        For idle time: it bounds the drift of a stream. Returns the ids, front to back. Raises UnknownChunk. Cost: a forward
        each, and a look at the keys of all in front of it.
        """
        if self.core.read_only:
            raise ReadOnlyWindow("an old version must not be refreshed; fork() it first")
        if count is not None:
            check_integer("count", count, 0)
        work, done = Work(background=True), []
        with self.core.writing() as state:
            plan = self.core.assembly.plan(state, self.core.fidelity)
            # Front to back: behind an approximation nothing can become exact.
            stale = [e.id for e in plan.entries if not e.exact and e.conditioned and not e.compute]
            if ids is not None:
                requested = {state.placed[state.index(placement)].id for placement in ids}
                stale = [placement for placement in stale if placement in requested]
            chosen = set(stale if count is None else stale[:count])
            for i, p in enumerate(state.placed):
                if p.id in chosen:
                    # Re-forming a chunk changes the provenance of later ones: go on with the layout from it.
                    beginning = state.replace(placed=state.placed[: i + 1])
                    layout = self.core.assembly.build_layout(beginning, self.core.fidelity, work)
                    if layout.choices[i].conditioning.exact and not layout.choices[i].compute:
                        continue
                    state = reform(self.core.assembly, state, i, layout, work)
                    done.append(p.id)
            if done:
                self.core.assembly.memo.clear()  # what was refreshed is not to be served as it was
                self.core.commit(state.edited(), "refresh", done)
        return done

    def compress(self, *, if_short: bool = False) -> int:
        """Replace conditioned spans by canonical + patch where the patch is smaller; return the KV bytes given back.

        For idle time; the chunks are then in lane ``patched``. A canonical that was not held takes bytes of its own, which
        are not subtracted: for a chunk that only one window places they are more than a patch saves.

        Args:
            if_short: only while what open windows place would not fit into the store as conditioned KV, and only where
                that gives bytes back; then patches that never served are dropped, too, and evicted chunks keep the
                cheapest form that serves their return (`ctxwin.window.storage_policy`). With ``Fidelity(orbit=True)`` the orders
                that the window shows are taken into orbit patches, whatever the store has left.

        Cost: a forward for each chunk whose canonical is not held; nothing where ``if_short`` finds bytes enough.
        """
        fidelity = self.core.fidelity
        patches, merges = (fidelity.mode == "patched" and fidelity.allows(lane) for lane in ("patched", "merged"))
        if not patches and not (merges and if_short):
            return 0  # nothing smaller would be served, and the exact KV would be gone
        with self.core.writing() as state:
            if fidelity.allows("orbit"):
                _observe_orders(self.core, state)
            if fidelity.allows("partial"):
                for p in state.placed:
                    # Its neighbours change: linked from now on.
                    if p.kv is not None and p.kv.lane == "formed" and p.media:
                        self.core.assembly.canonical(state, p, None, Work(background=True))
            demand = self.core.assembly.demand()
            if if_short and not demand.short:
                return 0
            dropped, wanted = dict[str, int](), demand if if_short else None
            entries = tuple(_compress(self.core, state, p, wanted, dropped) if patches else p for p in state.placed)
            evicted = tuple(_cheapest_form(self.core, state, p, dropped) if if_short else p for p in state.evicted)
            new = state.edited(placed=entries, evicted=evicted)
            if dropped:
                self.core.commit(new, "compress")
        return _drop(self.core, dropped) + (self.core.engine.repo.drop_unserved() if if_short else 0)

    def merge(self, placement: str, share: float | None = None) -> int:
        """Keep a placed or evicted chunk in fewer slots (Elastic Cache): those that its tokens attended to most, with all
        others merged into the nearest. Returns the slots.

        Needs ``Fidelity("patched", merge=...)``. An approximation, lane ``merged``, which audits judge like any other: of what
        nobody asks about in detail, or of evicted chunks, which come back merged. Its whole KV leaves the store where no other
        window holds it.

        Args:
            share: of its tokens, in (0, 1); default: the fidelity's. 1 takes the merging back: its KV is found in the store, or
                computed again from its source.

        Raises UnknownChunk, UnsupportedModel on an engine that does not expose its attention. Cost: a forward over the chunk.
        """
        fidelity = self.core.fidelity
        share = fidelity.merge if share is None else share
        if not fidelity.allows("merged") or share is None:
            raise ValueError(
                f"the window's fidelity must allow merged KV, got {fidelity.mode!r} without merge; open it with "
                "Fidelity('patched', merge=0.5)"
            )
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"share must be a number in (0, 1], got {share!r}")
        dropped: dict[str, int] = {}
        with self.core.writing() as state:
            p = state.find(placement)
            if share == 1:
                new = p.replace(kv=None) if p.kv is not None and p.kv.slots is not None else p
            elif not p.conditioned:
                raise ValueError(f"{placement} is served without its context; toggle it back before it is merged")
            elif state.evicted.place_of(placement) is not None:
                new = merge_evicted(self.core.assembly, state, p, share, dropped)
            else:
                new = merge_placed(self.core.assembly, state, state.index(placement), share, fidelity, dropped)
            slots = new.kv.slots if new.kv is not None and new.kv.slots else new.tokens
            if new is not p:
                lists, changes = (state.placed, state.evicted), {"kv": new.kv, "seen": new.seen}
                entries, evicted = (chunks.changed({placement}, **changes) for chunks in lists)
                self.core.assembly.memo.clear()  # what was served whole is not to be found again
                self.core.commit(state.edited(placed=entries, evicted=evicted), "merge", [placement], note=str(slots))
        _drop(self.core, dropped)
        return slots


def _orders(state: State, ids: Sequence[str], orders: int, seed: int) -> tuple[int, list[tuple[int, ...]]]:
    """Return the number of ``ids``, which are checked, and the orders of them to compute."""
    check_integer("orders", orders, 1, orbits.MAX_ORDERS)
    indices = {state.index(i) for i in ids}
    k = len(indices)
    if not k or indices != set(range(k)):
        placed_ids = [p.id for p in state.placed]
        raise ValueError(f"ids must be the first placed chunks in some order, got {list(ids)} of {placed_ids}")
    if k > MAX_ORBIT:
        raise ValueError(f"ids must be at most {MAX_ORBIT} chunks, got {k}")
    if k == len(state.placed) and not 1 < k <= orbits.MAX_COVERED:
        raise ValueError(
            f"ids must be 2..{orbits.MAX_COVERED} chunks, or leave a chunk behind them to form a patch for, got all {k} placed"
        )
    return k, orbits.balanced_orders(k, orders, seed)


def _compress(core: WindowCore, state: State, p: Placed, demand: Demand | None, dropped: dict[str, int]) -> Placed:
    """Return ``p`` as canonical + patch if that is smaller and, given a ``demand``, pays; then add its span to ``dropped``."""
    assembly, repo, kv = core.assembly, core.engine.repo, p.kv
    if kv is None or kv.patch is not None or kv.slots is not None or kv.lane == "edited" or not kv.antecedents:
        return p
    if demand and not demand.pays(state, p, assembly.has(canonical_key(state, p.chunk_id)[1])):
        return p
    encoded = core.engine.encode(p.chunk)
    stored = repo.get_span(kv.span, token_ids=encoded.token_ids)
    if stored is None:
        return p
    refused = repo.counters.refused
    base, formed = assembly.canonical(state, p, None, Work(background=True))
    states = states_at_conditioning(assembly, state, p) if core.engine.spec.kv.recurrent else None
    absorbed = stored[1].get("absorbed", ())
    form = partial(assembly.form, stored[0], base, kv.provenance, encoded, core.fidelity, absorbed, states)
    key = form()
    if key is None and repo.counters.refused > refused and repo.leases(kv.span) == core.leases.windows(kv.span) == 1:
        repo.delete(kv.span)  # the store is full: what replaces it takes its place
        if formed is not None:
            assembly.put(base, formed, encoded, provenance=canonical_key(state, p.chunk_id)[0])
        key = form()
        if key is None:
            repo.put_span(kv.span, *stored)
    patch = None if key is None else repo.get_patch(key)
    if key is None or patch is None:
        return p
    dropped[kv.span] = stored[0].nbytes - patch.nbytes
    return p.replace(kv=patched_conditioning(kv, "patched", base, key))


def _drop(core: WindowCore, dropped: dict[str, int]) -> int:
    """Delete the keys that no window leases; return the bytes freed."""
    repo = core.engine.repo
    return sum(size for key, size in dropped.items() if not repo.leased(key) and repo.delete(key))


def _cheapest_form(core: WindowCore, state: State, p: Placed, dropped: dict[str, int]) -> Placed:
    """Return the evicted ``p`` in the form that `likely_form` names; its other KV is added to ``dropped``."""
    repo, (_, canonical) = core.engine.repo, canonical_key(state, p.chunk_id)
    for part in p.chunk.media if p.chunk.keep_source else ():
        repo.contains(f"source/{part.content}")  # counts as a use: KV can be computed again, pixels cannot
    if p.kv is None:
        return p
    form = likely_form(state, p, repo.contains(canonical), core.fidelity.survivors == "keep")
    stored_key = p.kv.patch or p.kv.span
    if form == "conditioned" and core.fidelity.allows("merged"):
        return merge_evicted(core.assembly, state, p, core.fidelity.merge or 1.0, dropped)
    if form == "conditioned" or stored_key == canonical:
        return p
    kv = core.engine.spec.kv
    dropped[stored_key] = kv.token_bytes * p.tokens + kv.state_bytes if p.kv.patch is None else 0
    return p.replace(kv=None)


def _observe_orders(core: WindowCore, state: State) -> None:
    """Add the window's present orders to the orbit patches of their sets, and form the canonicals for that."""
    for i, p in enumerate(state.placed):
        if 2 <= i <= MAX_ORBIT and p.kv is not None and p.kv.exact:
            encoded = core.engine.encode(p.chunk)
            if tuple(p.kv.antecedents) != tuple(q.id for q in state.placed[:i]):
                continue  # it was conditioned on other antecedents
            stored = core.engine.repo.get_span(p.kv.span, token_ids=encoded.token_ids)
            if stored is not None:
                core.assembly.canonical(state, p, None, Work(background=True))
                observe_order(core.assembly, state, i, stored[0], core.fidelity)
