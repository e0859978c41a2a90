"""`ChatCtxwin`: a LangChain chat model whose context is a window, so that every change of the messages is a cache edit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from ctxwin.adapters.langchain.blocks import Seen
from ctxwin.adapters.langchain.messages import Conversation, converse, encoded
from ctxwin.adapters.langchain.pool import Pool
from ctxwin.adapters.langchain.streaming import Chunks, Worker
from ctxwin.adapters.langchain.toolcalls import Part, Reader, Syntax, learn
from ctxwin.adapters.langchain.usage import profile_of, remembers, response_metadata, usage_metadata
from ctxwin.engines.base import Engine, Sampling
from ctxwin.engines.open import open_engine
from ctxwin.errors import BudgetExceeded, ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.window.answer import Answer
from ctxwin.window.ask import Question
from ctxwin.window.events import Observer

_log = logging.getLogger("ctxwin")

_OPTIONS = ("tools", "tool_choice", "max_tokens", "temperature", "seed", "model")
_MEANT_FOR_OTHERS = ("stream", "ls_structured_output_format", "strict", "parallel_tool_calls")
Heard = Callable[[Part], None]


@dataclass(frozen=True)
class _Call:
    """One call's options, defaults filled in."""

    tools: Sequence[dict[str, Any]]
    max_tokens: int | None
    temperature: float
    seed: int | None
    stops: Sequence[str]


