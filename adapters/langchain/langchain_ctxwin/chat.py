"""`ChatCtxwin`: a LangChain chat model whose context is a window; every change of the messages is a cache edit."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Self, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.opening import open_engine
from ctxwin.validation import validate
from ctxwin.window.answer import Answer, ToolCall
from ctxwin.window.ask import OnToken, Question, not_stopped
from ctxwin.window.events import Observer
from ctxwin.window.stream import AsyncTokenStream, TokenStream, aask
from ctxwin.window.toolcalls import Part, Reader, Syntax, learn
from langchain_ctxwin.decoding import ChatDecoding, scores_to
from langchain_ctxwin.messages import Conversation, converse, in_order
from langchain_ctxwin.pool import Opened, Pool, counted, profile_of, remembers

_log = logging.getLogger("ctxwin")

_COMPUTED = ("computed", "formed")  # lanes whose tokens went through a forward
_IGNORED_OPTIONS = ("stream", "ls_structured_output_format", "strict", "parallel_tool_calls")


class Answering(BaseChatModel):
    """Generates and streams answers from a `Reply`, which subclasses build for each call."""

    @abstractmethod
    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Reply:
        """Return the call for these arguments, validated and with defaults filled in."""

    @property
    def _llm_type(self) -> str:
        return "ctxwin"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        reply(stopped=not_stopped)
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
        with closing(TokenStream(reply.single())) as texts:
            for text in chain(texts, [None]):
                for chunk in reply.chunks_for(text):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = self._reply(messages, stop, kwargs)
        async with aclosing(AsyncTokenStream(reply.single())) as texts:
            text: str | None = ""
            while text is not None:
                text = await anext(texts, None)
                for chunk in reply.chunks_for(text):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk


_WITHOUT_EFFECT = frozenset({"api_key", "timeout", "max_retries"})
"""LangChain's standard arguments of chat models that send requests; here nothing is sent."""


