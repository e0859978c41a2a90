"""Chunks as tokens, media inputs and positions."""
