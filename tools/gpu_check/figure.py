"""The picture of a check: bandwidth of loads on the left, first tokens loaded and computed again on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LINES = {"computed_ms": "computed", "loaded_ms": "loaded", "patched_ms": "loaded, rank 32", "composed_ms": "composed"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG; sections without rows stay empty."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first_tokens = result.get("break_even", []) + result.get("scans", [])
    decoders = sorted({row["decoder"] for row in result.get("bandwidth", []) + first_tokens})
    figure, grid = plt.subplots(2, max(len(decoders), 1), figsize=(5 * max(len(decoders), 1), 8), squeeze=False)
    for column, name in enumerate(decoders):
        above, below = grid[0][column], grid[1][column]
        rows = [row for row in result.get("bandwidth", []) if row["decoder"] == name]
        for rank in sorted({row["rank"] for row in rows}):
            of_rank = [row for row in rows if row["rank"] == rank]
            above.plot(
                [r["tokens"] for r in of_rank], [r["load_ms"] for r in of_rank], marker="o", label=f"rank {rank}"
            )
        plain = [row for row in rows if row["rank"] == 0]
        above.plot([r["tokens"] for r in plain], [r["copy_ms"] for r in plain], "k--", label="copy of the bytes")
        above.set_title(f"{name}: a load of all layers")
        rows = [row for row in first_tokens if row["decoder"] == name]
        for key, label in LINES.items():
            with_key = [row for row in rows if key in row]
            if with_key:
                below.plot([r["tokens"] for r in with_key], [r[key] for r in with_key], marker="o", label=label)
        layers = f" ({rows[0]['layers']} of {rows[0]['of_layers']} layers)" if rows else ""
        below.set_title(f"{name}: first token{layers}")
        above.set_visible(bool(plain))  # a hybrid has first tokens only
        for axes in (above, below):
            axes.set(xscale="log", yscale="log", xlabel="tokens of the chunk", ylabel="milliseconds (median)")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
    figure.suptitle(f"{result['machine']['device']}, torch {result['machine']['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
