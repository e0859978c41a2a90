"""The load kernel: what turns stored spans into the KV an engine writes, near the cost of a copy."""

from ctxwin.kv.kernels.api import LoadPlan
from ctxwin.kv.kernels.choice import Kernel, choose
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.kernels.strides import CacheStrides

__all__ = ["CacheStrides", "Kernel", "LoadPlan", "SpanSlice", "choose"]
