"""The load kernel: what turns stored spans into the KV an engine writes, near the cost of a copy."""

from ctxwin.kv.kernels.api import Placing
from ctxwin.kv.kernels.choice import Kernel, choose
from ctxwin.kv.kernels.lines import Lines
from ctxwin.kv.kernels.parts import Part

__all__ = ["Kernel", "Lines", "Part", "Placing", "choose"]
