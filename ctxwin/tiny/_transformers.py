"""The one place where this package imports transformers."""

from __future__ import annotations

from typing import Any


def transformers() -> Any:
    """The transformers module, made importable where torchvision does not match torch; imported on first use."""
    from ctxwin.engines.torchvision_repair import repair

    repair()
    import transformers

    return transformers
