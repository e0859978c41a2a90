"""One call of `ChatCtxwin`, from LangChain's messages to an answer in LangChain's chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from ctxwin.adapters.langchain.messages import Conversation
from ctxwin.adapters.langchain.pool import Pool, remembers
from ctxwin.adapters.langchain.toolcalls import Part, Reader
from ctxwin.engines.base import Sampling
from ctxwin.errors import BudgetExceeded
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken, Question

_COMPUTED = ("computed", "formed")  # lanes whose tokens went through a forward


@dataclass
class Reply:
    """Asks a window when it is called, as `ctxwin.window.stream` does; then `heard` or `result` give the answer.

    Attributes:
        pool: opens what is not open yet; called in the thread that asks.
        max_tokens: most tokens of the answer; None: as many as the budget leaves.
        files: see `ctxwin.adapters.langchain.blocks.parts`.
    """

    pool: Callable[[], Pool]
    model: str
    messages: list[BaseMessage]
    tools: Sequence[dict[str, Any]]
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    files: Path | None
    _reader: Reader = field(default_factory=lambda: Reader(None))
    _answer: Answer | None = None
    _text: str = ""
    _room: int = 0
    _calls: int = 0
    _invalid: list[InvalidToolCall] = field(default_factory=list)

    def __call__(self, *, on_token: OnToken | None = None, stopped: Callable[[], bool]) -> Answer:
        """Asks. Raises ContextOverflowError, and what `converse` and `Window.answer` raise."""
        pool = self.pool()
        self._reader = Reader(pool.syntax if self.tools else None)
        try:
            self._answer = pool.over(
                self.messages, self.tools, self.files, lambda talk: self._ask(pool, talk, on_token, stopped)
            )
        except BudgetExceeded as error:
            raise ContextOverflowError(str(error)) from error
        return self._answer

    def _ask(self, pool: Pool, talk: Conversation, on_token: OnToken | None, stopped: Callable[[], bool]) -> Answer:
        with pool.window(talk.system_prompt, talk.chunks) as window:
            engine = window.engine
            # The KV of the exchange is kept for the next call, which has it as messages: where the template renders it the
            # same way then, and where it is certain to fit.
            asked = engine.encode_exchange(talk.query, ()) if pool.remembers else engine.encode_query(talk.query)
            self._room = max(1, self.max_tokens or window.budget - window.tokens - asked.tokens)
            alone = engine.encode_system_prompt(window.system_prompt).tokens + asked.tokens + self._room
            keep = pool.remembers and alone <= window.budget
            question = Question(
                talk.query,
                replace(self.sampling, max_tokens=self._room),
                remember=keep and partial(remembers, engine),
                stop=self.stop,
                bare=True,
            )
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
