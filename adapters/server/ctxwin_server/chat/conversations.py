"""Windows of plain chats: one for each conversation, updated to the prompt of each request.

A request's rendered prompt is the target state of a window. Segments that stayed keep their KV; those that left, moved or came
back become edits, and only new ones are computed, always including the last one, the question. Among the conversations of one
tenant and one name a request continues the one that shares the longest prefix with it, then the most tokens. A conversation that
shares less than half with the request stays unchanged, and a branch of it continues.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import resolve
from ctxwin.window.antecedents import pack
from ctxwin.window.assembly import Assembly
from ctxwin.window.continuation import Continuation, ServedMemos
from ctxwin.window.layout import Layout, Work
from ctxwin.window.placements import initial_state, new_placement
from ctxwin.window.state import FORMAT, Placed, State, system_prompt_provenance
from ctxwin.window.sync import sync_steps
from ctxwin_chats.prediction import common_prefix
from ctxwin_chats.records import Record, Records
from ctxwin_chats.shared_records import SavedRecords

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin_vllm.rendered import RenderedRequest, SubmittedRequest

KEPT, SERVED = 256, 1024
"""For each conversation: evicted segments that may come back, and segments whose way of being served is remembered."""
_CHUNK_ID = attrgetter("chunk_id")
_log = logging.getLogger("ctxwin.serve")


class WriteBackPending(Exception):
    """KV that a request could use is being written back; call `Conversations.prepare` again once ``pending`` is done."""

    def __init__(self, pending: Sequence[Future[None]]) -> None:
        super().__init__(f"KV of {len(pending)} requests is being read back")
        self.pending = pending


@dataclass(eq=False, kw_only=True)
class Conversation(Record):
    """One conversation. Its state is immutable and replaced as a whole.

    Attributes:
        memo, newest: how chunks were served before, see `Assembly`; of what was loaded nothing is kept.
        write_backs: of answered requests whose KV is not written back yet; each is done once it is.
        packed: JSON of its chunks, without antecedents, by placement.
    """

    state: State
    seed: str
    memo: ServedMemos = field(default_factory=partial(ServedMemos, SERVED))
    newest: Continuation = field(default_factory=Continuation)
    write_backs: set[Future[None]] = field(default_factory=set)
    packed: dict[str, tuple[Placed, str]] = field(default_factory=dict)

    def pack(self) -> str:
        """Return its JSON for another server. Cost: of the chunks that have changed since the last time, and O(chunks) steps."""
        state, parts, packed = self.state, dict[str, str](), dict[str, tuple[Placed, str]]()
        lists = {"placed": state.placed, "evicted": state.evicted}
        fronts = {name: [p.kv.antecedents if p.kv else None for p in chunks] for name, chunks in lists.items()}
        sliced = pack({name: [{"kv": {"": 0}} for _ in chunks] for name, chunks in lists.items()}, fronts)
        for name, chunks in lists.items():
            texts = []
            for entry, slot in zip(chunks, sliced[name], strict=True):
                old, text = self.packed.get(entry.id, (None, ""))
                if old is not entry:
                    bare = entry.replace(kv=entry.kv and entry.kv.without_antecedents())
                    text = bare.model_dump_json(exclude_defaults=True)
                packed[entry.id] = entry, text
                place = json.dumps(slot["kv"].get("antecedents", []))
                texts.append(text.replace('"antecedents":[]', f'"antecedents":{place}', 1))
            parts[name] = f'"{name}":[{",".join(texts)}]'
        self.packed = packed
        head = state.replace(placed=(), evicted=()).model_dump_json(exclude_defaults=True)
        parts["orders"] = f'"format":{FORMAT},"orders":{json.dumps(sliced.get("orders", []))}}}'
        return f'{{"key":{json.dumps(self.key)},"seed":{json.dumps(self.seed)},"state":{",".join((head[:-1], *parts.values()))}}}'


@dataclass
class Turn:
    """One request of a conversation, from its preparation until its KV is written back.

    Attributes:
        lanes: prompt tokens by lane.
        edits: number of edits that updated the window to the request, by kind.
    """

    conversation: Conversation
    engine: RenderedRequest
    fidelity: Fidelity
    state: State
    layout: Layout
    submitted: SubmittedRequest
    work: Work
    lanes: dict[str, int]
    edits: Mapping[str, int]
    written_back: Future[None] = field(default_factory=Future)

    @property
    def ahead(self) -> int:
        """Number of tokens that were computed before the request itself ran."""
        return self.submitted.generation.computed_tokens + self.work.tokens


class Conversations(Records[Conversation]):
    """The conversations of one tenant, and branches. Thread-safe; `prepare` and `finish` block."""

    def __init__(self, most: int, ttl: float) -> None:
        super().__init__(most, ttl)
        self._update_lock = threading.Lock()

    def saved(self) -> list[SavedRecords[Any]]:
        """Return what a conversation's record has of its windows."""

        def unpack(data: dict[str, Any]) -> Conversation:
            state = State.model_validate(data["state"])
            return Conversation(key=data["key"], name="", size=0, seed=data["seed"], state=state)

        return [SavedRecords("windows", self, Conversation.pack, unpack)]

    def begin(
        self, build: Callable[[], RenderedRequest], name: str, fidelity: Fidelity, record_name: str, patient: bool
    ) -> Turn:
        """Do as `prepare`, for a request that ``build`` returns."""
        return self.prepare(build(), name, fidelity, record_name, patient=patient)

    def prepare(
        self, engine: RenderedRequest, name: str, fidelity: Fidelity, record_name: str = "", *, patient: bool = True
    ) -> Turn:
        """Update a conversation's window to a prompt, and submit its KV to the engine.

        Args:
            engine: of the rendered prompt.
            name: the client's name of the conversation; "" for none.
            record_name: see `Record`.
            patient: raise WriteBackPending while KV of the conversation is being written back; otherwise recompute it.

        Raises as `Window.ask`; no KV of the new segments is recorded then. Cost: O(segments x placed), and the forwards
        of new segments before stored ones.
        """
        fidelity = resolved_fidelity(fidelity, engine.spec.model, int(time.monotonic()))
        conversation, state, edits = self._update(engine, name, fidelity, record_name, patient)
        cached = engine.cached_tokens if fidelity.mode == "exact" else None
        newest, work = replace(conversation.newest), Work()
        assembly = Assembly(engine, memo=conversation.memo, newest=newest, cached_tokens=cached)
        layout = newest.without_transient(assembly.build_layout(state, fidelity, work), state, engine)
        conversation.newest.broken_at, last = newest.broken_at, layout.segments[-1]
        end = layout.end(state).computed(engine.query_chunk.id, "computed")
        start, lanes = last.start + last.encoded.advance, Counter[str](layout.lanes)
        query = Segment(engine.query, start, capture=last.capture or last.available, span_key=end.span)
        submitted = engine.submit([*layout.segments, query], layout.salt)
        is_resident = layout.segments[0].available and not work.system_prompt
        lanes["resident" if is_resident else "computed"] += state.system_prompt_tokens
        lanes["computed"] += engine.query.tokens
        return Turn(conversation, engine, fidelity, state, layout, submitted, work, dict(lanes), edits)

    def expect_write_back(self, turn: Turn) -> None:
        """Announce a call of `finish`: the next request of the conversation waits for this one's KV."""
        with self._update_lock:
            turn.conversation.write_backs.add(turn.written_back)

    def finish(self, turn: Turn, *, finished: bool) -> None:
        """Store the KV that a request computed, if it succeeded, and release its resources."""
        try:
            captured = turn.engine.collect(turn.submitted, finished=finished)
            state = self._write_back(turn, captured) if finished else None
            if state is not None:
                with self._update_lock:
                    self._merge(turn, state)
        finally:
            turn.engine.close()
            with self._update_lock:
                turn.conversation.write_backs.discard(turn.written_back)
            turn.written_back.set_result(None)
            turn.engine.costs.settle()

    def _write_back(self, turn: Turn, captured: dict[int, SpanKV]) -> State:
        assembly = Assembly(turn.engine, memo=turn.conversation.memo)
        state = assembly.write_back(turn.state, turn.layout, captured, turn.fidelity)
        turn.conversation.newest.selection, *_ = assembly.choose(state, turn.fidelity)  # for the next request
        span = captured.get(len(turn.layout.segments))
        if span is not None:  # stored as the chunk that it becomes in the next request
            entry = turn.layout.end(turn.state).computed(turn.engine.query_chunk.id, "computed")
            absorbed = turn.layout.absorbed(len(turn.layout.choices))
            options = {"provenance": entry.provenance, "exact": entry.exact, "absorbed": absorbed}
            assembly.put(entry.span, span, turn.engine.query, **options)
        return state

    def _merge(self, turn: Turn, state: State) -> None:
        """Merge the new KV into the conversation, which another request may have changed since."""
        current = turn.conversation.state
        if current is turn.state:
            turn.conversation.state = state
            return
        learnt = {p.id: p for p in state.placed}

        def update(entry: Placed) -> Placed:
            newer = learnt.get(entry.id)
            return entry if newer is None or entry.kv is not None else entry.replace(kv=newer.kv, seen=newer.seen)

        placed, evicted = (tuple(map(update, entries)) for entries in (current.placed, current.evicted))
        turn.conversation.state = current.replace(placed=placed, evicted=evicted)

    def _update(
        self, engine: RenderedRequest, name: str, fidelity: Fidelity, record_name: str, patient: bool
    ) -> tuple[Conversation, State, Mapping[str, int]]:
        """Return the conversation of a prompt, its state with exactly the prompt's segments placed, and the edits by kind."""
        with self._update_lock:
            conversation = self._continued(engine, fidelity, name, patient)
            state, edits = conversation.state, Counter[str]()
            place = partial(new_placement, engine, seed=conversation.seed)
            # Exact KV is found by its provenance; any other counts as moved: `without_transient`.
            returning = _without_kv if fidelity.mode == "exact" else State.find_evicted
            steps = sync_steps(state, engine.chunks, place, returning, move=False)
            for new, edit, ids in steps:
                state = new
                edits[edit.op] += len(ids)
            conversation.state = state = state.replace(evicted=state.evicted.newest(KEPT))
            conversation.used, conversation.record_name = time.monotonic(), record_name
            self.keep(conversation, conversation)
        return conversation, state, edits

    def _continued(self, engine: RenderedRequest, fidelity: Fidelity, name: str, patient: bool) -> Conversation:
        """Return the conversation that shares the most with a prompt, or a branch of it where that is less than half of it.

        A new one where none shares anything.
        """
        ids, prompt = [chunk.id for chunk in engine.chunks], engine.system_prompt.id
        key = digest("conversation", name, system_prompt_provenance(engine.identity, prompt))
        candidates = [(common_prefix(c.state.placed, ids, _CHUNK_ID), c) for c in reversed(self.find(key))]
        longest, best, most = max((shared for shared, _ in candidates), default=0), None, 0
        for shared, candidate in candidates:  # among equals the most recently used wins
            placed = candidate.state.placed
            whole = shared == len(placed)  # as of a chat that grows
            if shared == longest and (tokens := placed.tokens if whole else _shared_tokens(placed, ids)) > most:
                best, most = candidate, tokens
        if best is None:
            state = initial_state(engine, prompt, engine.spec.max_tokens, fidelity).replace(engine=engine.identity)
            return Conversation(key=key, name=name, size=0, state=state, seed=_new_seed(state.system_prompt_key))
        if patient and best.write_backs:
            raise WriteBackPending([*best.write_backs])
        if 2 * most >= best.state.placed.tokens:
            return best
        return Conversation(key=key, name=name, size=0, state=best.state, seed=_new_seed(best.seed))


@lru_cache(maxsize=64)
def resolved_fidelity(fidelity: Fidelity, model: str, second: int) -> Fidelity:
    """Return how a chat is served, whose one request has all tokens; what a profile says is read once a ``second``."""
    fidelity = fidelity if fidelity.mode != "auto" else resolve(fidelity, model)
    return fidelity.model_copy(update={"recompute": None, "merge": None})


def _without_kv(state: State, placement: str) -> Placed:
    return state.find_evicted(placement).replace(kv=None)


def _new_seed(base: str) -> str:
    return digest("seed", base, time.monotonic_ns())


def _shared_tokens(entries: Sequence[Placed], ids: Sequence[str]) -> int:
    """Return the tokens of entries that are among chunks, however often each is there."""
    tokens = {entry.chunk_id: entry.tokens for entry in entries}
    shared = Counter(map(_CHUNK_ID, entries)) & Counter(ids)
    return sum(tokens[chunk] * number for chunk, number in shared.items())
