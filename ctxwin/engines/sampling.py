"""How an answer is sampled: the options, their ranges and their defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from ctxwin.validation import check_integer, validate

if TYPE_CHECKING:
    from ctxwin.fidelity import Fidelity

MOST_CHOICES = 128
_MOST_SCHEMA = 256 << 10
SEED = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what torch's generators accept


class SamplingOptions(TypedDict, total=False):
    """Options of sampling, by the names that OpenAI and vLLM give them, with their ranges; None leaves the default of `Sampling`.

    Defined here alone: `Window.ask` and its kin, chat models, the client, HTTP and vLLM's parameters follow.

    Attributes:
        temperature: 0, the default of windows, always takes the likeliest token; chats have OpenAI's, 1.
        top_p: sample only from the most likely tokens that together have this probability.
        top_k: sample only from so many of the most likely tokens; 0 or -1 is all.
        min_p: sample only from tokens at least this fraction as likely as the most likely one.
        presence_penalty: subtracted from the logits of tokens that the answer already has.
        frequency_penalty: subtracted once for each occurrence.
        repetition_penalty: divides the positive logits of tokens in the prompt or answer, multiplies negative ones.
        seed: makes sampling repeatable.
    """

    temperature: Annotated[float | None, Field(ge=0, le=2)]
    top_p: Annotated[float | None, Field(gt=0, le=1)]
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)]
    min_p: Annotated[float | None, Field(ge=0, le=1)]
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    repetition_penalty: Annotated[float | None, Field(gt=0, allow_inf_nan=False)]
    seed: SEED | None


def options_model(options: type) -> type[BaseModel]:
    """Return a pydantic model with the fields of a typed dictionary, each None by default; it refuses any other field."""
    hints = get_type_hints(options, include_extras=True)
    fields: dict[str, Any] = {field: (hint, None) for field, hint in hints.items()}
    return create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)


@dataclass(frozen=True)
class Sampling:
    """How to decode: values of `SamplingOptions`, which describes them, and what else an engine can be told.

    Attributes:
        max_tokens: most tokens to generate (>= 1).
        logprobs: how many first-token log-probabilities to return: 0 none, -1 the whole vocabulary.
        stop_ids: further token ids that end the answer, beside the model's own.
        token_logprobs: generated ids are `ScoredToken` with this many of the most likely tokens; None: plain ints.
        hold: largest share of the tokens whose slots are kept, in (0, 1]: beyond it each generated token drops the one 25
            before the newest, never one of the system prompt (Elastic Cache's fixed-point elimination, algorithm 1).
        hold_every: after how many tokens they really go, all those at once that would have gone one by one.
        merge_prompt: whether the prompt is merged to that share as well, once it is computed, by the attention of all of it
            (section 3.3); the first token is from before. All of it is computed: neither spans nor cached blocks serve it.
        json_schema: the answer is JSON of this schema (JSON text); None: any text.

    An engine raises UnsupportedModel for a setting that it does not support.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int = 0
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    token_logprobs: int | None = None
    hold: float = 1.0
    hold_every: int = 1
    merge_prompt: bool = False
    json_schema: str | None = None

    @property
    def has_penalties(self) -> bool:
        """True if a token's score depends on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def sampling_under(fidelity: Fidelity, sampling: Sampling, merged: bool) -> Sampling:
    """Return ``sampling`` with the share of the KV that an answer keeps; ``merged``: some of its chunks are."""
    advanced = fidelity.advanced
    if fidelity.merge is None or not (fidelity.merges_prompt or (advanced.eliminate and merged)):
        return sampling
    every = advanced.eliminate or sampling.max_tokens
    return replace(sampling, hold=fidelity.merge, hold_every=every, merge_prompt=advanced.merge_prompt)


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text. Raises ValueError for one that is larger than any answer needs."""
    if len(text := json.dumps(schema)) > _MOST_SCHEMA:
        raise ValueError(f"the JSON schema must have at most {_MOST_SCHEMA} characters, got {len(text)}")
    return text


_RANGES = options_model(SamplingOptions)


def check_sampling(sampling: Sampling, vocabulary: int | None = None) -> None:
    """Raise ValueError for settings that are out of range on every engine, or for a ``vocabulary`` of so many tokens."""
    check_integer("max_tokens", sampling.max_tokens, 1)
    check_integer("logprobs", sampling.logprobs, -1, vocabulary, note=" (-1: the whole vocabulary)")
    if vocabulary is not None:
        check_integer("token ids in stop", max(sampling.stop_ids, default=0), 0, vocabulary - 1)
    if not 0 < sampling.hold <= 1:
        raise ValueError(f"hold must be in (0, 1], got {sampling.hold}")
    check_integer("hold_every", sampling.hold_every, 1)
    values = {name: getattr(sampling, name) for name in _RANGES.model_fields}
    validate(partial(_RANGES.model_validate, strict=True), values, "")
