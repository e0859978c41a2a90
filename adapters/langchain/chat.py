"""`ChatCtxwin`: a LangChain chat model whose context is a window, so that every change of the messages is a cache edit."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from ctxwin.adapters.langchain.messages import Conversation, converse
from ctxwin.adapters.langchain.pool import Pool, profile_of, remembers
from ctxwin.adapters.langchain.toolcalls import Part, Reader, learn
from ctxwin.engines.base import Engine, Sampling
from ctxwin.engines.open import open_engine
from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken, Question, never
from ctxwin.window.events import Observer
from ctxwin.window.stream import TokenStream, aask, in_thread

_log = logging.getLogger("ctxwin")

_OPTIONS = ("tools", "tool_choice", "max_tokens", "temperature", "seed", "model")
_COMPUTED = ("computed", "formed")  # lanes whose tokens went through a forward
_MEANT_FOR_OTHERS = ("stream", "ls_structured_output_format", "strict", "parallel_tool_calls")


class ChatCtxwin(BaseChatModel):
    """A chat model over windows of one engine.

    Each call forks the recent window that is most similar to its messages and syncs it with them (`ctxwin.window.sync`):
    messages that were appended, dropped, brought back or reordered become cache edits, and what stayed is not computed
    again. Calls may run concurrently. Messages are recognised by content; message and block ids do not count.

    Attributes:
        engine: an open engine; it stays the caller's.
        model: a name for `ctxwin.open_engine` instead: opened at first use (or by `open`), closed by `close`. Beside an
            engine it is just the name that messages carry.
        budget: most tokens of prompt and answer; default: what the engine takes.
        fidelity: which approximations are allowed; default: the model's profile decides.
        max_tokens: most tokens of an answer; None: as many as the budget leaves.
        stop: texts that end an answer and are not part of it.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused,
            because messages may come from anybody. Nothing is ever downloaded.
        max_windows: how many windows are kept for later calls.
        observers: called after every edit and answer of the windows, see `Window.observe`.
        profile: what the model can do; read off the engine once it is open.

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

    _pool: Pool | None = PrivateAttr(default=None)
    _opening: threading.RLock = PrivateAttr(default_factory=threading.RLock)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.engine is None and not self.model:
            raise ValueError("ChatCtxwin needs an engine or the model to open, got neither; pass engine= or model=")
        if self.engine is not None:
            self.model = self.model or f"{self.engine.spec.name}:{self.engine.spec.model}"
        return self

    def open(self) -> Engine:
        """The engine, which is opened if it is not open yet."""
        return self._opened().engine

    def _opened(self) -> Pool:
        with self._opening:
            if self._pool is None:
                engine = self.engine or open_engine(self.model)
                self._pool = Pool(engine, self.budget, self.fidelity, self.max_windows, self.observers)
                if self.profile is None:
                    self.profile = profile_of(engine, self.budget)
            return self._pool

    def close(self) -> None:
        """Closes the windows, and the engine where it was opened here. A later call opens it again."""
        with self._opening:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            if self.engine is None:
                pool.engine.close()

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
        names = ("model", "budget", "max_tokens", "temperature", "seed", "stop")
        fidelity = self.fidelity and self.fidelity.model_dump_json()
        return {name: getattr(self, name) for name in names} | {"fidelity": fidelity}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with ``tools``, which its own chat template shows it.

        Args:
            tool_choice: a tool's name shows only that one, ``none`` shows none. A call cannot be forced: ``any`` is logged
                and otherwise treated as ``auto``.

        Raises UnsupportedModel where the template takes no tools, or writes calls in a form that cannot be read: now if
        the engine is open, else with the first answer. An agent binds in its event loop, where opening would block.
        """
        pool = self._opened() if self.engine is not None else self._pool
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
        if schemas and pool is not None:
            learn(pool.engine)
            converse(pool.engine, [], schemas, ask=False)  # refuses a template that takes no tools
        return self.bind(tools=schemas, **kwargs)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, pictures and ``tools`` included.

        Cost: new pictures go through the vision tower, once.
        """
        pool, schemas = self._opened(), [convert_to_openai_tool(tool) for tool in tools or ()]
        return pool.over(self._talk(messages, schemas, ask=False), pool.tokens)

    def _talk(self, messages: list[BaseMessage], tools: Sequence[Any], **options: Any) -> Callable[..., Conversation]:
        files = self.allowed_local_media_path
        return partial(converse, messages=messages, tools=tools, allowed_local_media_path=files, **options)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        reply(stopped=never)
        return reply.result()

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        await aask(None, reply)
        return reply.result()

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        reply = self._reply(messages, stop, kwargs)
        with closing(TokenStream(reply)) as texts:
            for text in chain(texts, [None]):
                for chunk in reply.heard(text):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = self._reply(messages, stop, kwargs)
        texts, text = TokenStream(reply), cast("str | None", "")
        try:
            while text is not None:
                text = await in_thread(next, texts, None)
                for chunk in reply.heard(text):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            await in_thread(texts.close)

    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> _Reply:
        """The call that these arguments ask for, checked and with defaults filled in."""
        if unknown := sorted(kwargs.keys() - {*_OPTIONS, *_MEANT_FOR_OTHERS}):
            raise ValueError(f"options of a call must be among {list(_OPTIONS)}, got {unknown}")
        if (other := kwargs.get("model")) not in (None, self.model):
            raise ValueError(
                f"model must be {self.model!r}, the one that is open, got {other!r}; make a ChatCtxwin for it"
            )
        max_tokens = kwargs.get("max_tokens", self.max_tokens)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens must be an int >= 1 or None, got {max_tokens!r}")
        tools = kwargs.get("tools") or ()
        return _Reply(
            pool=self._opened,
            model=self.model,
            talk=self._talk(messages, tools, bare=True),
            tools=bool(tools),
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=kwargs.get("temperature", self.temperature), seed=kwargs.get("seed", self.seed)
            ),
            stop=tuple(filter(None, self.stop or () if stop is None else stop)),
        )


