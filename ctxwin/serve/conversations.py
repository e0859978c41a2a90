"""The windows behind plain chats: one for each conversation, brought to what each of its requests says.

A request's rendered prompt is the wanted state of a window. What stayed keeps its KV, what left, moved or came back becomes
edits, and only what is new is computed; its last segment, the question, always is. A conversation is known by the name its
client gives it, else by content: the one with the most tokens in common. Both are looked up within one tenant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxwin.engines.base import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import resolve
from ctxwin.window.assembly import Assembly, Laid, Work
from ctxwin.window.lanes import Before
from ctxwin.window.placement import placement
from ctxwin.window.state import Placed, State
from ctxwin.window.sync import synced

if TYPE_CHECKING:
    from ctxwin.engines.vllm.rendered import HandedOver, PromptEngine
    from ctxwin.kv.layout import SpanKV

KEPT, SERVED = 256, 1024
"""For each conversation: segments that left and may come back, and segments of which it remembers how they were served."""
SETTLE_S = 10.0
"""Most seconds that a request waits for the KV of the one before it, which is being read back; then it is computed again."""
_log = logging.getLogger("ctxwin.serve")


@dataclass(eq=False)
class Conversation:
    """One conversation. Its state is immutable and replaced as a whole.

    Attributes:
        named: whether its client gave it a name.
        before: how chunks were served, see `Assembly.before`.
        settling: how many requests have been answered whose KV is not read back yet.
    """

    state: State
    seed: str
    named: bool
    used: float
    before: OrderedDict[str, Before] = field(default_factory=OrderedDict)
    settling: int = 0


@dataclass
class Turn:
    """One request of a conversation, from its preparation to the KV that it leaves.

    Attributes:
        lanes: prompt tokens by lane.
        edits: how the window came to what the request says, by kind of edit.
    """

    conversation: Conversation
    engine: PromptEngine
    fidelity: Fidelity
    state: State
    laid: Laid
    handed: HandedOver
    work: Work
    lanes: dict[str, int]
    edits: Mapping[str, int]
    released: bool = False

    @property
    def ahead(self) -> int:
        """Tokens that were computed before the request itself ran."""
        return self.handed.made.computed_tokens + self.work.tokens


class Conversations:
    """The conversations of one tenant. Thread-safe; `prepare` and `finish` block.

    Args:
        most: how many are kept; the one that was idle longest makes room.
        ttl: seconds until an idle one is forgotten.
    """

    def __init__(self, most: int, ttl: float) -> None:
        self._most = most
        self._ttl = ttl
        self._known: OrderedDict[str, Conversation] = OrderedDict()  # the least recently used first
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._known)

    def prepare(self, engine: PromptEngine, name: str, fidelity: Fidelity) -> Turn:
        """Brings a conversation's window to a prompt, and hands its KV to the engine.

        Args:
            engine: of the rendered prompt.
            name: what the client calls the conversation; "" where it says nothing.

        Raises like `Window.ask`; nothing is known of the new segments' KV then. Cost: O(segments x placed), and the
        forwards of what is new in front of what is held.
        """
        fidelity = fidelity if fidelity.mode != "auto" else resolve(fidelity, engine.spec.model)
        # vLLM's own request is the only one of a turn, with all tokens: nothing is computed between what is loaded.
        fidelity = fidelity.model_copy(update={"recompute": None, "merge": None})
        conversation, state, made = self._bring(engine, name, fidelity)
        assembly, work = Assembly(engine, before=conversation.before), Work()
        laid = assembly.lay_out(state, fidelity, work)
        end = laid.end(state).computed(engine.query_chunk.id, "computed")
        start = state.system_prompt_advance + sum(p.advance for p in state.placed)
        query = Segment(engine.query, start, capture=True, span_key=end.span)
        handed = engine.hand_over([*laid.segments, query], laid.salt)
        lanes: Counter[str] = Counter()
        held = laid.segments[0].span is not None and not work.system_prompt
        lanes["resident" if held else "computed"] += state.system_prompt_tokens
        for choice in laid.choices:
            lanes[choice.lane] += choice.placed.tokens
        lanes["computed"] += engine.query.tokens
        turn = Turn(conversation, engine, fidelity, state, laid, handed, work, dict(lanes), made)
        return turn

    def answered(self, turn: Turn) -> None:
        """Says that `finish` will follow: the next request of the conversation waits for what this one has computed."""
        with self._changed:
            turn.conversation.settling += 1
            turn.released = True

    def finish(self, turn: Turn, *, finished: bool) -> None:
        """Stores what a request has computed, unless it did not end well, and lets go of what it held."""
        try:
            captured = turn.engine.take_back(turn.handed, finished=finished)
            settled = self._settled(turn, captured) if captured else None
            if settled is not None:
                with self._changed:
                    self._merge(turn, settled)
        finally:
            turn.engine.forget_media()
            with self._changed:
                turn.conversation.settling -= turn.released
                self._changed.notify_all()

    def _settled(self, turn: Turn, captured: dict[int, SpanKV]) -> State:
        assembly = Assembly(turn.engine, before=turn.conversation.before)
        settled = assembly.settle(turn.state, turn.laid, captured, turn.fidelity)
        while len(assembly.before) > SERVED:
            assembly.before.popitem(last=False)
        span = captured.get(len(turn.laid.segments))
        if span is not None:  # as the chunk that it will be in the next request
            served = turn.laid.end(turn.state).computed(turn.engine.query_chunk.id, "computed")
            absorbed = turn.laid.absorbed(len(turn.laid.choices))
            said = {"provenance": served.provenance, "exact": served.exact, "absorbed": absorbed}
            assembly.put(served.span, span, turn.engine.query, **said)
        return settled

    def _merge(self, turn: Turn, settled: State) -> None:
        """Brings what was learnt into the conversation, which another request may have moved on meanwhile."""
        current = turn.conversation.state
        if current is turn.state:
            turn.conversation.state = settled
            return
        learnt = {p.id: p for p in settled.placed}

        def known(placed: Placed) -> Placed:
            new = learnt.get(placed.id)
            return placed if new is None or placed.kv is not None else placed.replace(kv=new.kv, seen=new.seen)

        turn.conversation.state = current.replace(
            placed=tuple(map(known, current.placed)), evicted=tuple(map(known, current.evicted))
        )

    def _bring(
        self, engine: PromptEngine, name: str, fidelity: Fidelity
    ) -> tuple[Conversation, State, Mapping[str, int]]:
        """The conversation of a prompt, and its state that places exactly what the prompt holds."""
        first = engine.encode_system_prompt("")
        opened = State(
            engine=engine.identity,
            system_prompt=engine.system_prompt.id,
            system_prompt_tokens=first.tokens,
            system_prompt_advance=first.advance,
            budget=engine.spec.max_tokens,
            fidelity=fidelity,
        )
        with self._changed:
            self._sweep()
            conversation, keep = self._find(engine, opened, name)
            until = time.monotonic() + SETTLE_S
            while conversation.settling and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            state = conversation.state
            if state.system_prompt_key != opened.system_prompt_key:  # another system prompt, or another salt
                state = opened
            if not keep:  # another conversation that begins like this one
                conversation = Conversation(state, digest("seed", conversation.seed, time.monotonic_ns()), False, 0.0)
            made: Counter[str] = Counter()
            steps = synced(
                state,
                engine.chunks,
                lambda before, chunk: placement(engine, before, chunk, conversation.seed),
                lambda before, placed: before.find_evicted(placed),
                move=False,
            )
            for new, edit, ids in steps:
                state = new
                made[edit.op] += len(ids)
            conversation.state = state = state.replace(evicted=state.evicted[-KEPT:])
            conversation.used = time.monotonic()
            key = digest("conversation", name) if name else conversation.seed
            self._known[key] = conversation
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return conversation, state, made

    def _find(self, engine: PromptEngine, opened: State, name: str) -> tuple[Conversation, bool]:
        """The conversation that a prompt goes on with, and whether it is that one or only begins like it."""
        fresh = Conversation(opened, digest("seed", opened.system_prompt_key, time.monotonic_ns()), bool(name), 0.0)
        if name:
            return self._known.get(digest("conversation", name), fresh), True
        wanted = Counter[str]()
        for chunk in engine.chunks:
            wanted[chunk.id] += 1
        best, most = fresh, 0
        for known in self._known.values():
            if known.named or known.state.system_prompt_key != opened.system_prompt_key:
                continue
            left, common = wanted.copy(), 0
            for placed in known.state.placed:
                if left[placed.chunk_id] > 0:
                    left[placed.chunk_id] -= 1
                    common += placed.tokens
            if common >= most:
                best, most = known, common
        held = sum(p.tokens for p in best.state.placed)
        return best, best is fresh or 2 * most >= held

    def _sweep(self) -> None:
        now = time.monotonic()
        while self._known:
            key, oldest = next(iter(self._known.items()))
            if now - oldest.used <= self._ttl:
                return
            del self._known[key]