class ChatCtxwin(Answering):
    """A chat model over windows of one engine.

    Each call forks the recent window that is most similar to its messages and syncs it with them (`ctxwin.window.sync`):
    messages that were appended, dropped, restored or reordered become cache edits, and the others are not computed
    again. Calls may run concurrently. Messages are identified by content; message and block ids do not count.

    Attributes:
        engine: an open engine; the caller closes it.
        model: a name for `ctxwin.open_engine` instead: opened at first use (or by `open`), closed by `close`. With an
            engine it is only the name that messages carry.
        budget: maximum tokens of prompt and answer; default: the engine's limit.
        fidelity: approximations that are allowed; default: the model's profile decides.
        max_tokens: maximum tokens of an answer; None: as many as the budget leaves.
        temperature, top_p, seed, stop: sampling of answers. A call or ``bind`` takes all of `ChatDecoding`, whose names
            are OpenAI's: ``n``, ``logprobs``, ``top_logprobs``, ``response_format``, ``top_k``, penalties. An engine refuses
            options it lacks (transformers: JSON schemas and repetition_penalty).
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused,
            because messages may come from anybody. Nothing is ever downloaded.
        max_windows: number of windows kept for later calls.
        observers: called after every edit and answer of the windows, see `Window.observe`.
        profile: the model's capabilities; read from the engine once it is open.
        opened: what is open, which copies share, those of ``configurable_fields`` among them.

    Raises ContextOverflowError if messages and answer exceed the budget; nothing is truncated silently. Arguments that are no
    attributes are refused, but for LangChain's own of models that send requests (``api_key``, ``timeout``, ``max_retries``).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    model: str = ""
    budget: int | None = None
    fidelity: Fidelity | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: list[str] | None = None
    streaming: bool = False
    allowed_local_media_path: Path | None = None
    max_windows: int = Field(default=8, ge=1)
    observers: tuple[Observer, ...] = Field(default=(), exclude=True, repr=False)
    opened: Opened = Field(default_factory=Opened, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        unknown = data.keys() - cls.model_fields.keys() - _WITHOUT_EFFECT if isinstance(data, dict) else ()
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"ChatCtxwin must be given its own attributes, got {names}; `bind` takes a call's options")
        return data

    @model_validator(mode="after")
    def _set_model_name(self) -> Self:
        if self.engine is None and not self.model:
            raise ValueError("ChatCtxwin needs an engine or the model to open, got neither; pass engine= or model=")
        if self.engine is not None:
            self.model = self.model or f"{self.engine.spec.name}:{self.engine.spec.model}"
        return self

    def open(self) -> Engine:
        """Return the engine; open it first if needed."""
        return self._open_pool().engine

    def _open_pool(self) -> Pool:
        with self.opened.lock:
            pool = self.opened.pools.get(self._pool_key)
            if pool is None:
                engine = self.engine or self.opened.engines.get(self.model) or open_engine(self.model)
                self.opened.engines |= {} if self.engine else {self.model: engine}
                pool = Pool(engine, self.budget, self.fidelity, self.max_windows, self.observers)
            if self.profile is None:
                self.profile = profile_of(pool.engine, self.budget)
            return self.opened.keep(self._pool_key, pool)

    @property
    def _pool_key(self) -> tuple[Any, ...]:
        return self.model, id(self.engine), self.budget, self.fidelity, self.max_windows, *map(id, self.observers)

    def close(self) -> None:
        """Close the windows, and the engine if this model or a copy opened it. A later call opens it again."""
        self.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _resolve_model_profile(self) -> ModelProfile | None:
        return None if self.engine is None else profile_of(self.engine, self.budget)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", "budget", "max_tokens", "temperature", "top_p", "seed", "stop")
        return {n: getattr(self, n) for n in names} | {"fidelity": self.fidelity and self.fidelity.model_dump_json()}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with ``tools``, rendered by its own chat template.

        Args:
            tool_choice: a tool's name shows only that one, ``none`` shows none; dicts as OpenAI and Anthropic have them. A call
                cannot be forced: ``any`` is logged and otherwise treated as ``auto``.

        Raises UnsupportedModel if the template takes no tools, or writes calls in a form that cannot be parsed: now if
        the engine is open, else with the first answer. An agent binds in its event loop, where opening would block.
        """
        pool = self._open_pool() if self.engine is not None else self.opened.pools.get(self._pool_key)
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in schemas]
        if isinstance(tool_choice, dict):
            named = tool_choice.get("function", tool_choice)
            name = named.get("name", tool_choice.get("type")) if isinstance(named, dict) else named
            tool_choice = name if isinstance(name, str) else repr(tool_choice)
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

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers that follow a schema.

        Args:
            schema: for the JSON methods a JSON schema, a pydantic model, or a TypedDict or dataclass, whose answers are dicts.
            method: ``function_calling`` offers the schema as a tool. ``json_schema`` and ``json_mode`` (any object)
                constrain decoding to it, which some engines refuse (transformers).

        A truncated answer raises ValueError, or sets ``parsing_error`` with ``include_raw``.
        """
        if method == "function_calling":
            return cast("Runnable[Any, Any]", super().with_structured_output(schema, include_raw=include_raw, **kwargs))
        kwargs.pop("strict", None)  # decoding is constrained to the schema in any case
        if method not in ("json_schema", "json_mode") or kwargs:
            raise ValueError(f"method must be function_calling, json_schema or json_mode, got {method!r} and {kwargs}")
        model = schema if isinstance(schema, type) and issubclass(schema, BaseModel) else None
        response_format: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            if not isinstance(schema, type | dict):
                raise ValueError(f"schema must be a dict, pydantic model, TypedDict or dataclass, got {schema!r}")
            described = model.model_json_schema() if model else schema
            described = described if isinstance(described, dict) else convert_to_json_schema(described)
            named = {"name": described.get("title", "answer"), "schema": described}
            response_format = {"type": "json_schema", "json_schema": named}

        def parse(message: AIMessage) -> Any:  # strict: LangChain's own parsers accept a truncated answer as complete
            return model.model_validate_json(message.text) if model else json.loads(message.text)

        bound = self.bind(response_format=response_format)
        if not include_raw:
            return bound | parse
        read = itemgetter("raw") | RunnableLambda(parse)
        parsed = RunnablePassthrough.assign(parsed=read, parsing_error=lambda _: None)
        broken = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=bound) | parsed.with_fallbacks([broken], exception_key="parsing_error")

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of prompt tokens of these messages, in whatever order, with their pictures and ``tools``.

        A text, picture or turn that alone is longer than the engine counts as the least that it can have.
        Cost: new pictures go through the vision tower, once.
        """
        pool, schemas = self._open_pool(), [convert_to_openai_tool(tool) for tool in tools or ()]
        try:
            return pool.run(self._talk(messages, schemas, ask=False), pool.tokens)
        except ValueError:
            return pool.run(self._talk(in_order(messages), schemas, ask=False), pool.tokens)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of ``text`` by the model's tokenizer."""
        return list(self._open_pool().engine.text_ids(text))

    def get_num_tokens(self, text: str) -> int:
        """Return the number of tokens of ``text``; of one that is longer than the engine, the least that it can have."""
        return counted(lambda text: len(self.get_token_ids(text)), text)

    def _talk(self, messages: list[BaseMessage], tools: Sequence[Any], **options: Any) -> Callable[..., Conversation]:
        files = self.allowed_local_media_path
        return partial(converse, messages=messages, tools=tools, allowed_local_media_path=files, **options)

    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Reply:
        names = ("tools", "tool_choice", "model", *ChatDecoding.model_fields)
        if unknown := sorted(kwargs.keys() - {*names, *_IGNORED_OPTIONS}):
            raise ValueError(f"options of a call must be among {list(names)}, got {unknown}")
        if (other := kwargs.get("model")) not in (None, self.model):
            raise ValueError(f"model must be {self.model!r}, the open one, got {other!r}; create another ChatCtxwin")
        mine = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")}
        options = mine | ({} if stop is None else {"stop": stop})
        # None is this model's own value, but for max_tokens, where it is no limit.
        fields = ChatDecoding.model_fields.keys()
        options |= {n: v for n, v in kwargs.items() if n in fields and (v is not None or n == "max_tokens")}
        decoding = validate(ChatDecoding.model_validate, options)
        talk, tools = self._talk(messages, kwargs.get("tools") or (), bare=True), bool(kwargs.get("tools"))
        ask = partial(self._ask, talk, tools, decoding)
        return Reply(ask, self.model, scored=bool(decoding.logprobs), n=decoding.n or 1)

    def _ask(
        self,
        talk: Callable[..., Conversation],
        tools: bool,
        decoding: ChatDecoding,
        reply: Reply,
        on_token: OnToken | None,
        stopped: Callable[[], bool],
    ) -> list[Answer]:
        pool, sampling = self._open_pool(), decoding.sampling({})
        reply.syntax, reply.decode = learn(pool.engine) if tools else None, pool.engine.decode

        def ask(talk: Conversation) -> list[Answer]:
            with pool.window(talk.system_prompt, talk.chunks) as window:
                engine = window.engine
                # The next call has the exchange as messages: its KV is kept if they render alike and it is certain to fit.
                keep = remembers(engine)
                encoded = engine.encode_exchange(talk.query, ()) if keep else engine.encode_query(talk.query)
                limit = decoding.max_completion_tokens or decoding.max_tokens
                reply.room = max(1, limit or window.budget - window.tokens - encoded.tokens)
                alone = engine.encode_system_prompt(window.system_prompt).tokens + encoded.tokens + reply.room
                remember = keep and alone <= window.budget and partial(remembers, engine)
                bounded = replace(sampling, max_tokens=reply.room)
                question = Question(talk.query, bounded, remember, decoding.stops, bare=True, n=reply.n)
                answer = window.answer(question, on_token=on_token, stopped=stopped)
                return [answer, *answer.others]

        try:
            return pool.run(talk, ask)
        except BudgetExceeded as error:
            raise ContextOverflowError(str(error)) from error


