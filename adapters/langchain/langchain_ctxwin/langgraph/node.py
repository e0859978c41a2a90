"""`WindowNode`: answers a graph's messages over a window, which `follow` synchronises with them.

New messages are placed, edited and removed ones are evicted. Chunks that the window's policy has evicted stay evicted: a
window holds the newest part of a conversation, not all of it. Chunks placed by other nodes are not moved.
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.language_models import LangSmithParams
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, RemoveMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.graph.message import REMOVE_ALL_MESSAGES, _messages_delta_reducer, add_messages
from langgraph.runtime import Runtime, get_runtime
from pydantic import Field
from typing_extensions import TypedDict

from ctxwin.chunk import Chunk, MediaPart
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.media import unpack_frames
from ctxwin.policies.base import Eviction, Retrieval, WindowView
from ctxwin.policies.low_water import LowWater
from ctxwin.store.lru import LRUCache
from ctxwin.window.answer import Answer
from ctxwin.window.ask import AskOptions, OnToken, Question
from ctxwin.window.placements import keep_source
from ctxwin.window.window import Window
from langchain_ctxwin.chat import Answering, Reply
from langchain_ctxwin.langgraph.reference import lost_sources, merge_windows
from langchain_ctxwin.langgraph.session import AsyncSession, Session, engine_of, open_window
from langchain_ctxwin.messages import Conversation, block_key, converse, message_key, parts


class WindowState(TypedDict, total=False):
    """State of a graph with a `WindowNode`: the user's messages, and the reference of the window over them."""

    messages: Annotated[list[AnyMessage], add_messages]
    window: Annotated[dict[str, Any], merge_windows]


