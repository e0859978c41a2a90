"""``python -m ctxwin.evals``: the same commands as ``ctxwin eval``."""

from __future__ import annotations

from ctxwin.evals.cli import app

if __name__ == "__main__":
    app(prog_name="python -m ctxwin.evals")
