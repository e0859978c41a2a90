"""The agent: it watches a growing stream through a window, and asks after every move.

Each frame is appended (the oldest one is evicted when the window is full) and asked about. In between the agent looks back at
evicted frames, tries two branches and keeps one, tries another order, serves a frame free of its context and back, and tests
if a frame matters. Every ask is also answered by an exact re-prefill and by blind reuse, and counted for three users of a
prefix cache.

With ``Fidelity("exact")`` the agent spares the prefix: a full window falls to half of its frames, what is looked back at comes to
the end, and no frame is served free of its context, which would be an approximation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from ctxwin.baselines import Ledger, PrefixCache, PrefixUser, Prompt, Reference
from ctxwin.baselines.policies import Policy
from ctxwin.demo.footage import SYSTEM_PROMPT, Footage, Query
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded
from ctxwin.fidelity import Fidelity
from ctxwin.window.ask import kl
from ctxwin.window.window import Window

Step = dict[str, Any]
"""One ask: the ledger's row of it (`Ledger.rows`) and

``seed``, ``index``, ``op`` (the move), ``time`` (of the newest frame, in seconds), ``kind`` (of the question), ``note``;
``answer_reprefill``, ``answer_blind``: of an exact forward over the same frames, and of blind reuse;
``kl``, ``kl_blind``: KL(re-prefill || window) and KL(re-prefill || blind) of the first answer token, in nats;
``background_tokens``: the part of ``computed_tokens`` that was no prompt: canonicals, patches, tests of disposability;
``vision_encodes_prefix_cache``: the ``naive`` user's; ``bytes_loaded``; ``ttft_s``, ``ttft_reprefill_s``: seconds to the first
answer token; ``placed``: the frames in prompt order, each with its lane.
"""

CYCLE = ("look_back", "fork", "look_back", "reorder", "look_back", "toggle", "look_back", "disposable")
IDLE_EVERY = 8
"""Frames between idle periods, in which the window frees bytes if they are needed."""


@dataclass(frozen=True)
class Move:
    """Difference between the frames of an ask and those of the stream: recalled or dropped frames, or another order."""

    recalled: Sequence[int] = ()
    without: Sequence[int] = ()
    reordered: bool = False


class Agent:
    """One run over one stream.

    Args:
        engine: shared by runs, with its store.
        footage: the video to watch.
        frames: maximum number of placed frames.
        fidelity: of the window.
        ledger: counts the window's asks; the users of a prefix cache are counted here, by the script.
        caches: of these users; they outlive the run like the engine's store.
        seed: of the choices and questions.
        max_tokens: of an answer.
    """

    def __init__(
        self,
        engine: Engine,
        footage: Footage,
        frames: int,
        fidelity: Fidelity,
        ledger: Ledger,
        caches: Mapping[Policy, PrefixCache],
        seed: int,
        max_tokens: int = 4,
    ) -> None:
        self._engine, self._footage, self._frames = engine, footage, frames
        self._ledger, self._caches, self._seed, self._max_tokens = ledger, caches, seed, max_tokens
        self._rng = np.random.default_rng([seed, 7])
        self._system_prompt = engine.encode_system_prompt(SYSTEM_PROMPT)
        self._reference = Reference(engine, self._system_prompt)
        self._users: dict[Policy, PrefixUser[int]] = {policy: PrefixUser(policy) for policy in caches}
        self.window = Window(engine, SYSTEM_PROMPT, fidelity=fidelity)
        self._exact = fidelity.mode == "exact"
        ledger.watch(self.window)
        self._encoded: list[Encoded] = []
        self._ids: list[str] = []
        self._count = self._multi = 0
        self.bytes_freed = self.idle_tokens = 0

    def run(self, limit: int | None = None) -> Iterator[Step]:
        """Watch the stream to its end or for ``limit`` asks, and yield each ask."""
        for step in self._watch():
            yield step
            if limit is not None and self._count >= limit:
                return

    def _watch(self) -> Iterator[Step]:
        moves = cycle(getattr(self, f"_{name}") for name in CYCLE)
        for frame in range(len(self._footage.chunks)):
            yield self._arrive(frame)
            if frame + 1 >= self._frames:
                yield from next(moves)()
            last = frame + 1 == len(self._footage.chunks)  # idle work after the last ask would belong to no step
            if not last and (frame + 1) % IDLE_EVERY == 0 and self.window.fidelity.mode == "patched":
                tokens_before = self._engine.counters.prefill_tokens
                self.bytes_freed += self.window.maintenance.compress(if_short=True)
                self.idle_tokens += self._engine.counters.prefill_tokens - tokens_before

    def _arrive(self, frame: int) -> Step:
        self._ids.append(self.window.append(self._footage.chunks[frame]))
        slid = self.window.slide(self._leaving(len(self.window.ids)))
        self._encoded.append(self._engine.encode(self.window.chunk(self._ids[-1])))
        for user in self._users.values():
            user.arrive(frame, self._fits, drop=self._frames // 2)
        return self._ask("slide" if slid else "append", self.window, self._pick(self._frames_in(self.window)))

    def _look_back(self) -> Iterator[Step]:
        """Recall evicted frames to their places for one question; the oldest ones are evicted meanwhile.

        In a branch, so that the stream's own window is unchanged: an ask after other frames may write back the preceding ones
        as exact, and lose what they had absorbed from frames that are evicted only temporarily.
        """
        with self.window.fork() as branch:
            yield from self._ask_recalled(branch, "recall")
            if self._exact:  # what made room leaves the stream's window, too, so that the prefix breaks once
                for placement in [i for i in self.window.ids if i not in branch.ids]:
                    self.window.evict(placement)

    def _ask_recalled(self, window: Window, op: str, note: str = "") -> Iterator[Step]:
        target = self._recall_target(window)
        if target is None:
            return
        back, query = target
        frames = self._frames_in(window)
        for frame in frames[: self._leaving(len(frames) + len(back))]:
            window.evict(self._ids[frame])
        for frame in back:
            window.recall(self._ids[frame], len(window.ids) if self._exact else None)
        yield self._ask(op, window, query, Move(recalled=back), note=note)

    def _leaving(self, count: int) -> int:
        """Return how many of ``count`` frames leave a window that must hold them."""
        over = max(0, count - self._frames)
        return max(over, self._frames // 2) if over and self._exact else over

    def _recall_target(self, window: Window) -> tuple[tuple[int, ...], Query] | None:
        frames = self._frames_in(window)
        for kind in self._kinds():
            for count in (1, 2):
                remaining = frames[max(0, len(frames) + count - self._frames) :]
                evicted = [f for f in range(len(self._ids)) if f not in frames]
                target = self._footage.look_back(remaining, evicted, kind, self._rng)
                if target is not None and len(target[0]) <= count:
                    return target
        return None

    def _fork(self) -> Iterator[Step]:
        """Look back in one branch and drop a frame from the middle in another; adopt the second."""
        with self.window.fork() as past, self.window.fork() as lean:
            yield from self._ask_recalled(past, "fork", note="branch 1 looks back")
            dropped = self._footage.expendable(self._frames_in(lean))
            lean.evict(self._ids[dropped])
            query = self._pick(self._frames_in(lean))
            note = f"branch 2 drops frame {dropped}; adopted"
            yield self._ask("fork", lean, query, Move(without=(dropped,)), note=note)
            self.window.adopt(lean)
        for user in self._users.values():
            user.leave([dropped])

    def _reorder(self) -> Iterator[Step]:
        """Try another order of the newest two frames, in a branch."""
        with self.window.fork() as branch:
            frames = self._frames_in(branch)
            order = [*frames[:-2], frames[-1], frames[-2]]
            branch.reorder([self._ids[f] for f in order])
            query = self._pick(order, about=order[-2:])
            note = "the newest two swapped, in a branch"
            yield self._ask("reorder", branch, query, Move(reordered=True), note=note)

    def _toggle(self) -> Iterator[Step]:
        """Serve a frame free of its context and ask what it shows by itself, then switch it back and ask any question."""
        frames = self._frames_in(self.window)
        frame = frames[int(self._rng.integers(1, len(frames)))]
        for conditioned in (False, True):
            if not self._exact:
                self.window.toggle(self._ids[frame], conditioned=conditioned)
            query = self._pick(frames, about=(frame,), kinds=None if conditioned else ("single_hop", "open"))
            op = "toggle_on" if conditioned else "toggle_off"
            yield self._ask(op, self.window, query, note=f"frame {frame}")

    def _disposable(self) -> Iterator[Step]:
        """Test if the oldest frame matters for a question about another one."""
        frames = self._frames_in(self.window)
        oldest = frames[0]
        query = self._pick(frames, about=frames[1:])
        tested = self.window.disposable(self._ids[oldest], query.text, self._max_tokens)
        verdict = "disposable" if tested.disposable else "needed"
        note = f"frame {oldest} is {verdict}: {tested.answer_with!r} with, {tested.answer_without!r} without"
        yield self._ask("disposable", self.window, query, note=note, tested=oldest)

    def _kinds(self) -> list[str]:
        """Return the kinds of question in the order to try them, so that half of all asks are of the first kind."""
        first, *others = self._footage.kinds
        return [first, *others] if 2 * self._multi <= self._count + 1 else [*others, first]

    def _pick(
        self, frames: Sequence[int], about: Sequence[int] | None = None, kinds: Sequence[str] | None = None
    ) -> Query:
        """Return a question of the next kind in turn, otherwise of another kind, otherwise about any frame."""
        candidates = [k for k in self._kinds() if kinds is None or k in kinds]
        for scope in (about, None):
            for kind in candidates:
                query = self._footage.question(frames, kind, self._rng, scope)
                if query is not None:
                    return query
        raise ValueError(f"frames {list(frames)} must have a question of kind {' or '.join(candidates)}, got none")

    def _ask(
        self, op: str, window: Window, query: Query, move: Move = Move(), *, tested: int | None = None, note: str = ""
    ) -> Step:
        frame_numbers = self._frames_in(window)
        entries = window.plan().entries
        answer = window.ask(query.text, self._max_tokens, logprobs=-1)
        encoded, frames = self._engine.encode_query(query.text), [self._encoded[f] for f in frame_numbers]
        sampling = Sampling(self._max_tokens, logprobs=-1)
        with self._ledger.aside():
            exact = self._reference.reprefill(frames, encoded, sampling)
            blind = self._reference.blind(frames, encoded, sampling)
        costs = self._serve(frame_numbers, encoded, move)
        if tested is not None:  # these users must ask twice
            second_costs = self._serve([f for f in frame_numbers if f != tested], encoded, Move(without=(tested,)))
            costs = {name: cost + second_costs[name] for name, cost in costs.items()}
        step: Step = self._ledger.rows[-1]
        usage, note_of = answer.usage, self._ledger.note
        note_of(seed=self._seed, index=self._count, op=op, time=self._footage.times[len(self._ids) - 1])
        note_of(kind=query.kind, truth=query.truth, note=note)
        note_of(answer_reprefill=exact.text.strip(), answer_blind=blind.text.strip())
        first = answer.first_token_logprobs
        note_of(kl=kl(exact.logprobs, first), kl_blind=kl(exact.logprobs, blind.logprobs))
        note_of(background_tokens=step["computed_tokens"] - usage.computed_tokens, **costs)
        note_of(vision_encodes_prefix_cache=costs["vision_encodes_naive"], bytes_loaded=usage.bytes_loaded)
        note_of(ttft_s=usage.ttft_s, ttft_reprefill_s=exact.ttft_s)
        lanes = [{"lane": e.lane, "tokens": e.tokens, "exact": e.exact, "depth": e.depth} for e in entries]
        note_of(placed=[{"frame": f} | lane for f, lane in zip(frame_numbers, lanes, strict=True)])
        self._multi += query.kind == self._footage.kinds[0]
        self._count += 1
        return step

    def _serve(self, frames: Sequence[int], query: Encoded, move: Move = Move()) -> dict[str, int]:
        """Return the costs of an ask for the users of a prefix cache. A recalled frame stays for this ask only."""
        costs: dict[str, int] = {}
        for policy, user in self._users.items():
            asking_user = PrefixUser(policy, list(frames))
            if policy != "naive":
                back = [f for f in move.recalled if f not in user.held]
                user.make_room(back, self._fits, drop=self._frames // 2)
                asking_user = user.copy()
                for frame in back:
                    asking_user.place(frame, before=range(frame + 1, len(self._ids)) if policy == "trim" else ())
                if move.reordered:
                    asking_user.reorder(frames)
                asking_user.leave(move.without)
            parts = [self._system_prompt, *(self._encoded[f] for f in asking_user.held), query]
            computed, encodes = self._caches[policy].serve(Prompt.of(parts))
            costs |= {f"computed_tokens_{policy}": computed, f"vision_encodes_{policy}": encodes}
        return costs

    def _fits(self, frames: Sequence[int]) -> bool:
        return len(frames) <= self._frames

    @property
    def frames_watched(self) -> int:
        """Frames watched so far."""
        return len(self._ids)

    def _frames_in(self, window: Window) -> list[int]:
        return [self._ids.index(i) for i in window.ids]