@dataclass
class Reply:
    """Asks the question when it is called, as `ctxwin.window.stream` does; then `chunks_for` or `result` give the answer.

    Attributes:
        ask: returns the answers, one per choice, and sets ``room`` and ``syntax`` before their tokens come; called in the
            thread that asks. May raise ContextOverflowError and the errors of `converse` and `Window.answer`.
        model: the name that messages carry.
        n: number of choices; a stream has one.
        scored: messages carry the log-probabilities of their tokens, which need ``decode``.
        costs: messages carry the answer's `Usage`.
        room: maximum tokens of an answer.
        syntax: of the tool calls to parse; None: none are parsed.
    """

    ask: Callable[[Reply, OnToken | None, Callable[[], bool]], list[Answer]]
    model: str
    n: int = 1
    scored: bool = False
    costs: bool = True
    room: int = 0
    syntax: Syntax | None = None
    decode: Callable[[Sequence[int]], str] = str
    _answers: list[Answer] = field(default_factory=list)
    _growing: _Message | None = None

    def __call__(self, *, on_token: OnToken | None = None, stopped: Callable[[], bool]) -> Answer:
        self._answers = self.ask(self, on_token, stopped)
        return self._answers[0]

    def single(self) -> Reply:
        """Return this reply for a stream. Raises ValueError for several choices."""
        if self.n != 1:
            raise ValueError(f"n must be 1 where an answer is streamed, got {self.n}; use generate")
        return self

    def chunks_for(self, text: str | None) -> Iterator[ChatGenerationChunk]:
        """Yield the chunks that ``text``, appended to the answer, completes; None: the remaining ones and the usage."""
        message = self._growing = self._growing or _Message(Reader(self.syntax))
        message.text += text or ""
        yield from self._finish(message, self._answers[0]) if text is None else message.read(message.text)

    def result(self) -> ChatResult:
        """Return the complete answers."""
        generations = []
        for answer in self._answers:
            message = _Message(Reader(self.syntax))
            generations += generate_from_stream(self._finish(message, answer)).generations
            # Merged chunks do not say why a call is invalid.
            cast("AIMessage", generations[-1].message).invalid_tool_calls = message.invalid
        return ChatResult(generations=generations)

    def _finish(self, message: _Message, answer: Answer) -> Iterator[ChatGenerationChunk]:
        yield from message.read(answer.text, last=True)
        reason = "tool_calls" if message.calls else "stop"
        facts: dict[str, Any] = {
            "model_name": self.model,
            "model_provider": "ctxwin",
            "finish_reason": reason if len(answer.token_ids) < self.room else "length",
        }
        if self.costs:
            facts["ctxwin"] = asdict(answer.usage)
        if self.scored:
            facts["logprobs"] = scores_to(answer.token_ids, self.decode)
        fields: Any = {"usage_metadata": usage_metadata(answer), "response_metadata": facts, "chunk_position": "last"}
        yield ChatGenerationChunk(message=AIMessageChunk(content="", **fields))


