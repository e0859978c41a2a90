"""`WindowNode`: answers a graph's messages over a window, which `follow` brings up to date with them.

New messages arrive, edited and removed ones leave. What the window's policy has evicted stays out, for a window holds the
newest part of a conversation and not all of it. What other nodes have placed stays where it is.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph.message import add_messages
from langgraph.runtime import Runtime, get_runtime
from pydantic import Field
from typing_extensions import TypedDict

from ctxwin.adapters.langchain.chat import Answering, Reply
from ctxwin.adapters.langchain.messages import Conversation, block_key, converse, message_key
from ctxwin.adapters.langgraph.reference import merge_windows
from ctxwin.adapters.langgraph.session import Session, engine_of, open_window
from ctxwin.chunk import Chunk, MediaPart
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.policies.base import Eviction, Retrieval, WindowView
from ctxwin.store.recent import Recent
from ctxwin.window.answer import Answer
from ctxwin.window.ask import AskOptions, OnToken, Question
from ctxwin.window.window import Window


class WindowState(TypedDict, total=False):
    """State of a graph with a `WindowNode`: the user's messages, and the reference of the window over them."""

    messages: Annotated[list[AnyMessage], add_messages]
    window: Annotated[dict[str, Any], merge_windows]


_NOTES: dict[str, Any] = {
    "messages": 0,  # how many were read
    "digest": "",  # of them
    "system_prompt": digest(""),  # that they asked for
    "arrivals": 0,  # placements so far
    "removed": "",  # placements of removed messages, see `_packed`
    "others": "",  # placements of other nodes
}
"""What a reference's notes say of a conversation."""
_MEDIA = 64  # of one message, that are remembered while it is read
_SAMPLING = [name for name in AskOptions.__annotations__ if name not in ("remember", "logprobs", "tools", "n")]


