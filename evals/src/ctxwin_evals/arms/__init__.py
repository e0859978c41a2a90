"""The arms: every measured way to serve placed chunks, one small class each, with its source."""

from ctxwin_evals.arms import compress, layers, prefix, recall, reuse, tokens
from ctxwin_evals.arms.base import Arm, Served
from ctxwin_evals.items import Setting

ARMS: dict[str, type[Arm]] = {
    kind.form.partition(":")[0]: kind
    for kind in (
        reuse.Reprefill, reuse.Blind, reuse.Patched, reuse.Orbit, reuse.Orbits, reuse.Transfer, reuse.Survivor,
        reuse.Removal, recall.Stale, recall.Update, recall.Recall, recall.Refresh, reuse.Toggled,
        tokens.FirstK, tokens.Epic, tokens.Mpic, tokens.FullReuse, layers.Cacheblend, tokens.CacheblendOracle, tokens.Quest,
        layers.ShallowReuse, layers.LowRankKeys, prefix.Prefix, compress.ElasticCache, compress.HeavyHitters,
        compress.MostRecent, compress.Merged, reuse.Oracle, reuse.Stepwise,
    )
}  # fmt: skip
ARM_FORMS = ", ".join(kind.form for kind in ARMS.values()) + (
    " (M: a rank >= 0, or full, of the run's --layout, joint by default; windows serve patched:M@quantized; "
    "K: tokens >= 0, or all; R, B, F, T: a share 0..1; stale and update take @T, too)"
)

REFERENCE: Arm = reuse.Reprefill("reprefill")
BASES: dict[Setting, Arm] = {
    "window": reuse.Blind("blind"),
    "slide": reuse.Survivor("survivor"),
    "recall": recall.Recalled("blind"),
}
"""What would be served without repair: the base of eta and of flips."""


def parse_arm(text: str) -> Arm:
    """Return the arm of a name. Raises ValueError, listing the forms, for an unknown one."""
    name = text.strip()
    head = name.partition(":")[0]
    arm = ARMS[head].parse(name) if head in ARMS else None
    if arm is None:
        raise ValueError(f"an arm must be one of {ARM_FORMS}; got {text!r}")
    return arm


def parse_arms(text: str) -> list[Arm]:
    """A comma-separated list of arms, in order; ValueError where it is empty or names one twice."""
    arms = [parse_arm(part) for part in text.split(",") if part.strip()]
    if not arms:
        raise ValueError(f"arms must name at least one of {ARM_FORMS}; got {text!r}")
    if twice := sorted({a.name for a in arms if sum(b.name == a.name for b in arms) > 1}):
        raise ValueError(f"arms must be named once each, got {', '.join(twice)} again")
    return arms


__all__ = ["ARMS", "ARM_FORMS", "BASES", "REFERENCE", "Arm", "Served", "parse_arm", "parse_arms"]
