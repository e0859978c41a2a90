"""How an answer to a chat is decoded, by the names that OpenAI and vLLM give it.

An engine refuses options it does not support by name (`ctxwin.engines.sampling.SamplingOptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ctxwin.engines.results import ScoredToken
from ctxwin.engines.sampling import MOST_CHOICES, Sampling, SamplingOptions, options_model, schema_text

_LEAST_LOGPROB = -9999.0
"""Log-probability of a token that could not be drawn, as vLLM reports it: JSON has no infinities."""
_Stop = Annotated[str, Field(max_length=1000)]
_OPTIONS = tuple(SamplingOptions.__annotations__)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Schema(_Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # an answer is held to the schema either way


class _Format(_Strict):
    type: Literal["text", "json_object"]


class _SchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: _Schema


class ChatDecoding(options_model(SamplingOptions), BaseModel):  # type: ignore[misc]  # its fields are the options
    """Decoding options of a chat beside its messages and its tools."""

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: Annotated[_Format | _SchemaFormat, Field(discriminator="type")] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None

    @model_validator(mode="after")
    def _has_scores(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("logprobs must be true where top_logprobs are asked for")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or []))

    def sampling(self, defaults: Mapping[str, float]) -> Sampling:
        """Return the sampling without ``max_tokens``: options of the request, else ``defaults``, else OpenAI's.

        Raises ValueError for several choices that could only be the same.
        """
        requested = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        chosen: dict[str, Any] = {"temperature": 1.0} | {n: v for n, v in defaults.items() if n in _OPTIONS} | requested
        scores = (self.top_logprobs or 0) if self.logprobs else None
        sampling = Sampling(**chosen, token_logprobs=scores, json_schema=self._schema())
        if (self.n or 1) > 1 and sampling.temperature == 0:
            raise ValueError(f"n must be 1 where the temperature is 0 (all choices would be the same), got {self.n}")
        return sampling

    def _schema(self) -> str | None:
        match self.response_format:
            case _SchemaFormat(json_schema=schema):
                return schema_text(schema.schema_)
            case _Format(type="json_object"):
                return '{"type": "object"}'
        return None


def scores_to(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the log-probabilities of an answer's tokens as OpenAI shows them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}

    content = [
        {**entry(t, t.logprob), "top_logprobs": [entry(*other) for other in t.best.items()]}
        for t in tokens
        if isinstance(t, ScoredToken)
    ]
    return {"content": content, "refusal": None}
