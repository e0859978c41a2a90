"""What engines return, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch

    from ctxwin.kv.layout import SpanKV


class ScoredToken(int):
    """A generated token id with the model's log-probabilities, before temperature and filters.

    Attributes:
        index: its position in the answer.
        logprob: its log-probability, in nats.
        best: log-probabilities of the most likely tokens by id, the highest first.
    """

    index: int
    logprob: float
    best: dict[int, float]

    def __new__(cls, token: int, index: int, logprob: float, best: dict[int, float]) -> Self:
        scored = super().__new__(cls, token)
        scored.index, scored.logprob, scored.best = index, logprob, best
        return scored


@dataclass
class Generation:
    """Answer of one `Engine.generate`, the KV it captured and its cost.

    Attributes:
        token_ids: generated ids, the ending token excluded.
        text: their text.
        logprobs: first-token log-probabilities by token id, as many as asked for.
        captured: KV by index into the layout, for segments with ``capture`` that were computed at least in part; in the
            frame they were computed in.
        query_span: KV of query + generated tokens (all but the last sampled one), where ``capture_query`` was set.
        computed_tokens: prompt tokens that went through a forward, over all forwards of this call.
        cached_tokens: prompt tokens the engine's own prefix cache served.
        forwards: number of prefill forwards.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
        fallbacks: failed loads; everything, ``captured`` included, was then computed in place, exactly.
        ttft_s: seconds from the call to the first token.
        finished: False where ``on_token`` stopped the answer.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: dict[int, float] = field(default_factory=dict)
    captured: dict[int, SpanKV] = field(default_factory=dict)
    query_span: SpanKV | None = None
    computed_tokens: int = 0
    cached_tokens: int = 0
    forwards: int = 0
    bytes_loaded: int = 0
    fallbacks: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    finished: bool = True


@dataclass
class PrefillCost:
    """Accumulated cost of `Engine.prefill` calls.

    Attributes:
        forwards: prefill forwards.
        tokens: prompt tokens that went through one.
        fallbacks: calls whose spans could not be loaded; everything was then computed in place, exactly.
    """

    forwards: int = 0
    tokens: int = 0
    fallbacks: int = 0


@dataclass(frozen=True)
class AttendedKV:
    """KV of a chunk, and the attention between its tokens.

    Attributes:
        span: as `Engine.prefill` returns it.
        sums: attention that each token receives from the chunk's tokens, summed over them and averaged over heads, by
            layer: float32 ``[L, T]`` (Elastic Cache, section 3.3).
    """

    span: SpanKV
    sums: torch.Tensor


@dataclass
class EngineCounters:
    """Work done since the engine was opened, including background forwards.

    Attributes:
        vision_encodes: runs of the vision tower.
        fallbacks: requests whose spans could not be loaded and were computed instead.
        retries: failed loads, whether tried again or abandoned.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
    """

    vision_encodes: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    fallbacks: int = 0
    retries: int = 0
    bytes_loaded: int = 0
