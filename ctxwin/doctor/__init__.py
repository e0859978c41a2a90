"""``ctxwin doctor``: installed libraries, the engine that would be used, faults and their remedies."""

from ctxwin.doctor.checks import CHECKS, Finding, diagnose

__all__ = ["CHECKS", "Finding", "diagnose"]
