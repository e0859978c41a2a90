"""The agent: it watches a growing stream through a window, and asks after every move.

Each frame is appended (the oldest one leaves when the window is full) and asked about. In between it looks back at
evicted frames, tries two branches and keeps one, tries another order, serves a frame clean of its context and back, and
tests whether a frame matters. Every ask is also answered by the yardsticks and counted for the opponents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ctxwin.baselines.reprefill import Reference
from ctxwin.chunk import Chunk
from ctxwin.demo.footage import HEADER, Footage, Query
from ctxwin.demo.opponents import Ask, Opponent
from ctxwin.demo.record import Step
from ctxwin.engines.base import Encoded, Engine, Sampling
from ctxwin.fidelity import Fidelity
from ctxwin.window.ask import kl
from ctxwin.window.window import Window

CYCLE = ("look_back", "fork", "look_back", "reorder", "look_back", "toggle", "look_back", "disposable")
IDLE_EVERY = 8
"""Frames between two idle moments, in which the window swaps conditioned KV for canonical and patch."""


@dataclass
class _Done:
    """Work done so far by the window alone, by the engine's own counters."""

    tokens: int = 0
    encodes: int = 0

    def since(self, earlier: _Done) -> _Done:
        return _Done(self.tokens - earlier.tokens, self.encodes - earlier.encodes)