@dataclass
class _Message:
    reader: Reader
    calls: int = 0
    invalid: list[InvalidToolCall] = field(default_factory=list)
    text: str = ""

    def read(self, text: str, *, last: bool = False) -> Iterator[ChatGenerationChunk]:
        for part in self.reader.read(text, last=last):
            yield ChatGenerationChunk(message=self._chunk(part))

    def _chunk(self, part: Part) -> AIMessageChunk:
        if isinstance(part, str):
            return AIMessageChunk(content=part)
        if isinstance(part, ToolCall):
            args = json.dumps(part.arguments, ensure_ascii=False)
        else:  # not JSON, so the call stays invalid
            args = part.text
            self.invalid.append(invalid_tool_call(name=part.name, args=args, id=part.id, error=part.error))
        self.calls += 1
        chunk = tool_call_chunk(name=part.name, args=args, id=part.id, index=self.calls - 1)
        return AIMessageChunk(content="", tool_call_chunks=[chunk])


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Return input and output tokens; details: prompt tokens without a forward (``cache_read``), and tokens by lane."""
    usage = answer.usage
    read = sum(tokens for lane, tokens in usage.reused_tokens.items() if lane not in _COMPUTED)
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.answer_tokens,
        total_tokens=usage.prompt_tokens + usage.answer_tokens,
        input_token_details=cast("InputTokenDetails", {"cache_read": read, **usage.reused_tokens}),
    )
