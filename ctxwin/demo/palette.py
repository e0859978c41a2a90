"""One colour a lane, the same in the table, the timeline and the report, and what each lane means in a few words."""

from __future__ import annotations

LANES: dict[str, tuple[str, str]] = {
    "computed": ("#d1495b", "first sight: a forward"),
    "formed": ("#ee964b", "seen before, computed again: a forward, no vision encode"),
    "resident": ("#3a7d44", "stored KV with exactly this context: rotated or nothing"),
    "survivor": ("#2e86ab", "kept as it was conditioned; some of its context left"),
    "patched": ("#6457a6", "canonical KV plus a low-rank patch"),
    "orbit": ("#b56576", "canonical KV plus one patch for every order"),
    "canonical": ("#8d99ae", "clean of its context"),
}
"""Lane: (colour, meaning), the dearest first."""

OURS, NAIVE, TRIM, APPEND = "#2e86ab", "#d1495b", "#ee964b", "#a0862f"
POLICIES = {
    "computed_tokens": ("ctxwin", OURS),
    "computed_tokens_naive": ("prefix cache: slide", NAIVE),
    "computed_tokens_trim": ("prefix cache: trim", TRIM),
    "computed_tokens_append": ("trim, look back at the end", APPEND),
}
"""Field of a step: (name, colour)."""

ENCODES = {
    "computed_tokens": "vision_encodes",
    "computed_tokens_naive": "vision_encodes_prefix_cache",
    "computed_tokens_trim": "vision_encodes_trim",
    "computed_tokens_append": "vision_encodes_append",
}
"""Field of the tokens: field of the vision encodes."""
