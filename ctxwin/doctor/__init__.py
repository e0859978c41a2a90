"""What is installed, which engine would be used, what is broken and how to fix it (``ctxwin doctor``)."""

from ctxwin.doctor.checks import CHECKS, Finding, diagnose, fix

__all__ = ["CHECKS", "Finding", "diagnose", "fix"]
