"""The exact bit follows from what was computed, whatever was lost, refused, damaged, computed again, patched or forgotten.

Random programs over several windows of one store, held against an engine whose KV tells what it absorbed (`TellingEngine`).
What a window calls exact must be what one forward over its prompt gives, and what it calls approximate must not be. Only a
survivor may be better than its name: it goes by what is served in front of it, and that may be approximate while its own KV
still is what a forward over the whole prompt gives.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.answer import Usage
from ctxwin.window.state import State
from twins import machines
from window.telling import TellingEngine

FIDELITIES = {
    "exact": Fidelity("exact"),
    "keep": Fidelity("patched", rank=2, orbit=True),
    "removal": Fidelity("patched", rank=2, survivors="removal"),
    "refresh": Fidelity("patched", rank=2, survivors="refresh", orbit=True),
    "blind": Fidelity("blind"),
    "partial": Fidelity("patched", rank=2, recompute=0),
    "edited": Fidelity("patched", rank=2, survivors="refresh", edited_tokens=3),
    "merged": Fidelity("patched", rank=2, merge=0.5),
    "full": Fidelity("patched", rank=64, survivors="removal", orbit=True),
}
KV = ("span/", "patch/", "orbit/")
PICTURES = [Chunk.image(np.full((4, 4, 3), 9 + i, np.uint8), text="p") for i in range(2)]
CHUNKS = [Chunk.text("a"), Chunk.text("b"), Chunk.text("ab"), Chunk.text("cc"), Chunk.text("dcab"), *PICTURES]
WHICH = st.integers(0, 9)
READS = st.lists(st.sampled_from(["", "lose", "damage"]), max_size=4)


class ExactBit(RuleBasedStateMachine):
    """One program; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = TellingEngine()
        self.contents: dict[str, Chunk] = {}  # of every placement there ever was
        self.seen: set[tuple[Any, ...]] = set()

    @initialize(names=st.lists(st.sampled_from(sorted(FIDELITIES)), min_size=1, max_size=3))
    def open(self, names: list[str]) -> None:
        self.windows = [Window(self.engine, "h", budget=64, fidelity=FIDELITIES[name]) for name in names]
        for window in self.windows:
            window.extend(CHUNKS[:3])
            self.ask(0, [], 0, 0, False)

    def at(self, which: int) -> Window:
        return self.windows[which % len(self.windows)]

    @rule(which=WHICH, chunk=st.sampled_from(CHUNKS), index=st.none() | WHICH)
    def place(self, which: int, chunk: Chunk, index: int | None) -> None:
        window = self.at(which)
        if window.tokens < 40:
            window.append(chunk) if index is None else window.insert(index % (len(window.ids) + 1), chunk)

    @rule(which=WHICH, chunk=WHICH, forget=st.booleans())
    def evict(self, which: int, chunk: int, forget: bool) -> None:
        window = self.at(which)
        if window.ids:
            window.evict(window.ids[chunk % len(window.ids)], forget=forget)

    @rule(which=WHICH)
    def slide(self, which: int) -> None:
        if self.at(which).ids:
            self.at(which).slide(1)

    @rule(which=WHICH, chunk=WHICH, index=st.none() | WHICH, repair=st.booleans())
    def recall(self, which: int, chunk: int, index: int | None, repair: bool) -> None:
        window = self.at(which)
        if window.evicted and window.tokens < 40:
            index = None if index is None else index % (len(window.ids) + 1)
            window.recall(window.evicted[chunk % len(window.evicted)], index, repair=repair)

    @rule(which=WHICH, data=st.data())
    def reorder(self, which: int, data: st.DataObject) -> None:
        window = self.at(which)
        window.reorder(data.draw(st.permutations(window.ids)))

    @rule(which=WHICH, chunk=WHICH)
    def toggle(self, which: int, chunk: int) -> None:
        window = self.at(which)
        if window.ids:
            entry = window.chunks[chunk % len(window.ids)]
            window.toggle(entry.id, conditioned=not entry.conditioned)

    @rule(which=WHICH, count=st.none() | st.just(1), reads=READS, failures=st.integers(0, 2))
    def refresh(self, which: int, count: int | None, reads: list[str], failures: int) -> None:
        self.faults(reads, 0, failures)
        self.at(which).maintenance.refresh(count)
        self.faults([], 0, 0)

    @rule(which=WHICH, reads=READS)
    def compress(self, which: int, reads: list[str]) -> None:
        self.faults(reads, 0, 0)
        self.at(which).maintenance.compress()
        self.faults([], 0, 0)

    @rule(which=WHICH, chunk=WHICH, share=st.sampled_from([None, 0.8, 1]), reads=READS, failures=st.integers(0, 1))
    def merge(self, which: int, chunk: int, share: float | None, reads: list[str], failures: int) -> None:
        window = self.at(which)
        ids = [entry.id for entry in window.chunks if entry.conditioned] + list(window.evicted)
        if ids and window.fidelity.allows("merged"):
            self.faults(reads, 0, failures)
            window.maintenance.merge(ids[chunk % len(ids)], share)
            self.faults([], 0, 0)

    @rule(which=WHICH, front=st.integers(1, 2), seed=WHICH, failures=st.integers(0, 2))
    def prepare_orbit(self, which: int, front: int, seed: int, failures: int) -> None:
        window = self.at(which)
        if len(window.ids) > front:
            self.faults([], 0, failures)
            window.maintenance.prepare_orbit(window.ids[:front], orders=2, seed=seed)
            self.faults([], 0, 0)

    @precondition(lambda self: len(self.windows) < 4)
    @rule(which=WHICH, prompt=st.sampled_from([None, "g"]))
    def fork(self, which: int, prompt: str | None) -> None:
        self.windows.append(self.at(which).fork(prompt))

    @rule(which=WHICH)
    def restart(self, which: int) -> None:
        """Another process finds the window's snapshot, and what the store still holds."""
        at = which % len(self.windows)
        said = self.windows[at].snapshot().model_dump_json()
        self.windows[at].close()
        self.windows[at] = Window.restore(self.engine, said)

    @rule(data=st.data(), share=st.sampled_from([1, 2, 99]))
    def vanish(self, data: st.DataObject, share: int) -> None:
        keys = [key for key in self.engine.store.list() if key.startswith((*KV, "embed/"))]
        for key in data.draw(st.lists(st.sampled_from(keys), max_size=share)) if keys else ():
            self.engine.store.delete(key)

    @rule(which=WHICH, reads=READS, refusals=st.integers(0, 3), failures=st.integers(0, 1), remember=st.booleans())
    def ask(self, which: int, reads: list[str], refusals: int, failures: int, remember: bool) -> None:
        """Under faults, and then without: what was planned is then what is served."""
        window = self.at(which)
        self.faults(reads, refusals, failures)
        answer = window.ask("q", max_tokens=2, remember=remember and window.tokens < 40)
        self.faults([], 0, 0)
        self.check_usage(answer.usage)
        self.check_ask(window)

    @rule(which=WHICH)
    def plain_ask(self, which: int) -> None:
        self.check_ask(self.at(which))

    def check_ask(self, window: Window) -> None:
        plan = window.plan()
        answer = window.ask("q", max_tokens=1)
        assert answer.usage.misses == answer.usage.fallbacks == 0
        for entry, true in zip(plan.entries, self.engine.served, strict=True):
            assert entry.exact == true or (true and entry.lane == "survivor"), entry
        self.check_usage(answer.usage)

    def check_usage(self, usage: Usage) -> None:
        true = all(self.engine.served)
        assert usage.exact == true or (true and "survivor" in usage.reused_tokens)

    def faults(self, reads: list[str], refusals: int, failures: int) -> None:
        self.engine.unreliable.reads, self.engine.unreliable.refusals = list(reads), refusals
        self.engine.failures = failures

    @invariant()
    def what_is_known_is_true(self) -> None:
        for window in getattr(self, "windows", []):
            window.check()
            state = window.snapshot()
            self.contents.update({p.id: p.chunk for p in (*state.placed, *state.evicted)})
            for p in (*state.placed, *state.evicted):
                self.check_conditioning(state, p)
        for key in self.engine.store.list("span/"):
            if self.fresh(key):
                found = self.engine.repo.get_span(key)
                assert found is not None
                assert found[1]["exact"] == (self.engine.told(found[0]) is not None), key

    def fresh(self, key: str, *about: Any) -> bool:
        """Whether the store holds ``key`` with bytes that have not been looked at for this before."""
        blob = self.engine.store.get(key)
        new = blob is not None and (key, hash(blob), *about) not in self.seen
        self.seen.add((key, hash(blob), *about))
        return new

    def check_conditioning(self, state: State, placed: Any) -> None:
        """KV that is called exact is what a forward over exactly its antecedents gives, and no other KV is."""
        if placed.kv is None or not self.fresh(placed.kv.span, placed.id, placed.kv):
            return
        found = self.engine.repo.get_span(placed.kv.span)
        assert found is not None
        front = [self.engine.encode_system_prompt(state.system_prompt).token_ids]
        with contextlib.suppress(LookupError):
            front += [self.engine.encode(self.contents[i]).token_ids for i in (*placed.kv.antecedents, placed.id)]
            told = self.engine.told(found[0]) if placed.kv.patch is None else None
            assert placed.kv.exact == (told == tuple(t for ids in front for t in ids)), placed

    def teardown(self) -> None:
        for window in getattr(self, "windows", []):
            window.close()
        assert self.engine.store.stats().leased == 0


TestExactBit, TestExactBitAtLength = machines(ExactBit, 20, 120, stateful_step_count=20)