class WindowNode(Runnable[Any, dict[str, Any]]):
    """A node that asks the last human text over a window of what stands before it.

    Messages are recognised by content, not by their ids: new ones become chunks, edited and removed ones are followed. What
    does not fit leaves the window by its policy, except for the turn that asks; the messages stay as they are. The answer is
    returned as an `AIMessage`, and the window remembers the exchange from that very pass.

    Args:
        messages_key: of the conversation; its reducer must append (`add_messages`).
        window_key: of the window's reference; its reducer must be `merge_windows` (see `WindowState`).
        name: of the node.
        max_tokens: most tokens of an answer.
        system_prompt: stands in front of the system messages at the head of the conversation.
        budget, fidelity: of the window, as for `ctxwin.Window`.
        eviction: who leaves a full window first (`ctxwin.policies`); default: the oldest.
        retrieval: if given, what it picks for each question is brought back before answering.
        reserve_tokens: tokens left free beside the question and its answer.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused. A
            picture on disk survives a store that lost its content, one in a message does not.
        keep_media: False: pictures and videos that came as data leave the messages once they are placed, and blocks that name
            them stay, so that a checkpoint takes a few KB. Only nodes of this window can read those; the pixels are in the
            engine's store alone.
        sampling: ``temperature``, ``top_p``, ``stop``, ``json_schema`` and the other options of decoding, and ``libraries`` where
            the model may look things up on its way, as for `Window.ask`.

    The engine comes from the run's context (`WindowContext`). Cost of a turn: encoding the new messages, and an ask; where
    earlier messages changed, decoding all of them once.

    Raises at run time what `ctxwin.adapters.langchain.messages.converse` raises for the messages, and BudgetExceeded where
    the question, the rest of its turn and what is looked back at do not fit.
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
        self._window: dict[str, Any] = {"budget": budget, "fidelity": fidelity, "eviction": eviction}
        self._retrieval, self._system_prompt = retrieval, system_prompt
        self._reserve_tokens, self._files, self._keep_media = reserve_tokens, allowed_local_media_path, keep_media

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """The state's update: the answer's message, and the window's reference.

        The run's callbacks see a chat model answer, so ``stream_mode="messages"`` and `astream_events` stream its tokens.
        """
        window, query, answered = self._prepared(input, get_runtime())
        with window:
            return answered(_Answerer(window=window, asking=self._asking).invoke([HumanMessage(query)], config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """`invoke`; encoding and answering block no event loop, and cancelling stops the engine."""
        window, query, answered = await asyncio.to_thread(self._prepared, input, get_runtime())
        with window:
            made = await _Answerer(window=window, asking=self._asking).ainvoke([HumanMessage(query)], config)
            return await asyncio.to_thread(answered, made)

    def _prepared(
        self, state: Any, runtime: Runtime[Any]
    ) -> tuple[Session, str, Callable[[AIMessage], dict[str, Any]]]:
        """The window with everything in front of the question, the question, and what turns its answer into an update."""
        reference = _value(state, self.window_key)
        messages = convert_to_messages(_value(state, self.messages_key) or [])
        keys = [message_key(m) for m in messages]
        notes = {**_NOTES, **(reference or {}).get("notes", {}).get(self.messages_key, {})}
        count, new = notes["messages"], messages[notes["messages"] :]
        unchanged = bool(count) and self._digest(keys[:count]) == notes["digest"]
        going_on = unchanged and bool(new) and isinstance(new[0], HumanMessage)  # the answer before it closed the turn
        engine = engine_of(runtime.context)
        window = open_window(reference, runtime, retrieval=self._retrieval, **self._window) if reference else None
        try:
            seen = _known_media(window, len(messages))
            talk = converse(engine, new if going_on else messages, seen=seen, allowed_local_media_path=self._files)
            turn = sum(1 for _ in takewhile(lambda m: isinstance(m, HumanMessage), reversed(messages)))
            last = keys[len(keys) - turn :]
            asked = sum(1 for _ in takewhile(lambda piece: piece[0] in last, reversed(talk.pieces)))
            system_prompt = "\n".join(filter(None, [self._system_prompt, talk.system_prompt]))
            if window is None:
                options: Any = {"system_prompt": system_prompt, "retrieval": self._retrieval, **self._window}
                window = open_window(None, runtime, **options)
            self._follow(window, talk, notes, asked, None if going_on else system_prompt)
        except BaseException:
            if window is not None:
                window.close()
            raise
        swapped = {} if self._keep_media else _swapped(messages, seen)
        keys = [message_key(swapped[i]) if i in swapped else key for i, key in enumerate(keys)]
        return window, talk.query, partial(self._answered, window, keys, notes, list(swapped.values()))

    def _follow(
        self, window: Session, talk: Conversation, notes: dict[str, Any], asked: int, system_prompt: str | None
    ) -> None:
        """Brings the window and ``notes`` up to date, and makes room.

        ``asked`` chunks at the end are of the turn that asks. ``system_prompt``: None where ``talk`` only continues the rest.
        """
        state = window.snapshot()
        known = {p.id: p.arrival for p in (*state.placed, *state.evicted)}
        # What has arrived since this node ran is another node's.
        theirs, taken_out = _unpacked(notes["others"]), _unpacked(notes["removed"])
        others = {i for i, arrival in known.items() if arrival in theirs or arrival >= notes["arrivals"]}
        removed = [i for i, arrival in known.items() if arrival in taken_out]
        if system_prompt is None:
            window.extend(talk.chunks)
        else:
            if system_prompt != window.system_prompt and digest(system_prompt) != notes["system_prompt"]:
                with window.fork(system_prompt=system_prompt) as behind:
                    window.adopt(behind)
            notes["system_prompt"] = digest(system_prompt)
            gone = set(follow(window, talk.chunks, removed=removed, others=others))
            removed = [i for i in window.evicted if i in gone]
        mine = [i for i in window.ids if i not in others][::-1]
        last = zip(mine, reversed(talk.chunks), range(asked), strict=False)
        window.eviction = Sparing(window.eviction, frozenset(i for i, c, _ in last if window.chunk(i).id == c.id))
        reserve = self._reserve_tokens + window.engine.encode_query(talk.query).tokens + self._asking["max_tokens"]
        if self._retrieval is not None:
            window.retrieval = Without(self._retrieval, frozenset(removed))
            window.look_back(talk.query, reserve_tokens=reserve)
        window.slide(reserve_tokens=reserve)
        notes |= {"removed": _packed(known[i] for i in removed), "others": _packed(known[i] for i in others)}

    def _answered(
        self, window: Session, keys: list[str], notes: dict[str, Any], swapped: list[BaseMessage], answer: AIMessage
    ) -> dict[str, Any]:
        keys = [*keys, message_key(answer)]
        read = {"messages": len(keys), "digest": self._digest(keys), "arrivals": window.snapshot().arrivals}
        window.notes[self.messages_key] = notes | read
        return {self.messages_key: [*swapped, answer], self.window_key: window.ref()}

    def _digest(self, keys: list[str]) -> str:
        return digest("read", self._system_prompt, keys)


class _Answerer(Answering):
    """Answers over a window that is open."""

    window: Any = Field(exclude=True, repr=False)
    asking: dict[str, Any]
    cache: bool = False  # what the window answers depends on more than the question

    @property
    def _llm_type(self) -> str:
        return "ctxwin"

    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Reply:
        question = Question.of(str(messages[-1].content), **self.asking)

        def ask(_: Reply, on_token: OnToken | None, stopped: Callable[[], bool]) -> list[Answer]:
            return [self.window.answer(question, on_token=on_token, stopped=stopped)]

        model = self.window.engine.spec.model
        return Reply(ask, model, costs=False, room=self.asking["max_tokens"])


def _known_media(window: Session | None, more: int) -> Recent[Chunk]:
    """The window's media by the blocks that name them (see `_swapped`), with room for those of ``more`` messages."""
    state = window.snapshot() if window is not None else None
    media = [part for p in (*state.evicted, *state.placed) for part in p.chunk.media] if state else []
    known: Recent[Chunk] = Recent(len(media) + _MEDIA * (more + 1))
    for part in media:
        known.put(block_key(_named(part)) or "", Chunk(parts=(part,)), 1)
    return known


