"""``python tools/train_tiny [check] ...``: train the bundled model, or check a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder that holds this package, not the package itself


def main() -> None:
    """Runs what the first argument names; the trainer without one."""
    if sys.argv[1:2] == ["check"]:
        from train_tiny.check import main as check

        del sys.argv[1]
        check()
    else:
        from train_tiny.train import main as train

        train()


if __name__ == "__main__":
    main()
