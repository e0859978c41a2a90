"""Pydantic's complaints as one line, and texts that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError


def validate(validator: Callable[[Any], Any], data: Any) -> Any:
    """Validate ``data`` with pydantic; raise ValueError with its errors on one line."""
    try:
        return validator(data)
    except ValidationError as error:
        raise ValueError(_complaint(error)) from None


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode, got half of a surrogate pair, {text[error.start]!r}; "
            "pass text.encode(errors='replace').decode()"
        ) from None


def _complaint(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
    return "the request is malformed: " + "; ".join(problems[:4])
