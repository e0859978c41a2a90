"""Policies: what leaves a full window (`Eviction`), what a look back brings into it (`Retrieval`), where it goes (`Placement`).

Each is a small frozen dataclass with a method or two, and a window takes any of them. All but `ByCost`, which follows measured
prices, are deterministic (`ctxwin.policies.base`).
"""

from __future__ import annotations

from ctxwin.policies.base import Eviction, Placement, Retrieval
from ctxwin.policies.cost import ByCost
from ctxwin.policies.eviction import ByDisposability, ByPriority, LeastRecentlyRead, OldestFirst
from ctxwin.policies.retrieval import ById, BySimilarity, ByToolCall

__all__ = ["ByCost", "ByDisposability", "ById", "ByPriority", "BySimilarity", "ByToolCall"]
__all__ += ["Eviction", "LeastRecentlyRead", "OldestFirst", "Placement", "Retrieval"]
