"""From lanes to KV: fetches or rebuilds the spans an ask needs, runs the engine, stores what was computed.

Every stored segment may be gone by the time it is wanted. `Assembly.lay_out` therefore fetches first and commits later: a
key that cannot be read is remembered as missing, counted, and the lanes are chosen again without it, so that a failure of
the store becomes a recomputation and never a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ctxwin.engines.base import Encoded, Engine, Generation, Sampling, Segment, Tally
from ctxwin.errors import ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import compressed, served_basis
from ctxwin.window.answer import Plan
from ctxwin.window.lanes import Choice, canonical_key, choose, plan_of
from ctxwin.window.state import Conditioning, Placed, State, orbit_key, patch_key, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.patch import Patch

T = TypeVar("T")
log = logging.getLogger("ctxwin")


@dataclass
class Work(Tally):
    """What one operation cost beyond `Engine.generate`: forwards run to form canonicals and patches, and misses."""

    misses: int = 0
    system_prompt: bool = False  # whether the system prompt was among them
    background: bool = False  # nobody waits for it


@dataclass(frozen=True)
class Laid:
    """A layout ready for an engine: system prompt first, then one segment per placed chunk."""

    choices: tuple[Choice, ...]
    segments: tuple[Segment, ...]
    salt: str

    def computed(self, state: State) -> Laid:
        """What was served where the engine could load nothing: everything was computed in place, and is exact."""
        choices: list[Choice] = []
        for choice in self.choices:
            front = [c.served.provenance for c in choices]
            provenance = provenance_of(state.system_prompt_key, choice.placed.chunk_id, front)
            served = Conditioning(
                provenance=provenance, antecedents=tuple(c.placed.id for c in choices), exact=True, depth=0,
                lane="computed", span=span_key(provenance),
            )  # fmt: skip
            choices.append(Choice(choice.placed, "computed", served, compute=True))
        bare = (replace(segment, span=None, patch=None, patch_key="", approximate=False) for segment in self.segments)
        return Laid(tuple(choices), tuple(bare), "")


def salt_of(segments: Sequence[Segment]) -> str:
    """The prefix-cache space of a layout: "" (the exact one) or a digest of the KV that a forward would not give.

    Everything up to the last segment that is `approximate` names the space; what stands behind it is what a forward behind
    exactly that gives, so the engine's own chain of block hashes tells it apart. An append or a fork therefore stays in
    its space, and an edit undone comes back to it.
    """
    last = max((i for i, segment in enumerate(segments) if segment.approximate), default=0)
    return digest("salt", [segment.key for segment in segments[: last + 1]]) if last else ""


def is_approximate(state: State, choice: Choice, before: Sequence[Choice]) -> bool:
    """Whether a chunk is served KV that a forward behind what is in front of it, as that is served, would not give.

    So are survivors, patches and canonicals. So is exact KV behind an approximation, and KV that was computed behind one
    which has become exact since: an engine's prefix cache names what it computes by what is in front, and would take one
    for the other. A span's key names the KV in front of it (see `span_key`), so it tells.
    """
    if choice.compute:
        return False
    front = [c.served for c in before]
    now = provenance_of(state.system_prompt_key, choice.placed.chunk_id, [f.provenance for f in front])
    computed_here = span_key(now, None if all(f.exact for f in front) else front)
    return choice.served.patch is not None or choice.served.span != computed_here


@dataclass
class Assembly:
    """Binds one engine (with its repository of spans) to the functions a window needs. Holds no window state."""

    engine: Engine
    missing: set[str] = field(default_factory=set)

    @property
    def repo(self):  # type: ignore[no-untyped-def]
        return self.engine.repo

    def has(self, key: str) -> bool:
        """Whether ``key`` can be served, as far as is known without reading it."""
        return key not in self.missing and self.repo.contains(key)

    def encode(self, placed: Placed) -> Encoded:
        return self.engine.encode(placed.chunk)

    # -- planning ------------------------------------------------------------------------------------------------

    def system_prompt_key(self, state: State) -> str:
        return span_key(provenance_of(state.system_prompt_key, "system_prompt", ()))

    def plan(self, state: State, fidelity: Fidelity) -> Plan:
        """What an ask of ``state`` would do; reads no KV."""
        kv = self.engine.spec.kv
        itemsize = 4 if kv.dtype == "float32" else 2
        return plan_of(
            state,
            choose(state, fidelity, self.has),
            kv.span_bytes(1, itemsize),
            self.has(self.system_prompt_key(state)),
        )

    # -- laying out ----------------------------------------------------------------------------------------------

    def lay_out(self, state: State, fidelity: Fidelity, work: Work) -> Laid:
        """Chooses lanes, fetches their KV, forms missing canonicals. Repeats with what turned out to be missing."""
        self.missing.clear()
        self.know_basis(fidelity)
        # Each round either succeeds or learns of at least one missing key, so it ends.
        while True:
            choices = choose(state, fidelity, self.has)
            segments = self._segments(state, choices, work)
            if segments is not None:
                return Laid(tuple(choices), segments, salt_of(segments))

    def _segments(self, state: State, choices: Sequence[Choice], work: Work) -> tuple[Segment, ...] | None:
        system_prompt = self._system_prompt(state, work)
        segments = [system_prompt]
        for i, (choice, start) in enumerate(zip(choices, state.starts(), strict=True)):
            encoded = self.encode(choice.placed)
            if choice.compute:
                segments.append(Segment(encoded, start, capture=True, span_key=choice.served.span))
                continue
            formed = None
            if choice.form_canonical:
                system_prompt = segments[0] = self._computed_system_prompt(state, system_prompt, work)
                _, formed = self.canonical(state, choice.placed, system_prompt, work)
            # What was formed just now serves even where the store refused it; asking again would never end.
            # What is served as exact must have been stored as exact, and behind the same antecedents.
            wanted = {"provenance": choice.served.provenance, "exact": True} if choice.served.exact else {}
            span = formed or self._span(choice.served.span, encoded, work, **wanted)
            if span is None:
                return None
            patch = None
            if choice.served.patch is not None:
                patch = self._patch(choice.served.patch, work)
                if patch is None:
                    return None
            served = choice.served
            segments.append(
                Segment(
                    encoded, start, span=span, span_key=served.span, patch=patch, patch_key=served.patch or "",
                    approximate=is_approximate(state, choice, choices[:i]),
                )
            )  # fmt: skip
        return tuple(segments)

    def _system_prompt(self, state: State, work: Work) -> Segment:
        encoded = self.engine.encode_system_prompt(state.system_prompt)
        key = self.system_prompt_key(state)
        span = self._span(key, encoded, work) if self.has(key) else None
        return Segment(encoded, 0, span=span, capture=span is None, span_key=key)

    def _computed_system_prompt(self, state: State, system_prompt: Segment, work: Work) -> Segment:
        """``system_prompt`` with its KV: computed once for all canonicals that are formed behind it."""
        if system_prompt.span is not None:
            return system_prompt
        span = self.engine.prefill([], system_prompt.encoded, 0, background=work.background, tally=work)
        work.system_prompt = True
        self.put(system_prompt.span_key, span, system_prompt.encoded, provenance="system_prompt", exact=True)
        return replace(system_prompt, span=span, capture=False)

    def _span(self, key: str, encoded: Encoded, work: Work, **wanted: object) -> SpanKV | None:
        found = self.repo.get_span(
            key, token_ids=encoded.token_ids, positions=encoded.positions, chunk=encoded.chunk_id, **wanted
        )
        if found is None:
            self._miss(key, work)
            return None
        span: SpanKV = found[0]
        return span

    def _patch(self, key: str, work: Work) -> Patch | None:
        patch: Patch | None = self.repo.get_patch(key)
        if patch is None:
            self._miss(key, work)
        return patch

    def know_basis(self, fidelity: Fidelity) -> None:
        """Tells the repository the directions that stored patches of this fidelity are coefficients of."""
        if fidelity.layout == "shared" and fidelity.mode == "patched":
            over = served_basis(self.engine.spec.model, self.engine.spec.kv, fidelity).basis
            if over is not None:
                self.repo.know_basis(over)

    def _miss(self, key: str, work: Work) -> None:
        self.missing.add(key)
        work.misses += 1
        log.warning("%s is gone from the store: recomputing", key[:20])

    def put(self, key: str, span: SpanKV, encoded: Encoded, **meta: object) -> None:
        """Stores a computed span; a refusal is logged by the store and costs a recomputation later."""
        self.missing.discard(key)
        self.repo.put_span(key, span, {"token_ids": list(encoded.token_ids), "chunk": encoded.chunk_id, **meta})

    def canonical(
        self, state: State, placed: Placed, system_prompt: Segment | None, work: Work
    ) -> tuple[str, SpanKV | None]:
        """The key of a chunk's canonical; where it is not held, also its KV, formed by one forward behind the system prompt."""
        provenance, key = canonical_key(state, placed.chunk_id)
        if self.has(key):
            return key, None
        system_prompt = self._computed_system_prompt(state, system_prompt or self._system_prompt(state, work), work)
        encoded = self.encode(placed)
        with_system_prompt = partial(
            self.engine.prefill, [system_prompt], encoded, state.system_prompt_advance, background=work.background, tally=work
        )  # fmt: skip
        span = self._seen([placed], with_system_prompt)
        self.put(key, span, encoded, provenance=provenance, exact=True)
        return key, span

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self,
        laid: Laid,
        query: Encoded,
        sampling: Sampling,
        *,
        capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
    ) -> Generation:
        call = partial(
            self.engine.generate, laid.segments, query, sampling, salt=laid.salt, capture_query=capture_query,
            on_token=on_token,
        )  # fmt: skip
        return self._seen([choice.placed for choice in laid.choices], call)

    def _seen(self, placed: Iterable[Placed], call: Callable[[], T]) -> T:
        """``call``, again where vision embeddings left a shared store since ``placed`` were encoded: they are made anew."""
        for _ in range(2):
            try:
                return call()
            except ChunkUnavailable:
                for p in placed:
                    self.encode(p)
        return call()

    def settle(self, state: State, laid: Laid, captured: dict[int, SpanKV], fidelity: Fidelity) -> State:
        """Stores captured KV and returns ``state`` with each placement's conditioning as it was served.

        The version stays: what is placed has not changed, only what is known about its KV.
        """
        if 0 in captured:
            self.put(
                laid.segments[0].span_key, captured[0], laid.segments[0].encoded, provenance="system_prompt", exact=True
            )
        placed = []
        for i, choice in enumerate(laid.choices, start=1):
            p = choice.placed
            if choice.compute:
                if i not in captured:  # the engine could not read it back: stay uncomputed
                    placed.append(p)
                    continue
                served = choice.served
                self.put(
                    served.span, captured[i], laid.segments[i].encoded,
                    provenance=served.provenance, exact=served.exact, depth=served.depth,
                )  # fmt: skip
                if fidelity.mode == "patched" and served.antecedents:
                    self._store_factors(state, choice, captured[i], laid.segments[i].encoded, fidelity)
            if choice.settles:
                p = p.replace(kv=choice.served, seen=True, unseen=())
            placed.append(p)
        return state.replace(placed=tuple(placed))

    def _store_factors(
        self, state: State, choice: Choice, conditioned: SpanKV, encoded: Encoded, fidelity: Fidelity
    ) -> None:
        """Stores patches against every base at hand; never runs a forward on the path of an answer."""
        _, base = canonical_key(state, choice.placed.chunk_id)
        for key in {base, choice.removal} - {None}:
            assert key is not None
            if self.has(key):
                self.form(conditioned, key, choice.served.provenance, encoded, fidelity)

    def form(
        self, conditioned: SpanKV, base_key: str, provenance: str, encoded: Encoded, fidelity: Fidelity
    ) -> str | None:
        """Forms and stores the patch that turns a stored base into ``conditioned``; None where the base is gone."""
        from ctxwin.kv.deficit import deficit

        key = patch_key(provenance, base_key, fidelity.patch_name)
        self.know_basis(fidelity)
        if self.has(key):
            return key
        base = self.repo.get_span(base_key, token_ids=encoded.token_ids)
        if base is None:
            return None
        spec = self.engine.spec
        patch = compressed(deficit(conditioned, base[0], spec.kv), spec.model, spec.kv, fidelity)
        self.missing.discard(key)
        self.repo.put_patch(key, patch)
        return key

    # -- background and offline work -------------------------------------------------------------------------------

    def reform(self, state: State, index: int, laid: Laid, fidelity: Fidelity, work: Work) -> State:
        """Re-forms one placed chunk behind what is in front of it now: one forward, no vision encode."""
        segment = laid.segments[index + 1]
        behind = partial(
            self.engine.prefill, laid.segments[: index + 1], segment.encoded, segment.start,
            salt=salt_of(laid.segments[: index + 1]), background=work.background, tally=work,
        )  # fmt: skip
        fallbacks = work.fallbacks
        span = self._seen([c.placed for c in laid.choices[: index + 1]], behind)
        if work.fallbacks > fallbacks:
            laid = laid.computed(state)
        choice = laid.choices[index]
        front = [c.served for c in laid.choices[:index]]
        now = provenance_of(state.system_prompt_key, choice.placed.chunk_id, [f.provenance for f in front])
        exact = all(f.exact for f in front)
        depth = 0 if exact else 1 + max(f.depth for f in front)
        served = choice.served.model_copy(
            update={
                "provenance": now, "antecedents": tuple(c.placed.id for c in laid.choices[:index]), "exact": exact,
                "depth": depth, "lane": "formed", "span": span_key(now, None if exact else front), "patch": None,
            }
        )  # fmt: skip
        self.put(served.span, span, segment.encoded, provenance=now, exact=exact, depth=depth)
        formed = replace(choice, lane="formed", served=served, compute=True)
        if fidelity.mode == "patched" and front:
            self._store_factors(state, formed, span, segment.encoded, fidelity)
        placed = list(state.placed)
        placed[index] = placed[index].replace(kv=served, seen=True, unseen=())
        return state.replace(placed=tuple(placed))

    def orbit(
        self, state: State, index: int, orders: Iterable[Sequence[int]], fidelity: Fidelity, work: Work
    ) -> str | None:
        """Forms one patch for the chunk at ``index`` from the mean over ``orders`` of the chunks in front of it.

        Each order is a permutation of ``range(index)``. Cost: a forward of everything in front and of the chunk per
        order, no vision encode. Kamera, section 5 "Reorder". Over a shared basis the mean is projected. Returns the patch key.
        """
        from ctxwin.kv.orbit import OrbitMean

        target, spec = state.placed[index], self.engine.spec
        encoded = self.encode(target)
        system_prompt = self._system_prompt(state, work)
        base_key, _ = self.canonical(state, target, system_prompt, work)
        base = self.repo.get_span(base_key, token_ids=encoded.token_ids)
        if base is None:
            return None
        met: list[SpanKV] = []
        for order in orders:
            segments, at = [system_prompt], state.system_prompt_advance
            for i in order:
                front = self.encode(state.placed[i])
                before = partial(
                    self.engine.prefill, tuple(segments), front, at, background=work.background, tally=work
                )
                span = self._seen(state.placed[: index + 1], before)
                segments.append(Segment(front, at, span=span))
                at += front.advance
            behind = partial(self.engine.prefill, tuple(segments), encoded, at, background=work.background, tally=work)
            met.append(self._seen(state.placed[: index + 1], behind))
        mean = OrbitMean(spec.kv)
        for span in met:
            mean.add(span, base[0])
        self.know_basis(fidelity)
        patch = compressed(mean.mean, spec.model, spec.kv, fidelity)
        patch.meta.update(orders=mean.count, spread=mean.spread)
        key = orbit_key(
            state.system_prompt_key, target.chunk_id, [p.chunk_id for p in state.placed[:index]], fidelity.patch_name
        )
        self.repo.put_patch(key, patch)
        self.missing.discard(key)
        return key
