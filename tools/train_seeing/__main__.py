"""``python tools/train_seeing words|tower ...``: the two stages of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder that holds this package, not the package itself


def main() -> None:
    """Run the stage that the first argument names."""
    stage = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if stage == "words":
        from train_seeing.words import main as train
    elif stage == "tower":
        from train_seeing.tower import main as train
    else:
        raise SystemExit(f"the stage must be words or tower, got {stage!r}")
    train()


if __name__ == "__main__":
    main()
