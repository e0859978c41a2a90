"""A colour and a short description for each lane, shared by terminal output, figures and pages."""

LANES: dict[str, tuple[str, str]] = {
    "computed": ("#d1495b", "first sight: a forward"),
    "formed": ("#ee964b", "seen before, computed again: a forward, no vision encode"),
    "partial": ("#f2cc60", "text and the first tokens of pictures computed in context over canonical KV"),
    "resident": ("#3a7d44", "stored KV with exactly this context: rotated or nothing"),
    "survivor": ("#2e86ab", "kept as it was conditioned; some of its context left"),
    "edited": ("#66a182", "kept as it was conditioned; a few tokens of its context changed"),
    "patched": ("#6457a6", "canonical KV plus a low-rank patch"),
    "orbit": ("#b56576", "canonical KV plus one patch for every order"),
    "merged": ("#c9ada7", "kept in fewer slots than tokens"),
    "canonical": ("#8d99ae", "clean of its context"),
}
"""Lane: (colour, meaning), the most expensive first."""
