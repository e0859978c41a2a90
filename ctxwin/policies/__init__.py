"""Policies: what leaves a full window (`Eviction`), and what a look back brings into it (`Retrieval`).

Each is a small frozen dataclass with one method, and a window takes any of them. All are deterministic (`ctxwin.policies.base`).
"""

from __future__ import annotations

from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.policies.eviction import ByDisposability, ByPriority, LeastRecentlyRead, OldestFirst
from ctxwin.policies.retrieval import ById, BySimilarity, ByToolCall

__all__ = ["ByDisposability", "ById", "ByPriority", "BySimilarity", "ByToolCall"]
__all__ += ["Eviction", "LeastRecentlyRead", "OldestFirst", "Retrieval"]