class Agent:
    """One run over one stream.

    Args:
        engine: shared by runs; what it holds from earlier ones stays.
        footage: what is watched.
        frames: most frames placed at once.
        fidelity: of the window.
        opponents: their caches outlive the run as the engine's store does.
        seed: of the choices and questions.
        max_tokens: of an answer.
    """

    def __init__(
        self,
        engine: Engine,
        footage: Footage,
        frames: int,
        fidelity: Fidelity,
        opponents: Sequence[Opponent],
        seed: int,
        max_tokens: int = 4,
    ) -> None:
        if frames < 3:
            raise ValueError(f"the window must hold at least 3 frames, got {frames}")
        self._engine, self._footage, self._frames = engine, footage, frames
        self._opponents, self._seed, self._max_tokens = opponents, seed, max_tokens
        self._rng = np.random.default_rng([seed, 7])
        system_prompt = engine.encode_system_prompt(HEADER)
        self._reference = Reference(engine, system_prompt)
        for opponent in opponents:
            opponent.start(system_prompt)
        self.window = Window(engine, HEADER, fidelity=fidelity)
        self._encoded: list[Encoded] = []
        self._ids: list[str] = []
        self._count = 0
        self._multi = 0
        self._done, self._told = _Done(), _Done()
        self.bytes_freed = self.idle_tokens = 0

    def run(self, limit: int | None = None) -> Iterator[Step]:
        """Watches the stream to its end or for ``limit`` asks, yielding each."""
        for step in self._watch():
            yield step
            if limit is not None and self._count >= limit:
                return

    def _watch(self) -> Iterator[Step]:
        moves = {
            "look_back": self._look_back, "fork": self._fork, "reorder": self._reorder, "toggle": self._toggle,
            "disposable": self._disposable,
        }  # fmt: skip
        turn = 0
        for frame in range(len(self._footage.pixels)):
            yield self._arrive(frame)
            if frame + 1 >= self._frames:
                yield from moves[CYCLE[turn % len(CYCLE)]]()
                turn += 1
            last = frame + 1 == len(self._footage.pixels)  # idle work behind the last ask would stand in no step
            if not last and (frame + 1) % IDLE_EVERY == 0 and self.window.fidelity.mode == "patched":
                before = self._done.tokens
                with self._working():
                    self.bytes_freed += self.window.compress()
                self.idle_tokens += self._done.tokens - before

    # -- moves -------------------------------------------------------------------------------------------------------

    def _arrive(self, frame: int) -> Step:
        chunk = Chunk.image(self._footage.pixels[frame], text=f"t={self._footage.times[frame]:g} s")
        with self._working():
            placement = self.window.append(chunk)
            slid = self.window.slide(max(0, len(self.window.ids) - self._frames))
        self._ids.append(placement)
        self._encoded.append(self._engine.encode(self.window.chunk(placement)))
        for opponent in self._opponents:
            opponent.arrive(self._encoded[-1])
        return self._ask("slide" if slid else "append", self.window, self._pick(self._placed(self.window)))

    def _look_back(self) -> Iterator[Step]:
        """Evicted frames come back to their places for one question; the oldest make room meanwhile.

        In a branch, so that the stream's own window stays as it was: an ask behind other frames may settle what stands
        in front as exact, and forget what it had absorbed from frames that are only gone for a moment.
        """
        with self.window.fork() as branch:
            step = self._recalled(branch)
            if step is not None:
                yield step

    def _recalled(self, window: Window) -> Step | None:
        found = self._find_back(window)
        if found is None:
            return None
        back, query = found
        placed = self._placed(window)
        room = placed[: max(0, len(placed) + len(back) - self._frames)]
        with self._working():
            for frame in room:
                window.evict(self._ids[frame])
            for frame in back:
                window.recall(self._ids[frame])
        return self._ask("recall", window, query, recalled=back)

    def _find_back(self, window: Window) -> tuple[tuple[int, ...], Query] | None:
        placed = self._placed(window)
        for kind in self._kinds():
            for away in (1, 2):
                kept = placed[max(0, len(placed) + away - self._frames) :]
                evicted = [f for f in range(len(self._ids)) if f not in placed]
                found = self._footage.look_back(kept, evicted, kind, self._rng)
                if found is not None and len(found[0]) <= away:
                    return found
        return None

    def _fork(self) -> Iterator[Step]:
        """One branch looks back, the other one drops a frame from the middle; the second is adopted."""
        with self.window.fork() as past, self.window.fork() as lean:
            step = self._recalled(past)
            if step is not None:
                yield replace(step, op="fork", note="branch 1 looks back")
            dropped = self._footage.expendable(self._placed(lean))
            with self._working():
                lean.evict(self._ids[dropped])
            placed = self._placed(lean)
            note = f"branch 2 drops frame {dropped}; adopted"
            yield self._ask("fork", lean, self._pick(placed), without=(dropped,), note=note)
            with self._working():
                self.window.adopt(lean)
        for opponent in self._opponents:
            opponent.drop([dropped])

    def _reorder(self) -> Iterator[Step]:
        """Another order of the newest two frames, tried in a branch."""
        with self.window.fork() as branch:
            placed = self._placed(branch)
            order = [*placed[:-2], placed[-1], placed[-2]]
            with self._working():
                branch.reorder([self._ids[f] for f in order])
            query = self._pick(order, about=order[-2:])
            yield self._ask("reorder", branch, query, reordered=True, note="the newest two swapped, in a branch")

    def _toggle(self) -> Iterator[Step]:
        """A frame clean of its context is asked for what it shows by itself; back on, for anything."""
        placed = self._placed(self.window)
        frame = placed[int(self._rng.integers(1, len(placed)))]
        for conditioned in (False, True):
            with self._working():
                self.window.toggle(self._ids[frame], conditioned=conditioned)
            query = self._pick(placed, about=(frame,), kinds=None if conditioned else ("single_hop", "open"))
            op = "toggle_on" if conditioned else "toggle_off"
            yield self._ask(op, self.window, query, note=f"frame {frame}")

    def _disposable(self) -> Iterator[Step]:
        """Whether the oldest frame matters for a question about another one."""
        placed = self._placed(self.window)
        oldest = placed[0]
        query = self._pick(placed, about=placed[1:])
        with self._working():
            tested = self.window.disposable(self._ids[oldest], query.text, self._max_tokens)
        verdict = "disposable" if tested.disposable else "needed"
        note = f"frame {oldest} is {verdict}: {tested.answer_with!r} with, {tested.answer_without!r} without"
        yield self._ask("disposable", self.window, query, note=note, also_without=oldest)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """The kinds of this footage, the one that is due first: half of the asks are the first kind."""
        first, *others = self._footage.kinds
        return [first, *others] if 2 * self._multi <= self._count + 1 else [*others, first]

    def _pick(
        self, placed: Sequence[int], about: Sequence[int] | None = None, kinds: Sequence[str] | None = None
    ) -> Query:
        """A question of the kind that is due, else of another one, else about any frame."""
        wanted = [k for k in self._kinds() if kinds is None or k in kinds]
        for scope in (about, None):
            for kind in wanted:
                query = self._footage.question(placed, kind, self._rng, scope)
                if query is not None:
                    return query
        raise ValueError(f"frames {list(placed)} must have a question of kind {' or '.join(wanted)}, got none")

    def _ask(
        self,
        op: str,
        window: Window,
        query: Query,
        *,
        recalled: Sequence[int] = (),
        without: Sequence[int] = (),
        reordered: bool = False,
        also_without: int | None = None,
        note: str = "",
    ) -> Step:
        placed = self._placed(window)
        entries = window.plan().entries
        with self._working():
            answer = window.ask(query.text, self._max_tokens, logprobs=-1)
        spent = self._done.since(self._told)
        self._told = replace(self._done)
        encoded = self._engine.encode_query(query.text)
        frames = [self._encoded[f] for f in placed]
        sampling = Sampling(self._max_tokens, logprobs=-1)
        exact = self._reference.reprefill(frames, encoded, sampling)
        blind = self._reference.blind(frames, encoded, sampling)
        asks = [Ask(tuple(placed), encoded, tuple(recalled), tuple(without), reordered)]
        if also_without is not None:
            asks.append(Ask(tuple(f for f in placed if f != also_without), encoded, without=(also_without,)))
        costs = {o.name: np.sum([o.ask(ask) for ask in asks], axis=0).tolist() for o in self._opponents}
        shown = tuple(
            {"frame": f, "lane": e.lane, "tokens": e.tokens, "exact": e.exact, "depth": e.depth}
            for f, e in zip(placed, entries, strict=True)
        )
        self._multi += query.kind == self._footage.kinds[0]
        self._count += 1
        usage = answer.usage
        assert spent.tokens >= usage.computed_tokens, (spent, usage)  # the engine's own counters miss nothing
        return Step(
            seed=self._seed,
            index=self._count - 1,
            op=op,
            time=self._footage.times[len(self._ids) - 1],
            kind=query.kind,
            query=query.text,
            answer=answer.text.strip(),
            truth=query.truth,
            answer_reprefill=exact.text.strip(),
            answer_blind=blind.text.strip(),
            kl=kl(exact.logprobs, answer.first_token_logprobs),
            kl_blind=kl(exact.logprobs, blind.logprobs),
            tokens_by_lane=dict(usage.reused_tokens),
            prompt_tokens=usage.prompt_tokens,
            computed_tokens=spent.tokens,
            background_tokens=spent.tokens - usage.computed_tokens,
            vision_encodes=spent.encodes,
            **_opponent_costs(costs),
            bytes_loaded=usage.bytes_loaded,
            ttft_s=usage.ttft_s,
            ttft_reprefill_s=exact.ttft_s,
            placed=shown,
            note=note,
        )

    def _placed(self, window: Window) -> list[int]:
        """Frames in prompt order."""
        return [self._ids.index(i) for i in window.ids]

    def _working(self) -> _Working:
        return _Working(self._engine, self._done)


class _Working:
    """Adds what the engine does inside a ``with`` block to the window's account."""

    def __init__(self, engine: Engine, done: _Done) -> None:
        self._counters, self._done = engine.counters, done

    def __enter__(self) -> None:
        self._before = (self._counters.prefill_tokens, self._counters.vision_encodes)

    def __exit__(self, *exc: object) -> None:
        self._done.tokens += self._counters.prefill_tokens - self._before[0]
        self._done.encodes += self._counters.vision_encodes - self._before[1]


def _opponent_costs(costs: dict[str, list[int]]) -> dict[str, Any]:
    return {
        **{f"computed_tokens_{name}": costs[name][0] for name in ("naive", "trim", "append")},
        "vision_encodes_prefix_cache": costs["naive"][1],
        **{f"vision_encodes_{name}": costs[name][1] for name in ("trim", "append")},
    }
