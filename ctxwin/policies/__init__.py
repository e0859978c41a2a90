"""Policies: who leaves a full window (`Eviction`), and what a look back brings into it (`Retrieval`).

Each is a small frozen dataclass with one method, and a window takes any of them.
"""

from __future__ import annotations

from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.policies.eviction import OldestFirst
from ctxwin.policies.retrieval import ById

__all__ = ["ById", "Eviction", "OldestFirst", "Retrieval"]
