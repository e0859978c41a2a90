"""An engine that prefills for real and answers from a script: for agents whose model must call tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.templates import Template
from ctxwin.engines.results import Generation, PrefillCost
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import SpanKV


class ScriptedEngine(Engine):
    """Everything but the words of an answer comes from ``inner``.

    Args:
        script: texts of the answers in order, or a function of the prompt's text that gives one.

    Attributes:
        prompts: the text of every prompt that was answered, placeholders of pictures as they are.
    """

    def __init__(self, inner: Any, script: Sequence[str] | Callable[[str], str]) -> None:
        self.inner = inner
        self.spec, self.store, self.repo, self.counters = inner.spec, inner.store, inner.repo, inner.counters
        self.prompts: list[str] = []
        answers = iter(() if callable(script) else script)
        self._script = script if callable(script) else lambda _: next(answers)

    def generate(
        self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, *, salt: str = "", capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
    ) -> Generation:  # fmt: skip
        ids = [i for segment in layout for i in segment.encoded.token_ids] + list(query.token_ids)
        self.prompts.append(self.inner.encoder.checkpoint.tokenizer.decode(ids, skip_special_tokens=False))
        words = self.text_ids(self._script(self.prompts[-1]))
        made: Generation = self.inner.generate(
            layout, query, replace(sampling, max_tokens=1), salt=salt, capture_query=capture_query
        )
        made.token_ids, made.finished = [], True
        for word in words[: sampling.max_tokens]:
            made.token_ids.append(word)
            if on_token is not None and not on_token(word, self.decode(made.token_ids)):
                made.finished = False
                break
        made.text = self.decode(made.token_ids)
        return made

    @property
    def template(self) -> Template | None:
        found: Template | None = self.inner.template
        return found

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.inner.text_ids(text))

    def template_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.inner.template_ids(text))

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        made: Encoded = self.inner.encode_system_prompt(system_prompt)
        return made

    def encode(self, chunk: Chunk) -> Encoded:
        made: Encoded = self.inner.encode(chunk)
        return made

    def encode_query(self, query: str) -> Encoded:
        made: Encoded = self.inner.encode_query(query)
        return made

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        made: Encoded = self.inner.encode_exchange(query, answer_ids, after)
        return made

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: PrefillCost | None = None,
    ) -> SpanKV:
        made: SpanKV = self.inner.prefill(context, target, start, salt=salt, background=background, tally=tally)
        return made

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.inner.decode(token_ids))

    def embed(self, key: str) -> Any:
        return self.inner.embed(key)

    def close(self) -> None:
        """The inner engine stays its owner's."""
