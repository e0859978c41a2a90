"""The same prompts without ctxwin: an engine's own prefix cache, and a prompt that it holds as a whole.

Prompts are passed as token ids and ready embeddings, so the times include no tokenising, decoding or vision encoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ctxwin.engines.base import Sampling, Segment
from ctxwin.hashing import digest

if TYPE_CHECKING:
    from ctxwin.engines.base import Encoded, Engine, Generation


@dataclass(frozen=True)
class Plain:
    """Times of one prompt, in seconds to the first token.

    Attributes:
        prefix_cache_s: with what the prefix cache held of the prompt before the edit.
        local_hit_s: once more, now held as a whole.
        prefix_hit: prompt tokens that the cache had in the first of both; local_hit: in the second.
        prefix_cpu_s, local_cpu_s: seconds of all of this process's threads on a CPU meanwhile.
    """

    prefix_cache_s: float
    local_hit_s: float
    prefix_hit: int
    local_hit: int
    prefix_cpu_s: float = 0.0
    local_cpu_s: float = 0.0


class Opponent(Protocol):
    """An engine's prefix cache from the point of view of one user."""

    def ask(self, before: Sequence[Encoded], after: Sequence[Encoded], query: Encoded, run: str) -> Plain:
        """Asks ``query`` behind ``before`` (not timed), then twice behind ``after``.

        ``run`` names the repetition; nothing that another repetition left in the cache is found.
        """


def opponent_of(engine: Engine) -> Opponent:
    """The opponent on this very engine."""
    return OwnCache(engine) if engine.spec.name == "vllm" else HeldPrefix(engine)


@dataclass
class OwnCache:
    """vLLM's prefix cache, in a space of its own for each repetition. No KV is loaded or captured."""

    engine: Engine

    def ask(self, before: Sequence[Encoded], after: Sequence[Encoded], query: Encoded, run: str) -> Plain:
        salt = digest("plain", run)
        _generate(self.engine, _placed(before), query, salt)
        first, first_cpu = _timed(self.engine, _placed(after), query, salt)
        again, again_cpu = _timed(self.engine, _placed(after), query, salt)
        return Plain(first.ttft_s, again.ttft_s, first.cached_tokens, again.cached_tokens, first_cpu, again_cpu)


@dataclass
class HeldPrefix:
    """For an engine without a prefix cache: the KV of the common front stays where it was computed."""

    engine: Engine

    def ask(self, before: Sequence[Encoded], after: Sequence[Encoded], query: Encoded, run: str) -> Plain:
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        segments = _placed(after)
        front = _held(self.engine, segments[:same], query)
        whole = _held(self.engine, segments, query)
        first, first_cpu = _timed(self.engine, [*front, *segments[same:]], query, "")
        again, again_cpu = _timed(self.engine, whole, query, "")
        hits = sum(segment.encoded.tokens for segment in front), sum(part.tokens for part in after)
        return Plain(first.ttft_s, again.ttft_s, *hits, first_cpu, again_cpu)


def _placed(encoded: Sequence[Encoded]) -> list[Segment]:
    """Segments one behind the other, from position 0, without KV."""
    segments, at = [], 0
    for part in encoded:
        segments.append(Segment(part, at))
        at += part.advance
    return segments


def _held(engine: Engine, segments: Sequence[Segment], query: Encoded) -> list[Segment]:
    """``segments`` with the KV that one forward over them gives."""
    if not segments:
        return []
    wanted = [replace(segment, capture=True) for segment in segments]
    captured = engine.generate(wanted, query, Sampling(max_tokens=1)).captured
    return [replace(segment, span=captured[i]) for i, segment in enumerate(segments)]


def _generate(engine: Engine, segments: Sequence[Segment], query: Encoded, salt: str) -> Generation:
    return engine.generate(segments, query, Sampling(max_tokens=1), salt=salt)


def _timed(engine: Engine, segments: Sequence[Segment], query: Encoded, salt: str) -> tuple[Generation, float]:
    """The answer, and the CPU seconds it took."""
    began = time.process_time()
    made = _generate(engine, segments, query, salt)
    return made, time.process_time() - began
