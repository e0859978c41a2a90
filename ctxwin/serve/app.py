"""Puts our routes into an OpenAI server's FastAPI app."""

from __future__ import annotations

from fastapi import FastAPI

from ctxwin.serve.gate import Gate
from ctxwin.serve.routes import build_router
from ctxwin.serve.service import Service


def install(app: FastAPI, service: Service) -> None:
    """Adds the routes of ``service`` and the gate in front of every route; the app's own ones stay as they are."""
    app.include_router(build_router(service))
    app.add_middleware(Gate, service=service)
