"""Puts our routes into an OpenAI server's FastAPI app."""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import FastAPI

from ctxwin.serve.gate import STATE, Gate
from ctxwin.serve.routes import build_router
from ctxwin.serve.service import Service

GATE = f"{Gate.__module__}.{Gate.__name__}"
"""The gate as vLLM's ``--middleware`` takes it."""


def install(app: FastAPI, service: Service) -> None:
    """Adds the routes of ``service``; the app's own ones stay as they are. `GATE` must be among the app's middleware."""
    setattr(app.state, STATE, service)
    app.include_router(build_router(service))
