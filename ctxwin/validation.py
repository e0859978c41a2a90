"""Pydantic's complaints as one line."""

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


def _complaint(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
    return "the request is malformed: " + "; ".join(problems[:4])