class DeltaMessages(DeltaChannel[list[AnyMessage]]):  # type: ignore[misc]
    """A `DeltaChannel` of messages whose snapshots are further apart the more there are; ``REMOVE_ALL_MESSAGES`` clears it.

    A checkpoint holds all messages after as many updates as a quarter of their number, at least 100: the snapshots of a thread
    that grows are together at most five times its size, where a fixed number makes them grow with its square.
    """

    value: list[AnyMessage]

    @property
    def snapshot_frequency(self) -> int:
        """The number of updates from one snapshot to the next."""
        return max(_SNAPSHOT, len(self.value) // 4) if self.is_available() else _SNAPSHOT

    @snapshot_frequency.setter
    def snapshot_frequency(self, _: int) -> None:
        pass  # LangGraph's constructor and `copy` set a fixed one

    def update(self, values: Sequence[Any]) -> bool:
        """Apply the writes of a step."""
        return bool(super().update(self._clear(values)))

    def replay_writes(self, writes: Sequence[Any]) -> None:
        """Apply the writes of the checkpoints since a snapshot."""
        super().replay_writes([("", self.key, value) for value in self._clear([value for *_, value in writes])])

    def _clear(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the writes behind the last message that removes all; if there is one, remove all messages."""
        for i in reversed(range(len(values))):
            messages = values[i] if isinstance(values[i], list) else [values[i]]
            for k in reversed(range(len(messages))):
                if isinstance(messages[k], RemoveMessage) and messages[k].id == REMOVE_ALL_MESSAGES:
                    self.value = []
                    return [messages[k + 1 :], *values[i + 1 :]]
        return values


class DeltaWindowState(TypedDict, total=False):
    """A `WindowState` for long threads: a checkpoint holds new messages, and all of them when a quarter has changed.

    The messages are in LangGraph's `DeltaChannel`, which is in beta: its form on disk may change, and it ignores a
    `RemoveMessage` of an unknown id. A thread that began with a `WindowState` can go on with it.
    """

    messages: Annotated[list[AnyMessage], DeltaMessages(_messages_delta_reducer)]
    window: Annotated[dict[str, Any], merge_windows]


_SNAPSHOT = 100  # updates of a short list from one snapshot to the next
_NOTES: dict[str, Any] = {
    "messages": 0,  # number of messages read
    "digest": "",  # of those messages
    "system_prompt": digest(""),  # requested by those messages
    "arrivals": 0,  # placements so far
    "removed": "",  # placements of removed messages, see `_pack`
    "others": "",  # placements of other nodes
}
"""Notes on a conversation in a reference, with their defaults."""
_MEDIA = 64  # cached media of one message while it is read
_log = logging.getLogger("ctxwin")
_SAMPLING = [name for name in AskOptions.__annotations__ if name not in ("remember", "logprobs", "tools", "n")]


class WindowNode(Runnable[Any, dict[str, Any]]):
    """A node that asks the last human text over a window of the messages before it.

    Messages are identified by content, not by their ids: new ones become chunks, edited and removed ones are synchronised.
    The window's policy evicts what does not fit, except for the turn that asks; the messages themselves are unchanged. The
    answer is returned as an `AIMessage`, and the window keeps the KV of the exchange from the same pass.

    Args:
        messages_key: of the conversation; its reducer must append (`add_messages`, or as in `DeltaWindowState`).
        window_key: of the window's reference; its reducer must be `merge_windows` (see `WindowState`).
        name: of the node.
        max_tokens: maximum tokens of an answer.
        system_prompt: precedes the system messages at the head of the conversation.
        budget, fidelity: of the window, as for `ctxwin.Window`.
        low_water: mark to which a window over its budget falls, as for `ctxwin.Window`; an existing window keeps its own.
        eviction: order in which chunks leave a full window (`ctxwin.policies`); default: the oldest first.
        retrieval: if given, the chunks it chooses for each question are recalled before answering.
        reserve_tokens: tokens kept free in addition to the question and its answer.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused. A
            picture on disk survives a store that lost its content, and so does one that the messages hold as data.
        keep_media: False: blocks that name pictures and videos replace those that came as data once they are stored, so
            that a checkpoint takes a few KB. Only nodes of this window can read such blocks; the pixels are only in the
            engine's store. All messages are in every checkpoint of a `WindowState`, not of a `DeltaWindowState`.
        sampling: ``temperature``, ``top_p``, ``stop``, ``json_schema`` and the other options of decoding, and ``libraries``
            that the model may search while it answers, as for `Window.ask`.

    The engine comes from the run's context (`WindowContext`). Cost of a turn: encoding the new messages, and an ask; if
    earlier messages changed, decoding all of them once.

    Raises at run time the errors of `langchain_ctxwin.messages.converse` for the messages, and BudgetExceeded if
    the question, the rest of its turn and the recalled chunks do not fit.
    """

    def __init__(
        self,
        *,
        messages_key: str = "messages",
        window_key: str = "window",
        name: str = "window",
        max_tokens: int = 256,
        system_prompt: str | None = None,
        budget: int | None = None,
        fidelity: Fidelity | None = None,
        low_water: float | Literal["auto"] | None = None,
        eviction: Eviction | None = None,
        retrieval: Retrieval | None = None,
        reserve_tokens: int = 0,
        allowed_local_media_path: str | Path | None = None,
        keep_media: bool = True,
        **sampling: Any,
    ) -> None:
        if unknown := sampling.keys() - set(_SAMPLING):
            raise TypeError(f"sampling must be of {', '.join(_SAMPLING)}, got {sorted(unknown)}")
        self.name, self.messages_key, self.window_key = name, messages_key, window_key
        self._asking: dict[str, Any] = {"max_tokens": max_tokens, "remember": True, **sampling}
        self._window: dict[str, Any] = {"budget": budget, "fidelity": fidelity, "low_water": low_water}
        self._window["eviction"] = eviction
        self._retrieval, self._system_prompt = retrieval, system_prompt
        self._reserve_tokens, self._files, self._keep_media = reserve_tokens, allowed_local_media_path, keep_media

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """Return the update of the state: the answer's message, and the window's reference.

        The run's callbacks see a chat model answer, so ``stream_mode="messages"`` and `astream_events` stream its tokens.
        """
        window, query, update = self._prepare(input, get_runtime())
        with window:
            return update(_Answerer(window=window, asking=self._asking).invoke([HumanMessage(query)], config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """`invoke`; encoding and answering block no event loop, and cancelling stops the engine."""
        turn: list[Any] = []

        def open() -> Session:
            window, *query_and_update = self._prepare(input, runtime)
            turn.extend(query_and_update)
            return window

        runtime = get_runtime()
        async with AsyncSession.opening(open) as window:
            query, update = turn
            message = await _Answerer(window=window.window, asking=self._asking).ainvoke([HumanMessage(query)], config)
            return await window.run(update, message)

    def _prepare(self, state: Any, runtime: Runtime[Any]) -> tuple[Session, str, Callable[[AIMessage], dict[str, Any]]]:
        """Return the window with all chunks before the question, the question, and a function from answer to state update."""
        reference = _value(state, self.window_key)
        messages = convert_to_messages(_value(state, self.messages_key) or [])
        keys = [message_key(m) for m in messages]
        notes = {**_NOTES, **(reference or {}).get("notes", {}).get(self.messages_key, {})}
        count, new = notes["messages"], messages[notes["messages"] :]
        engine, unchanged = engine_of(runtime.context), bool(count) and self._digest(keys[:count]) == notes["digest"]
        if notes.get("engine", engine.spec.identity) != engine.spec.identity:
            unchanged = False  # the answers' tokens are another model's: they are read anew, from the messages
        continues = unchanged and bool(new) and isinstance(new[0], HumanMessage)  # the previous answer closed the turn
        if reference:
            _keep_sources(engine, lost_sources(engine.repo, reference), messages)
        window = open_window(reference, runtime, retrieval=self._retrieval, **self._window) if reference else None
        try:
            media_cache = _cached_media(window, len(messages))
            turn = sum(1 for _ in takewhile(lambda m: isinstance(m, HumanMessage), reversed(messages)))
            read = new if continues else messages
            if window is not None:
                read = _find_named(engine, read, media_cache, turn)
            talk = converse(engine, read, seen=media_cache, allowed_local_media_path=self._files)
            last = keys[len(keys) - turn :]
            question_chunks = sum(1 for _ in takewhile(lambda piece: piece[0] in last, reversed(talk.pieces)))
            system_prompt = "\n".join(filter(None, [self._system_prompt, talk.system_prompt]))
            if window is None:
                options: Any = {"system_prompt": system_prompt, "retrieval": self._retrieval, **self._window}
                window = open_window(None, runtime, **options)
            self._follow(window, talk, notes, question_chunks, None if continues else system_prompt)
        except BaseException:
            if window is not None:
                window.close()
            raise
        swapped = {} if self._keep_media else _swap_media(engine, messages, media_cache)
        keys = [message_key(swapped[i]) if i in swapped else key for i, key in enumerate(keys)]
        return window, talk.query, partial(self._update, window, keys, notes, list(swapped.values()))

    def _follow(
        self,
        window: Session,
        talk: Conversation,
        notes: dict[str, Any],
        question_chunks: int,
        system_prompt: str | None,
    ) -> None:
        """Synchronise the window and ``notes`` with ``talk``, and evict down to the budget.

        The last ``question_chunks`` chunks belong to the turn that asks. ``system_prompt``: None if ``talk`` only continues the
        conversation.
        """
        state = window.snapshot()
        arrivals = {p.id: p.arrival for p in (*state.placed, *state.evicted)}
        # Chunks that arrived since this node ran are another node's.
        others_arrivals, removed_arrivals = _unpack(notes["others"]), _unpack(notes["removed"])
        others = {i for i, arrival in arrivals.items() if arrival in others_arrivals or arrival >= notes["arrivals"]}
        removed = [i for i, arrival in arrivals.items() if arrival in removed_arrivals]
        if system_prompt is None:
            window.extend(talk.chunks)
        else:
            if system_prompt != window.system_prompt and digest(system_prompt) != notes["system_prompt"]:
                with window.fork(system_prompt=system_prompt) as rebased:
                    window.adopt(rebased)
            notes["system_prompt"] = digest(system_prompt)
            known = {*arrivals.values(), *others_arrivals, *removed_arrivals}
            lost = notes["arrivals"] - sum(arrival < notes["arrivals"] for arrival in known)
            absent = set(follow(window, talk.chunks, removed=removed, others=others, lost=lost))
            removed = [i for i in window.evicted if i in absent]
        conversation_ids = [i for i in window.ids if i not in others][::-1]
        last = zip(conversation_ids, reversed(talk.chunks), range(question_chunks), strict=False)
        mark, spared = window.low_water, frozenset(i for i, c, _ in last if window.chunk(i).id == c.id)
        window.eviction = Sparing(window.eviction, spared)
        if mark is not None:
            window.eviction = LowWater(mark, window.eviction)
        reserve = self._reserve_tokens + window.engine.encode_query(talk.query).tokens + self._asking["max_tokens"]
        if self._retrieval is not None:
            window.retrieval = Without(self._retrieval, frozenset(removed))
            window.look_back(talk.query, reserve_tokens=reserve)
        window.slide(reserve_tokens=reserve)
        notes |= {"removed": _pack(arrivals[i] for i in removed), "others": _pack(arrivals[i] for i in others)}

    def _update(
        self, window: Session, keys: list[str], notes: dict[str, Any], swapped: list[BaseMessage], answer: AIMessage
    ) -> dict[str, Any]:
        keys = [*keys, message_key(answer)]
        read = {"messages": len(keys), "digest": self._digest(keys), "arrivals": window.snapshot().arrivals}
        window.notes[self.messages_key] = notes | read | {"engine": window.engine.spec.identity}
        return {self.messages_key: [*swapped, answer], self.window_key: window.ref()}

    def _digest(self, keys: list[str]) -> str:
        return digest("read", self._system_prompt, keys)


class _Answerer(Answering):
    window: Any = Field(exclude=True, repr=False)
    asking: dict[str, Any]
    cache: bool = False  # the answer depends on more than the question

    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Reply:
        question = Question.of(str(messages[-1].content), **self.asking)

        def ask(_: Reply, on_token: OnToken | None, stopped: Callable[[], bool]) -> list[Answer]:
            return [self.window.answer(question, on_token=on_token, stopped=stopped)]

        return Reply(ask, self.model, costs=False, room=self.asking["max_tokens"])

    @property
    def model(self) -> str:
        return f"{self.window.engine.spec.name}:{self.window.engine.spec.model}"  # as `ChatCtxwin.model`

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        options = {"stop": stop, "model": self.model, **self.asking, **kwargs}
        return super()._get_ls_params(**options) | {"ls_provider": "ctxwin"}


def _keep_sources(engine: Engine, lost: set[str], messages: Sequence[BaseMessage]) -> None:
    """Store the pictures with the contents ``lost`` again, from the messages that hold them as data, the newest first."""
    contents = (m.content for m in reversed(messages) if not isinstance(m.content, str))
    blocks = (block for content in contents for block in content if isinstance(block, dict))
    while lost and (block := next(blocks, None)) is not None:
        with suppress(ValueError):  # a file, or a block that names a picture
            for chunk in parts([block]):
                if isinstance(chunk, Chunk) and not lost.isdisjoint(names := {part.content for part in chunk.media}):
                    keep_source(engine, chunk)
                    lost = lost - names


def _cached_media(window: Session | None, messages: int) -> LRUCache[Chunk]:
    """Return the window's media by the blocks that name them (see `_swap_media`), with room for ``messages`` more messages."""
    state = window.snapshot() if window is not None else None
    media = [part for p in (*state.evicted, *state.placed) for part in p.chunk.media] if state else []
    cached: LRUCache[Chunk] = LRUCache(len(media) + _MEDIA * (messages + 1))
    for part in media:
        cached.put(block_key(_media_name(part)) or "", Chunk(parts=(part,)), 1)
    return cached


def _find_named(
    engine: Engine, messages: Sequence[BaseMessage], media_cache: LRUCache[Chunk], turn: int
) -> list[BaseMessage]:
    """Return ``messages`` without pictures whose names lead nowhere any more, except in the last ``turn``, which asks about them.

    The window forgets what left it long ago, or with the store; a picture whose pixels the store has is cached again.
    """
    legible = []
    for i, message in enumerate(messages):
        lost = []
        for block in message.content if not isinstance(message.content, str) else ():
            if isinstance(block, dict) and "chunk" in block and not media_cache.get(key := block_key(block) or ""):
                stored = engine.repo.get_source(f"source/{block['chunk']}") if block.get("type") == "image" else None
                if stored is not None:
                    media_cache.put(key, Chunk.image(unpack_frames(stored)[0]).light(), 1)
                elif i < len(messages) - turn:
                    lost.append(block)
        if lost:
            _log.warning("%d pictures of message %s left the window and are lost: it is read without", len(lost), i)
            message = message.model_copy(update={"content": [block for block in message.content if block not in lost]})
        legible.append(message)
    return legible


def _media_name(part: MediaPart) -> dict[str, Any]:
    return {"type": part.media, "chunk": part.content}


def _swap_media(
    engine: Engine, messages: Sequence[BaseMessage], media_cache: LRUCache[Chunk]
) -> dict[int, BaseMessage]:
    """Return the messages whose pictures and videos came as data, by index, with blocks that name them instead.

    Those that the store, full say, has refused stay data: nothing else has them.
    """
    swapped: dict[int, BaseMessage] = {}
    for i, message in enumerate(messages):
        if isinstance(message.content, str) or message.id is None:
            continue  # without an id a reducer would append it
        blocks: list[Any] = list(message.content)
        for k, block in enumerate(blocks):
            chunk = media_cache.get(block_key(block) or "") if isinstance(block, dict) else None
            if chunk is not None and engine.repo.contains(f"source/{chunk.media[0].content}"):
                blocks[k] = _media_name(chunk.media[0])
        if blocks != message.content:
            swapped[i] = message.model_copy(update={"content": blocks})
    return swapped


def _value(state: Any, key: str) -> Any:
    """Return a field of a state that is a dict, a dataclass or a pydantic model."""
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)


def _pack(arrivals: Iterable[int]) -> str:
    """Encode a set of placements, given by their arrivals, as short text: notes travel in every checkpoint.

    Such sets have patterns (every third one is another node's, all the oldest were removed): thousands take some 100 bytes.
    """
    arrivals = set(arrivals)
    bits = bytearray(max(arrivals) // 8 + 1 if arrivals else 0)
    for arrival in arrivals:
        bits[arrival // 8] |= 1 << arrival % 8
    return base64.b64encode(zlib.compress(bits, 9)).decode() if bits else ""


def _unpack(text: str) -> set[int]:
    bits = zlib.decompress(base64.b64decode(text)) if text else b""
    return {8 * i + k for i, byte in enumerate(bits) for k in range(8) if byte >> k & 1}


def follow(
    window: Window,
    chunks: Sequence[Chunk],
    *,
    removed: Collection[str] = (),
    others: Collection[str] = (),
    lost: int = 0,
) -> list[str]:
    """Place the chunks of a conversation that ``window`` has not seen; evict placed ones that are not in it.

    Chunks are identified by content; of equal ones the earlier arrival counts as the earlier one. A chunk that the window's
    policy has evicted stays evicted, and so does what stands in its place now. The placed chunks of the conversation are in the
    order of ``chunks`` afterwards.

    Args:
        removed: placements that an earlier call removed; they return if they are in ``chunks`` again.
        others: placements that are not of the conversation.
        lost: how many evicted chunks of the conversation the window no longer knows: the oldest that it has not seen.

    Returns the placements that are no longer in the conversation. Raises like `Window.append`; edits made before the
    error stay. Cost: encoding the new chunks.
    """
    state = window.snapshot()
    conversation = [p for p in (*state.placed, *state.evicted) if p.id not in others]
    matches: defaultdict[str, list[str]] = defaultdict(list)
    for p in sorted(conversation, key=lambda p: (p.id in removed, p.arrival), reverse=True):
        matches[p.chunk_id].append(p.id)
    names: list[str | None] = [matches[chunk.id].pop() if matches[chunk.id] else None for chunk in chunks]
    absent = [placement for unmatched in matches.values() for placement in unmatched]
    skipped = _older(names, conversation, {p.id for p in state.placed}, set(removed), lost)
    for placement in absent:
        if placement in window.ids:
            window.evict(placement)
    tail = max((i + 1 for i, name in enumerate(names) if name is not None), default=0)  # all chunks after it are new
    present, recallable = set(window.ids), set(window.evicted)
    for i, (chunk, name) in enumerate(zip(chunks[:tail], names[:tail], strict=True)):
        if (name is None and i not in skipped) or (name in removed and name not in present):
            following = set(names[i + 1 :])
            at = next((k for k, placement in enumerate(window.ids) if placement in following), len(window.ids))
            if name is None or name not in recallable:  # the window remembers a limited number of evictions
                names[i] = window.insert(at, chunk)
            else:
                window.recall(name, at)
    names[tail:] = window.extend(chunks[tail:])
    rank = {name: i for i, name in enumerate(names)}
    order = iter(sorted((i for i in window.ids if i in rank), key=rank.__getitem__))
    window.reorder([next(order) if placement in rank else placement for placement in window.ids])
    return absent


def _older(names: list[str | None], entries: list[Any], placed: set[str], removed: set[str], lost: int) -> set[int]:
    """Return the indices of new chunks, None in ``names``, in the place of ones that left; a summary of those is none."""
    arrival, skipped, begin = {p.id: p.arrival for p in entries}, set[int](), 0
    for end, name in enumerate(names):
        if name is not None:
            run, after = range(begin, end), arrival[names[begin - 1] or ""] if begin else -1
            gone = {p.id for p in entries if after < p.arrival < arrival[name]}.difference(names) if run else set()
            if not begin and 0 < lost <= len(run):
                skipped |= {*run[: len(run) - len(placed & gone)]}
            elif name not in placed | removed and not placed & gone and (begin or len(gone) + lost <= len(run)):
                skipped |= {*run}
            if name in placed:
                break
            begin = end + 1
    return skipped


@dataclass(frozen=True)
class Without:
    """``retrieval`` without the chunks that are no longer part of the conversation."""

    retrieval: Retrieval
    removed: frozenset[str]

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Return the choice of ``retrieval`` without removed chunks."""
        return [placement for placement in self.retrieval.choose(window, query) if placement not in self.removed]


@dataclass(frozen=True)
class Sparing:
    """``eviction`` without the chunks of the question's turn."""

    eviction: Eviction
    spared: frozenset[str]

    def order(self, window: WindowView) -> Iterator[str]:
        """Yield the order of ``eviction`` without spared chunks."""
        order = self.eviction.order(window)
        try:
            yield from (placement for placement in order if placement not in self.spared)
        finally:
            if isinstance(order, Generator):
                order.close()  # now, not when it is collected: it may hold a fork
