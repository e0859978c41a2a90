"""Puts our routes into an OpenAI server's FastAPI app."""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import FastAPI

from ctxwin.serve.middleware import Gateway
from ctxwin.serve.routes import router
from ctxwin.serve.service import STATE, Service

GATEWAY = f"{Gateway.__module__}.{Gateway.__name__}"
"""The middleware as vLLM's ``--middleware`` takes it."""


def install(app: FastAPI, service: Service) -> None:
    """Adds our routes for ``service``; the app's own stay as they are. `GATEWAY` must be among the app's middleware."""
    setattr(app.state, STATE, service)
    app.include_router(router)
