"""The load kernel: what turns stored spans into the KV an engine writes, near the cost of a copy."""

from ctxwin.operator.kernels.api import Kernel, Placing
from ctxwin.operator.kernels.parts import Part

__all__ = ["Kernel", "Part", "Placing"]
