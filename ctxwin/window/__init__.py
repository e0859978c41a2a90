"""The window: an immutable state, edits on it, lanes, assembly, and asking."""
