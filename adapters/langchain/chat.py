"""`ChatCtxwin`: a LangChain chat model whose context is a window, so that every change of the messages is a cache edit."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from ctxwin.adapters.langchain.messages import converse
from ctxwin.adapters.langchain.pool import Pool, profile_of
from ctxwin.adapters.langchain.reply import Reply
from ctxwin.engines.base import Engine, Sampling
from ctxwin.engines.open import open_engine
from ctxwin.fidelity import Fidelity
from ctxwin.window.ask import never
from ctxwin.window.events import Observer
from ctxwin.window.stream import TokenStream, aask, in_thread

_log = logging.getLogger("ctxwin")

_OPTIONS = ("tools", "tool_choice", "max_tokens", "temperature", "seed", "model")
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
        if self.engine is not None and not self.model:
            self.model = f"{self.engine.spec.name}:{self.engine.spec.model}"
        return self

    def open(self) -> Engine:
        """The engine; opens it where that has not happened yet."""
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
            _ = pool.syntax
            converse(pool.engine, [], schemas, ask=False)  # refuses a template that takes no tools
        return self.bind(tools=schemas, **kwargs)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, pictures and ``tools`` included.

        Cost: new pictures go through the vision tower, once.
        """
        pool, schemas = self._opened(), [convert_to_openai_tool(tool) for tool in tools or ()]
        return pool.over(messages, schemas, self.allowed_local_media_path, pool.tokens, ask=False)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        reply(stopped=never)
        return reply.result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        await aask(None, reply)
        return reply.result()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        reply = self._reply(messages, stop, kwargs)
        with closing(TokenStream(reply)) as texts:
            for text in chain(texts, [None]):
                for chunk in reply.heard(text):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
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

    def _reply(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Reply:
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
        return Reply(
            pool=self._opened,
            model=self.model,
            messages=messages,
            tools=kwargs.get("tools") or (),
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=kwargs.get("temperature", self.temperature), seed=kwargs.get("seed", self.seed)
            ),
            stop=tuple(filter(None, self.stop or () if stop is None else stop)),
            files=self.allowed_local_media_path,
        )
