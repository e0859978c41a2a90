"""Policies: what leaves a full window (`Eviction`), how far it falls (`Batching`), what a look back brings (`Retrieval`), and
where that goes (`Placement`).

Each is a small frozen dataclass with a method or two, and a window takes any of them. All but `ByCost`, which follows measured
prices, are deterministic (`ctxwin.policies.base`).
"""

from ctxwin.policies.base import Batching, Eviction, Placement, Ranking, Retrieval
from ctxwin.policies.cost import ByCost
from ctxwin.policies.eviction import ByDisposability, ByPriority, OldestFirst
from ctxwin.policies.low_water import LowWater
from ctxwin.policies.retrieval import BySimilarity, ByToolCall
from ctxwin.window.defaults import ById, LeastRecentlyRead
from ctxwin.window.sliding import SlidingCost, best_low_water, sliding_cost

__all__ = ["Batching", "ByCost", "ByDisposability", "ById", "ByPriority", "BySimilarity", "ByToolCall"]
__all__ += ["Eviction", "LeastRecentlyRead", "LowWater", "OldestFirst", "Placement", "Ranking", "Retrieval"]
__all__ += ["SlidingCost", "best_low_water", "sliding_cost"]
