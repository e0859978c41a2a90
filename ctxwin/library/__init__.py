"""Libraries: files that windows draw from, kept apart from any window.

`Library` holds them, a retriever of `ctxwin.library.retrieval` finds in them, and `ctxwin.Window.retrieve` places what it finds.
"""

from ctxwin.library.library import Library
from ctxwin.library.records import Entry, Passage, Row
from ctxwin.library.retrieval import BM25, Fused, Pictures, Retriever, Vectors
from ctxwin.library.views import LibraryView

__all__ = ["BM25", "Entry", "Fused", "Library", "LibraryView", "Passage", "Pictures", "Retriever", "Row", "Vectors"]
