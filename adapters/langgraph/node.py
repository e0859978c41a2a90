"""`WindowNode`: answers a graph's messages over a window."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph.message import add_messages
from langgraph.runtime import Runtime, get_runtime
from typing_extensions import TypedDict

from ctxwin.adapters.langchain.messages import Conversation, converse, message_key
from ctxwin.adapters.langchain.reply import usage_metadata
from ctxwin.adapters.langgraph.context import engine_of
from ctxwin.adapters.langgraph.follow import Sparing, Without, follow
from ctxwin.adapters.langgraph.marks import packed, unpacked
from ctxwin.adapters.langgraph.reference import merge_windows
from ctxwin.adapters.langgraph.session import Session, open_window
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.window.answer import Answer
from ctxwin.window.ask import AskOptions


class WindowState(TypedDict, total=False):
    """State of a graph with a `WindowNode`: the user's messages, and the reference of the window over them."""

    messages: Annotated[list[AnyMessage], add_messages]
    window: Annotated[dict[str, Any], merge_windows]


# What a reference's notes say of a conversation: how many messages were read, and their digest; the system prompt they asked for;
# placements so far; placements of removed messages, and of other nodes (`ctxwin.adapters.langgraph.marks`).
_NOTHING: dict[str, Any] = {
    "messages": 0, "digest": "", "system_prompt": digest(""), "arrivals": 0, "removed": "", "others": "",
}  # fmt: skip


@dataclass(frozen=True)
class _Reading:
    """Keys of all messages, what of them the window has to take in, and the notes of the node's last run.

    ``asked``: how many chunks at the end are of the turn that asks.
    """

    keys: list[str]
    talk: Conversation
    read: dict[str, Any]
    going_on: bool
    asked: int


_SAMPLING = [name for name in AskOptions.__annotations__ if name not in ("remember", "logprobs")]


