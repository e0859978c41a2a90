"""Adapters to other systems. Installed as ``ctxwin.adapters``."""