class ChatCtxwin(BaseChatModel):
    """A chat model over windows of one engine.

    Each call brings a fork of the most similar recent window to the messages it gets (`ctxwin.window.sync`): messages that were
    appended, dropped, brought back or reordered since become cache edits, and what stayed is not computed again. Calls
    may run concurrently. Identity is content; message and block ids do not count.

    Attributes:
        engine: an open engine; it stays the caller's.
        model: a name for `ctxwin.open_engine` instead: opened at first use (or by `open`), closed by `close`. Beside an
            engine it is just the name that messages carry.
        budget: most tokens of prompt and answer; default: what the engine takes.
        fidelity: which approximations are allowed; default: the model's profile decides.
        max_tokens: most tokens of an answer; None: as many as the budget leaves.
        stop: sequences that end an answer and are no part of it.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused,
            as messages may come from anybody. Nothing is ever downloaded.
        max_windows: windows kept for later calls.
        observers: told of every edit and answer of the windows, see `Window.observe`.
        profile: filled in from the engine as soon as it is open.

    Raises ContextOverflowError where messages and answer do not fit the budget; nothing is cut off silently.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    model: str = ""
    budget: int | None = None
    fidelity: Fidelity | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = None
    stop: list[str] | None = None
    streaming: bool = False
    allowed_local_media_path: Path | None = None
    max_windows: int = Field(default=8, ge=1)
    observers: tuple[Observer, ...] = Field(default=(), exclude=True, repr=False)

    _engine: Engine | None = PrivateAttr(default=None)
    _pool: Pool | None = PrivateAttr(default=None)
    _syntax: Syntax | None = PrivateAttr(default=None)
    _seen: Seen = PrivateAttr(default_factory=Seen)
    _remember: bool = PrivateAttr(default=True)
    _opening: threading.RLock = PrivateAttr(default_factory=threading.RLock)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.engine is None and not self.model:
            raise ValueError("ChatCtxwin needs an engine or the model to open, got neither; pass engine= or model=")
        if self.engine is not None and not self.model:
            self.model = f"{self.engine.spec.name}:{self.engine.spec.model}"
        return self

    def open(self) -> Engine:
        """The engine, opened where it was not yet."""
        with self._opening:
            if self._engine is None:
                self._engine = self.engine or open_engine(self.model)
                self._pool = Pool(self._engine, self.budget, self.fidelity, self.max_windows, self.observers)
                self._remember = remembers(self._engine)
                if self.profile is None:
                    self.profile = profile_of(self._engine, self.budget)
            return self._engine

    def close(self) -> None:
        """Closes the windows, and the engine where it was opened here. A later call opens it again."""
        with self._opening:
            engine, pool = self._engine, self._pool
            self._engine = self._pool = self._syntax = None
        if pool is not None:
            pool.close()
        if engine is not None and self.engine is None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _resolve_model_profile(self) -> ModelProfile | None:
        return None if self.engine is None else profile_of(self.engine, self.budget)

    @property
    def _llm_type(self) -> str:
        return "ctxwin"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        fidelity = None if self.fidelity is None else self.fidelity.model_dump_json()
        names = ("model", "budget", "max_tokens", "temperature", "seed", "stop")
        return {name: getattr(self, name) for name in names} | {"fidelity": fidelity}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with ``tools`` shown to it by its own chat template.

        Args:
            tool_choice: a tool's name shows only that one, ``none`` shows none. A call cannot be forced: ``any`` is logged
                and otherwise as ``auto``.

        Raises UnsupportedModel where the template takes no tools, or writes calls in a form that cannot be read: now where
        the engine is open, else by the first answer. An agent binds in its event loop, where opening would block.
        """
        engine = self.engine or self._engine
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in schemas]
        if isinstance(tool_choice, dict):
            tool_choice = cast("str", tool_choice["function"]["name"])
        if tool_choice == "none":
            schemas = []
        elif tool_choice in (True, "any", "required"):
            _log.info("tool_choice=%r: a call cannot be forced, the model is free not to call", tool_choice)
        elif tool_choice not in (None, False, "auto"):
            if tool_choice not in names:
                raise ValueError(f"tool_choice must be auto, none, any or one of {names}, got {tool_choice!r}")
            schemas = [schema for schema in schemas if schema["function"]["name"] == tool_choice]
        if schemas and engine is not None:
            self._learnt()
            converse(engine, [], schemas, ask=False)  # refuses a template that takes no tools
        return self.bind(tools=schemas, **kwargs)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt these messages make, pictures and ``tools`` included.

        Cost: pictures that are new go through the vision tower; a later call finds them.
        """
        engine = self.open()
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        talk = self._converse(engine, messages, schemas, ask=False)
        try:
            encoded(engine, talk)
        except ChunkUnavailable:
            talk = self._decoded_again(engine, messages, schemas, ask=False)
        closing = engine.encode_query("x").tokens - len(engine.text_ids("x"))
        return (
            engine.encode_system_prompt(talk.system_prompt).tokens
            + sum(engine.encode(c).tokens for c in talk.chunks)
            + closing
        )

    def _learnt(self) -> Syntax:
        with self._opening:
            if self._syntax is None:
                self._syntax = learn(self.open())
            return self._syntax

    def _decoded_again(
        self, engine: Engine, messages: list[BaseMessage], tools: Sequence[dict[str, Any]], *, ask: bool
    ) -> Conversation:
        """For pictures that were seen before and have left the store since: the messages still have them."""
        self._seen.clear()
        return encoded(engine, self._converse(engine, messages, tools, ask=ask))

    def _converse(
        self, engine: Engine, messages: list[BaseMessage], tools: Sequence[dict[str, Any]], *, ask: bool
    ) -> Conversation:
        return converse(
            engine, messages, tools, ask=ask, bare=True, seen=self._seen,
            allowed_local_media_path=self.allowed_local_media_path,
        )  # fmt: skip

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(messages, self._options(stop, kwargs), lambda: False)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stopped = threading.Event()
        call = self._options(stop, kwargs)
        task = asyncio.ensure_future(asyncio.to_thread(self._result, messages, call, stopped.is_set))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([task])  # the engine is given the time to stop
            if not task.cancelled():
                task.exception()  # it was cancelled: what it raised is of no interest
            raise

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        worker, chunks = self._worker(messages, stop, kwargs), Chunks()
        try:
            while (parts := worker.get()) is not None:
                for chunk in map(chunks.of, parts):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            assert worker.result is not None
            yield ChatGenerationChunk(message=worker.result)
        finally:
            worker.close()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        worker, chunks = self._worker(messages, stop, kwargs), Chunks()
        try:
            while (parts := await asyncio.to_thread(worker.get)) is not None:
                for chunk in map(chunks.of, parts):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            assert worker.result is not None
            yield ChatGenerationChunk(message=worker.result)
        finally:
            worker.stop()  # at once: what follows may be cancelled, too
            await asyncio.to_thread(worker.close)

    def _worker(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> Worker[Part, AIMessageChunk]:
        call = self._options(stop, kwargs)
        return Worker(lambda tell, stopped: self._last_chunk(*self._answer(messages, call, tell, stopped)))

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> _Call:
        unknown = sorted(set(kwargs) - {*_OPTIONS, *_MEANT_FOR_OTHERS})
        if unknown:
            raise ValueError(f"options of a call must be among {list(_OPTIONS)}, got {unknown}")
        other = kwargs.get("model")
        if other is not None and other != self.model:
            raise ValueError(
                f"model must be {self.model!r}, the one that is open, got {other!r}; make a ChatCtxwin for it"
            )
        max_tokens = kwargs.get("max_tokens", self.max_tokens)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens must be an int >= 1 or None, got {max_tokens!r}")
        return _Call(
            tools=kwargs.get("tools") or (),
            max_tokens=max_tokens,
            temperature=kwargs.get("temperature", self.temperature),
            seed=kwargs.get("seed", self.seed),
            stops=(self.stop if stop is None else stop) or (),
        )

    def _result(self, messages: list[BaseMessage], call: _Call, stopped: Callable[[], bool]) -> ChatResult:
        parts: list[Part] = []
        answer, reader, room = self._answer(messages, call, parts.append, stopped)
        chunks = [p for p in parts if not isinstance(p, str)]
        message = AIMessage(
            content="".join(p for p in parts if isinstance(p, str)),
            tool_calls=[p for p in chunks if p.get("type") == "tool_call"],
            invalid_tool_calls=[p for p in chunks if p.get("type") == "invalid_tool_call"],
            usage_metadata=usage_metadata(answer),
            response_metadata=response_metadata(answer, reader, room, self.model),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _answer(
        self, messages: list[BaseMessage], call: _Call, heard: Heard, stopped: Callable[[], bool]
    ) -> tuple[Answer, Reader, int]:
        """Answers; ``heard`` gets the parts as they come. Also the reader, and how many tokens the answer could have."""
        with self._opening:  # what is closed meanwhile must not be opened again
            engine, pool = self.open(), self._pool
            reader = Reader(self._learnt() if call.tools else None, call.stops)
        assert pool is not None
        talk = self._converse(engine, messages, call.tools, ask=True)

        def on_token(_: int, text: str) -> bool:
            for part in reader.read(text):
                heard(part)
            return not reader.stopped

        try:
            answer, room = self._ask(pool, talk, call, reader, on_token, stopped)
        except ChunkUnavailable:
            talk = self._decoded_again(engine, messages, call.tools, ask=True)
            answer, room = self._ask(pool, talk, call, reader, on_token, stopped)
        if not reader.stopped:
            for part in reader.read(answer.text, last=True):
                heard(part)
        return answer, reader, room

    def _ask(
        self,
        pool: Pool,
        talk: Conversation,
        call: _Call,
        reader: Reader,
        on_token: Callable[[int, str], bool],
        stopped: Callable[[], bool],
    ) -> tuple[Answer, int]:
        """The answer, and how many tokens it could have."""
        try:
            with pool.window(talk.system_prompt, talk.chunks) as window:
                engine = window.engine
                # The KV of the exchange is kept for the next call, which has it as messages, where it will read the same
                # then and is certain to fit.
                asked = engine.encode_exchange(talk.query, ()) if self._remember else engine.encode_query(talk.query)
                room = max(1, call.max_tokens or window.budget - window.tokens - asked.tokens)
                alone = engine.encode_system_prompt(window.system_prompt).tokens + asked.tokens + room
                question = Question(
                    talk.query,
                    Sampling(room, call.temperature, call.seed),
                    remember=(lambda text: not reader.stopped and remembers(engine, text))
                    if self._remember and alone <= window.budget
                    else False,
                    bare=True,
                )
                answer = window.answer(question, on_token=on_token, stopped=stopped)
        except BudgetExceeded as error:
            raise ContextOverflowError(str(error)) from error
        return answer, room

    def _last_chunk(self, answer: Answer, reader: Reader, room: int) -> AIMessageChunk:
        return AIMessageChunk(
            content="",
            usage_metadata=usage_metadata(answer),
            response_metadata=response_metadata(answer, reader, room, self.model),
            chunk_position="last",
        )
