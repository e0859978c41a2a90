"""Stores: bytes keyed by content."""