class WindowNode(Runnable[Any, dict[str, Any]]):
    """A node that asks the last human text over a window of what stands before it.

    Messages are recognised by content, not by their ids: new ones become chunks, edited and removed ones are followed. What
    does not fit leaves the window by its policy, but nothing of the turn that asks; the messages stay as they are. The answer
    is returned as an `AIMessage`, and the exchange is remembered in the window from that very pass.

    Args:
        messages_key: of the conversation; its reducer must append (`add_messages`).
        window_key: of the window's reference; its reducer must be `merge_windows` (see `WindowState`).
        name: of the node.
        max_tokens: most tokens of an answer.
        system_prompt: system prompt, in front of system messages at the head of the conversation.
        budget, fidelity: of the window, as for `ctxwin.Window`.
        eviction: who leaves a full window first (`ctxwin.policies`); default: the oldest.
        retrieval: if given, what it picks for each question is brought back before answering.
        reserve_tokens: tokens left free beside the question and its answer.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused. A
            picture on disk survives a store that lost its content, one in a message does not.
        sampling: ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop``, ``json_schema`` as for `Window.ask`.

    The engine comes from the run's context (`WindowContext`). Cost of a turn: encoding the new messages, and an ask; where
    earlier messages changed, decoding all of them once.

    Raises at run time: what `ctxwin.adapters.langchain.messages.converse` raises for the messages, BudgetExceeded where the
    question, what its turn shows and what is looked back at do not fit.
    """

    def __init__(
        self, *, messages_key: str = "messages", window_key: str = "window", name: str = "window", max_tokens: int = 256,
        system_prompt: str | None = None, budget: int | None = None, fidelity: Fidelity | None = None,
        eviction: Eviction | None = None, retrieval: Retrieval | None = None, reserve_tokens: int = 0,
        allowed_local_media_path: str | Path | None = None, **sampling: Any,
    ) -> None:  # fmt: skip
        if unknown := sampling.keys() - set(_SAMPLING):
            raise TypeError(f"sampling must be of {', '.join(_SAMPLING)}, got {sorted(unknown)}")
        self.name = name
        self.messages_key, self.window_key = messages_key, window_key
        self._asking: dict[str, Any] = {"max_tokens": max_tokens, "remember": True, **sampling}
        self._system_prompt, self._budget, self._fidelity, self._reserve_tokens = (
            system_prompt,
            budget,
            fidelity,
            reserve_tokens,
        )
        self._eviction, self._retrieval = eviction, retrieval
        self._files = allowed_local_media_path

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        runtime = get_runtime()
        reading = self._read(input, runtime)
        with self._open(input, runtime, reading) as window:
            self._follow(window, reading)
            return self._answered(window, reading, window.ask(reading.talk.query, **self._asking))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """`invoke`; encoding and answering block no event loop, and cancelling stops the engine."""
        runtime = get_runtime()
        reading = await asyncio.to_thread(self._read, input, runtime)
        with await asyncio.to_thread(self._open, input, runtime, reading) as window:
            await asyncio.to_thread(self._follow, window, reading)
            answer = await window.aask(reading.talk.query, **self._asking)
            return await asyncio.to_thread(self._answered, window, reading, answer)

    def _read(self, state: Any, runtime: Runtime[Any]) -> _Reading:
        """The conversation, as far as the window has not read it."""
        engine = engine_of(runtime.context)
        reference = _value(state, self.window_key) or {}
        read = {**_NOTHING, **reference.get("notes", {}).get(self.messages_key, {})}
        messages = convert_to_messages(_value(state, self.messages_key) or [])
        keys = [message_key(m) for m in messages]
        count = read["messages"]
        new = messages[count:]
        if count and self._digest(keys[:count]) == read["digest"] and new and isinstance(new[0], HumanMessage):
            # What was read is as it was, and the answer at its end closed the turn.
            talk, going_on = converse(engine, new, allowed_local_media_path=self._files), True
        else:
            talk, going_on = converse(engine, messages, allowed_local_media_path=self._files), False
        turn = sum(1 for _ in takewhile(lambda m: isinstance(m, HumanMessage), reversed(messages)))
        last = keys[len(keys) - turn :]
        asked = sum(1 for _ in takewhile(lambda piece: piece[0] in last, reversed(talk.pieces)))
        return _Reading(keys, talk, read, going_on, asked)

    def _open(self, state: Any, runtime: Runtime[Any], reading: _Reading) -> Session:
        reference = _value(state, self.window_key)
        system_prompt = None if reference else self._system_prompt_of(reading)
        return open_window(
            reference, runtime, system_prompt=system_prompt, budget=self._budget, fidelity=self._fidelity,
            eviction=self._eviction, retrieval=self._retrieval,
        )  # fmt: skip

    def _follow(self, window: Session, reading: _Reading) -> None:
        """Brings the window up to date and makes room."""
        talk, read = reading.talk, reading.read
        state = window.snapshot()
        known = {p.id: p.arrival for p in (*state.placed, *state.evicted)}
        # What has arrived since this node ran is another node's.
        theirs, taken_out = unpacked(read["others"]), unpacked(read["removed"])
        others = {i for i, arrival in known.items() if arrival in theirs or arrival >= read["arrivals"]}
        removed = [i for i, arrival in known.items() if arrival in taken_out]
        if reading.going_on:
            window.extend(talk.chunks)
        else:
            system_prompt = digest(self._system_prompt_of(reading))
            if window.system_prompt != self._system_prompt_of(reading) and system_prompt != read["system_prompt"]:
                with window.fork(system_prompt=self._system_prompt_of(reading)) as behind:
                    window.adopt(behind)
            read["system_prompt"] = system_prompt
            gone = set(follow(window, talk.chunks, removed=removed, others=others))
            removed = [i for i in window.evicted if i in gone]
        mine = [i for i in window.ids if i not in others][::-1]
        last = zip(mine, reversed(talk.chunks), range(reading.asked), strict=False)
        window.eviction = Sparing(window.eviction, frozenset(i for i, c, _ in last if window.chunk(i).id == c.id))
        reserve_tokens = (
            self._reserve_tokens + window.engine.encode_query(talk.query).tokens + self._asking["max_tokens"]
        )
        if self._retrieval is not None:
            window.retrieval = Without(self._retrieval, frozenset(removed))
            window.look_back(talk.query, reserve_tokens=reserve_tokens)
        window.slide(reserve_tokens=reserve_tokens)
        read |= {"removed": packed(known[i] for i in removed), "others": packed(known[i] for i in others)}

    def _answered(self, window: Session, reading: _Reading, answer: Answer) -> dict[str, Any]:
        message = _message(answer, window, self._asking["max_tokens"])
        keys = [*reading.keys, message_key(message)]
        window.notes[self.messages_key] = {
            **reading.read, "messages": len(keys), "digest": self._digest(keys), "arrivals": window.snapshot().arrivals,
        }  # fmt: skip
        return {self.messages_key: [message], self.window_key: window.ref()}

    def _system_prompt_of(self, reading: _Reading) -> str:
        return "\n".join(filter(None, [self._system_prompt, reading.talk.system_prompt]))

    def _digest(self, keys: list[str]) -> str:
        return digest("read", self._system_prompt, keys)


def _value(state: Any, key: str) -> Any:
    """Of a state that is a dict, a dataclass or a pydantic model."""
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)


def _message(answer: Answer, window: Session, max_tokens: int) -> AIMessage:
    ended = len(answer.token_ids) < max_tokens
    told = {
        "model_name": window.engine.spec.model,
        "model_provider": "ctxwin",
        "finish_reason": "stop" if ended else "length",
    }
    return AIMessage(answer.text, usage_metadata=usage_metadata(answer), response_metadata=told)
