"""The load kernel: what turns stored spans into the KV an engine writes, near the cost of a copy."""

from ctxwin.operator.kernels.api import Placing
from ctxwin.operator.kernels.choice import Kernel, choose
from ctxwin.operator.kernels.lines import Lines
from ctxwin.operator.kernels.parts import Part

__all__ = ["Kernel", "Lines", "Part", "Placing", "choose"]
