"""Patches predicted for neighbours that a chunk was never seen with."""
