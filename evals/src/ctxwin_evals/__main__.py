"""``python -m ctxwin_evals``: the same commands as ``ctxwin eval``."""

from __future__ import annotations

from ctxwin_evals.cli import app

if __name__ == "__main__":
    app(prog_name="python -m ctxwin_evals")
