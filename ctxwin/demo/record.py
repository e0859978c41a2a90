"""What the demo writes down: one `Step` an ask, and the summary of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COSTS = (
    "computed_tokens",
    "computed_tokens_naive",
    "computed_tokens_trim",
    "computed_tokens_append",
    "vision_encodes",
    "vision_encodes_prefix_cache",
    "vision_encodes_trim",
    "vision_encodes_append",
)


@dataclass(frozen=True)
class Step:
    """One ask. Tokens are prompt tokens.

    Attributes:
        time: seconds into the video of the newest frame.
        truth: the generator's answer for the frames placed now, in order; None where it is not known.
        answer_reprefill, answer_blind: of an exact forward over the same frames, and of blind reuse.
        kl, kl_blind: KL(re-prefill || window) and KL(re-prefill || blind) of the first answer token, in nats.
        tokens_by_lane: tokens of system prompt and frames by the lane that served them.
        computed_tokens: what went through a forward for this ask, background work since the last one included.
        background_tokens: the part of it that was no prompt: canonicals, patches, tests of what matters.
        computed_tokens_naive, computed_tokens_trim, computed_tokens_append: the same for users of a prefix cache who
            slide, who drop half the window when full, and who also append looked-back frames at the end.
        vision_encodes_prefix_cache: of the ``naive`` user, behind an encoder cache of vLLM's default size.
        ttft_s, ttft_reprefill_s: seconds to the first answer token.
        placed: the frames in prompt order, with the lane of each.
    """

    seed: int
    index: int
    op: str
    time: float
    kind: str
    query: str
    answer: str
    truth: str | None
    answer_reprefill: str
    answer_blind: str
    kl: float
    kl_blind: float
    tokens_by_lane: dict[str, int]
    prompt_tokens: int
    computed_tokens: int
    background_tokens: int
    computed_tokens_naive: int
    computed_tokens_trim: int
    computed_tokens_append: int
    vision_encodes: int
    vision_encodes_prefix_cache: int
    vision_encodes_trim: int
    vision_encodes_append: int
    bytes_loaded: int
    ttft_s: float
    ttft_reprefill_s: float
    placed: tuple[dict[str, Any], ...]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(steps: Sequence[Step]) -> dict[str, Any]:
    """Sums and means over steps; accuracies and means are None where there is nothing to average."""
    sums = {name: sum(getattr(s, name) for s in steps) for name in COSTS}
    known = [s for s in steps if s.truth is not None]
    ours = sums["computed_tokens"]
    lanes: dict[str, int] = {}
    for step in steps:
        for lane, tokens in step.tokens_by_lane.items():
            lanes[lane] = lanes.get(lane, 0) + tokens
    return {
        "asks": len(steps),
        **accuracies(known),
        "agreement": _share(steps, lambda s: s.answer == s.answer_reprefill),
        "kl_mean": _mean(s.kl for s in steps),
        "kl_blind_mean": _mean(s.kl_blind for s in steps),
        **sums,
        "prompt_tokens": sum(s.prompt_tokens for s in steps),
        "background_tokens": sum(s.background_tokens for s in steps),
        **{
            f"share_of_{name}": ours / sums[f"computed_tokens_{name}"] if sums[f"computed_tokens_{name}"] else None
            for name in ("naive", "trim", "append")
        },
        "tokens_by_lane": lanes,
        "bytes_loaded": sum(s.bytes_loaded for s in steps),
        "ttft_s": sum(s.ttft_s for s in steps),
        "ttft_reprefill_s": sum(s.ttft_reprefill_s for s in steps),
        "ttft_median_s": statistics.median(s.ttft_s for s in steps) if steps else None,
        "ttft_reprefill_median_s": statistics.median(s.ttft_reprefill_s for s in steps) if steps else None,
        "by_kind": {k: _group([s for s in steps if s.kind == k]) for k in sorted({s.kind for s in steps})},
        "by_op": {o: _group([s for s in steps if s.op == o]) for o in dict.fromkeys(s.op for s in steps)},
    }


def accuracies(known: Sequence[Step]) -> dict[str, float | None]:
    """Shares of right answers of the window, of re-prefill and of blind reuse."""
    return {
        "accuracy": _share(known, lambda s: s.answer == s.truth),
        "accuracy_reprefill": _share(known, lambda s: s.answer_reprefill == s.truth),
        "accuracy_blind": _share(known, lambda s: s.answer_blind == s.truth),
    }


def _group(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "asks": len(steps),
        **accuracies([s for s in steps if s.truth is not None]),
        "kl_mean": _mean(s.kl for s in steps),
        **{name: sum(getattr(s, name) for s in steps) for name in COSTS},
    }


def _share(steps: Sequence[Step], holds: Callable[[Step], bool]) -> float | None:
    return sum(map(holds, steps)) / len(steps) if steps else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None