def _named(part: MediaPart) -> dict[str, Any]:
    return {"type": part.media, "chunk": part.content}


def _swapped(messages: Sequence[BaseMessage], seen: Recent[Chunk]) -> dict[int, BaseMessage]:
    """The messages whose pictures and videos came as data, by index, with the names of these in their place."""
    swapped: dict[int, BaseMessage] = {}
    for i, message in enumerate(messages):
        if isinstance(message.content, str) or message.id is None:
            continue  # without an id a reducer would append it
        blocks: list[Any] = list(message.content)
        for k, block in enumerate(blocks):
            found = seen.get(block_key(block) or "") if isinstance(block, dict) else None
            blocks[k] = _named(found.media[0]) if found is not None else block
        if blocks != message.content:
            swapped[i] = message.model_copy(update={"content": blocks})
    return swapped


def _value(state: Any, key: str) -> Any:
    """A field of a state that is a dict, a dataclass or a pydantic model."""
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)


def _packed(arrivals: Iterable[int]) -> str:
    """A set of placements, named by their arrivals, as short text: notes travel in every checkpoint.

    Such sets have patterns (every third one is another node's, all the oldest were removed): thousands take some 100 bytes.
    """
    arrivals = set(arrivals)
    bits = bytearray(max(arrivals) // 8 + 1 if arrivals else 0)
    for arrival in arrivals:
        bits[arrival // 8] |= 1 << arrival % 8
    return base64.b64encode(zlib.compress(bits, 9)).decode() if bits else ""


def _unpacked(text: str) -> set[int]:
    """The set that `_packed` made the text of."""
    bits = zlib.decompress(base64.b64decode(text)) if text else b""
    return {8 * i + k for i, byte in enumerate(bits) for k in range(8) if byte >> k & 1}


def follow(
    window: Window, chunks: Sequence[Chunk], *, removed: Collection[str] = (), others: Collection[str] = ()
) -> list[str]:
    """Places the chunks of a conversation that ``window`` has not seen; evicts placed ones that are not in it.

    Chunks are recognised by content; of equal ones the earlier arrival is the earlier one. A chunk that the window's policy
    has evicted stays evicted. What is placed of the conversation stands in the order of ``chunks`` afterwards.

    Args:
        removed: placements that an earlier call took out; they come back if they are in ``chunks`` again.
        others: placements that are not of the conversation.

    Returns the placements that are not in the conversation any more. Raises like `Window.append`; edits made before the
    error stay. Cost: encoding what is new.
    """
    state = window.snapshot()
    mine = [p for p in (*state.placed, *state.evicted) if p.id not in others]
    known: defaultdict[str, list[str]] = defaultdict(list)
    for p in sorted(mine, key=lambda p: (p.id in removed, p.arrival), reverse=True):
        known[p.chunk_id].append(p.id)
    names: list[str | None] = [known[chunk.id].pop() if known[chunk.id] else None for chunk in chunks]
    gone = [placement for rest in known.values() for placement in rest]
    for placement in gone:
        if placement in window.ids:
            window.evict(placement)
    tail = max((i + 1 for i, name in enumerate(names) if name is not None), default=0)  # all behind it is new
    held, back = set(window.ids), set(window.evicted)
    for i, (chunk, name) in enumerate(zip(chunks[:tail], names[:tail], strict=True)):
        if name is None or (name in removed and name not in held):
            behind = set(names[i + 1 :])
            at = next((k for k, placement in enumerate(window.ids) if placement in behind), len(window.ids))
            if name is None or name not in back:  # the window remembers so many evictions and no more
                names[i] = window.insert(at, chunk)
            else:
                window.recall(name, at)
    names[tail:] = window.extend(chunks[tail:])
    rank = {name: i for i, name in enumerate(names)}
    order = iter(sorted((i for i in window.ids if i in rank), key=rank.__getitem__))
    window.reorder([next(order) if placement in rank else placement for placement in window.ids])
    return gone


@dataclass(frozen=True)
class Without:
    """``retrieval``, but never what is no longer part of the conversation."""

    retrieval: Retrieval
    removed: frozenset[str]

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """What ``retrieval`` picks, less what was removed."""
        return [placement for placement in self.retrieval.choose(window, query) if placement not in self.removed]


@dataclass(frozen=True)
class Sparing:
    """``eviction``, but never what the question is about."""

    eviction: Eviction
    spared: frozenset[str]

    def order(self, window: WindowView) -> Iterator[str]:
        """The order of ``eviction``, less what is spared."""
        order = self.eviction.order(window)
        try:
            yield from (placement for placement in order if placement not in self.spared)
        finally:
            if isinstance(order, Generator):
                order.close()  # now, not when it is collected: it may hold a fork