@dataclass
class _Reply:
    """Asks a window when it is called, as `ctxwin.window.stream` does; then `heard` or `result` give the answer.

    Attributes:
        pool: opens what is not open yet; called in the thread that asks.
        talk: `converse`, which still lacks the engine.
        max_tokens: most tokens of the answer; None: as many as the budget leaves.
    """

    pool: Callable[[], Pool]
    model: str
    talk: Callable[..., Conversation]
    tools: bool
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    _reader: Reader = field(default_factory=lambda: Reader(None))
    _answer: Answer | None = None
    _text: str = ""
    _room: int = 0
    _calls: int = 0
    _invalid: list[InvalidToolCall] = field(default_factory=list)

    def __call__(self, *, on_token: OnToken | None = None, stopped: Callable[[], bool]) -> Answer:
        """Asks. Raises ContextOverflowError, and what `converse` and `Window.answer` raise."""
        pool = self.pool()
        self._reader = Reader(learn(pool.engine) if self.tools else None)
        try:
            self._answer = pool.over(self.talk, lambda talk: self._ask(pool, talk, on_token, stopped))
        except BudgetExceeded as error:
            raise ContextOverflowError(str(error)) from error
        return self._answer

    def _ask(self, pool: Pool, talk: Conversation, on_token: OnToken | None, stopped: Callable[[], bool]) -> Answer:
        with pool.window(talk.system_prompt, talk.chunks) as window:
            engine = window.engine
            # The KV of the exchange is kept for the next call, which has it as messages: where the template renders it the
            # same way then, and where it is certain to fit.
            keep = remembers(engine)
            asked = engine.encode_exchange(talk.query, ()) if keep else engine.encode_query(talk.query)
            self._room = max(1, self.max_tokens or window.budget - window.tokens - asked.tokens)
            alone = engine.encode_system_prompt(window.system_prompt).tokens + asked.tokens + self._room
            sampling = replace(self.sampling, max_tokens=self._room)
            remember = keep and alone <= window.budget and partial(remembers, engine)
            question = Question(talk.query, sampling, remember, self.stop, bare=True)
            return window.answer(question, on_token=on_token, stopped=stopped)

    def heard(self, text: str | None) -> Iterator[ChatGenerationChunk]:
        """The chunks that ``text``, by which the answer has grown, completes; None: the rest of them, and the cost."""
        if text is not None:
            self._text += text
            parts = self._reader.read(self._text)
        else:
            assert self._answer is not None
            parts = self._reader.read(self._answer.text, last=True)
        for part in parts:
            yield ChatGenerationChunk(message=self._chunk(part))
        if text is None:
            yield ChatGenerationChunk(message=self._last_chunk())

    def result(self) -> ChatResult:
        """The whole answer."""
        result = generate_from_stream(self.heard(None))
        # Merged chunks do not say why a call is invalid.
        cast("AIMessage", result.generations[0].message).invalid_tool_calls = self._invalid
        return result

    def _chunk(self, part: Part) -> AIMessageChunk:
        if isinstance(part, str):
            return AIMessageChunk(content=part)
        if isinstance(part["args"], dict):
            args: str | None = json.dumps(part["args"], ensure_ascii=False)
        else:  # not JSON, so the call stays invalid
            args = part["args"]
            self._invalid.append(part)
        self._calls += 1
        chunk = tool_call_chunk(name=part["name"], args=args, id=part["id"], index=self._calls - 1)
        return AIMessageChunk(content="", tool_call_chunks=[chunk])

    def _last_chunk(self) -> AIMessageChunk:
        assert self._answer is not None
        ended = "tool_calls" if self._calls else "stop"
        facts = {
            "model_name": self.model,
            "model_provider": "ctxwin",
            "finish_reason": ended if len(self._answer.token_ids) < self._room else "length",
            "ctxwin": asdict(self._answer.usage),
        }
        usage = usage_metadata(self._answer)
        return AIMessageChunk(content="", usage_metadata=usage, response_metadata=facts, chunk_position="last")


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Tokens in and out; details are those of the prompt that no forward ran for (``cache_read``), and tokens by lane."""
    usage = answer.usage
    read = sum(tokens for lane, tokens in usage.reused_tokens.items() if lane not in _COMPUTED)
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.answer_tokens,
        total_tokens=usage.prompt_tokens + usage.answer_tokens,
        input_token_details=cast("InputTokenDetails", {"cache_read": read, **usage.reused_tokens}),
    )
