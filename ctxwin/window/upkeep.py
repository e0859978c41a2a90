"""Background work on a window: re-forming approximations, compressing KV, and forming orbit patches."""

from __future__ import annotations

from collections.abc import Sequence

from ctxwin.errors import ReadOnlyWindow
from ctxwin.window import edits
from ctxwin.window.assembly import Work
from ctxwin.window.core import WindowCore
from ctxwin.window.lanes import MAX_ORBIT


def refresh(core: WindowCore, count: int | None, ids: Sequence[str] | None = None) -> list[str]:
    """See `Window.refresh`."""
    if core.read_only:
        raise ReadOnlyWindow("an old version must not be refreshed; fork() it first")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise ValueError(f"count must be an int >= 0, got {count!r}")
    work, done = Work(background=True), []
    with core.writing() as state:
        plan = core.assembly.plan(state, core.fidelity)
        # Front to back: behind an approximation nothing can become exact.
        stale = [e.id for e in plan.entries if not e.exact and e.conditioned and not e.compute]
        if ids is not None:
            wanted = {state.placed[state.index(placement)].id for placement in ids}
            stale = [placement for placement in stale if placement in wanted]
        chosen = set(stale if count is None else stale[:count])
        for i, p in enumerate(state.placed):
            if p.id in chosen:
                # Re-forming one changes the provenance of what stands behind it: lay out anew each time.
                laid = core.assembly.lay_out(state, core.fidelity, work)
                if laid.choices[i].served.exact and not laid.choices[i].compute:
                    continue
                state = core.assembly.reform(state, i, laid, core.fidelity, work)
                done.append(p.id)
        if done:
            core.assembly.before.clear()  # what was refreshed is not to be served as it was
            core.commit(state.edited(), "refresh", done)
    return done


def compress(core: WindowCore) -> int:
    """See `Window.compress`."""
    assembly, repo, freed = core.assembly, core.engine.repo, 0
    if not core.fidelity.allows("patched") or core.fidelity.mode == "blind":
        return 0  # patches would not be served, and the exact KV would be gone
    with core.writing() as state:
        placed = list(state.placed)
        dropped: dict[str, int] = {}
        for i, p in enumerate(placed):
            if p.kv is None or p.kv.patch is not None or not p.kv.antecedents:
                continue
            encoded = core.engine.encode(p.chunk)
            found = repo.get_span(p.kv.span, token_ids=encoded.token_ids)
            if found is None:
                continue
            base, _ = assembly.canonical(state, p, None, Work(background=True))
            absorbed = found[1].get("absorbed", ())
            key = assembly.form(found[0], base, p.kv.provenance, encoded, core.fidelity, absorbed)
            patch = repo.get_patch(key) if key else None
            if key is None or patch is None or patch.nbytes >= found[0].nbytes:
                continue
            dropped[p.kv.span] = found[0].nbytes - patch.nbytes
            update = {"lane": "patched", "exact": False, "depth": p.kv.depth + 1, "span": base, "patch": key}
            placed[i] = p.replace(kv=p.kv.model_copy(update=update))
        if dropped:
            core.commit(state.edited(placed=tuple(placed)), "compress")
            for key, nbytes in dropped.items():
                if not repo.leased(key):  # another window still serves it
                    repo.delete(key)
                    freed += nbytes
    return freed


def prepare_orbit(core: WindowCore, ids: Sequence[str], orders: int, seed: int) -> list[str]:
    """See `Window.prepare_orbit`."""
    if not isinstance(orders, int) or not 1 <= orders <= edits.MAX_ORDERS:
        raise ValueError(f"orders must be an int in 1..{edits.MAX_ORDERS}, got {orders!r}")
    with core.writing() as state:
        found = {state.index(i) for i in ids}
        k = len(found)
        if not k or found != set(range(k)):
            placed = [p.id for p in state.placed]
            raise ValueError(f"ids must be the first placed chunks in some order, got {list(ids)} of {placed}")
        if k > MAX_ORBIT:
            raise ValueError(f"ids must be at most {MAX_ORBIT} chunks, got {k}")
        if k == len(state.placed):
            raise ValueError("ids must leave a chunk behind them to form a patch for, got every placed chunk")
        sampled = edits.sampled_orders(k, orders, seed)
        core.assembly.orbit(state, k, sampled, core.fidelity, Work(background=True))
        core.announce(core.event("prepare_orbit", [state.placed[k].id]))
    return [state.placed[k].id]
