"""Pydantic's complaints as one line, and texts that are none."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_EXPECTED = {"missing": "must be given", "extra_forbidden": "must be left out: there is no such field"}
_SIGNS = {"greater than or equal to": ">=", "less than or equal to": "<=", "greater than": ">", "less than": "<"}


def validate(validator: Callable[[Any], Any], data: Any, prefix: str = "the request is malformed: ") -> Any:
    """Validate ``data`` with pydantic; raise ValueError with its errors on one line, behind ``prefix``."""
    try:
        return validator(data)
    except ValidationError as error:
        raise ValueError(prefix + describe(error)) from None


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode, got half of a surrogate pair, {text[error.start]!r}; "
            "pass text.encode(errors='replace').decode()"
        ) from None


def describe(error: ValidationError) -> str:
    """Return pydantic's errors as ``NAME must be X, got Y``, the first four of them."""
    problems: dict[tuple[str, ...], list[str]] = {}
    values: dict[tuple[str, ...], str] = {}
    for one in error.errors(include_url=False):
        path = tuple(str(part) for part in one["loc"] if not _is_type(part))
        problems.setdefault(path, []).append(_expected(one))
        values[path] = "" if one["type"] in _EXPECTED else f", got {reprlib.repr(one['input'])}"
    lines = []
    for path, problem in problems.items():
        first, *others = dict.fromkeys(problem)
        if first.startswith("must "):
            alternatives = "".join(f" or {other.removeprefix('must be ')}" for other in others)
            lines.append(f"{'.'.join(path) or 'it'} {first}{alternatives}{values[path]}")
        else:  # of a validator of our own, which names the field
            names = path[:-1] if path and first.startswith(path[-1]) else path
            lines.append(f"{'.'.join(names)}: {first}" if names else first)
    return "; ".join(lines[:4])


def _expected(one: ErrorDetails) -> str:
    """Return what pydantic expected as ``must be X``; the whole message of a validator of our own."""
    if one["type"] == "value_error":
        return str(one["ctx"]["error"])
    expected = re.sub(r"^\w+ should ", "must ", one["msg"]).replace(" after validation", "")
    expected = expected.partition(",")[0] if "must be a valid" in expected else expected
    for words, sign in _SIGNS.items():
        expected = expected.replace(words, sign)
    return _EXPECTED.get(one["type"], expected)


def _is_type(part: str | int) -> bool:
    """Return True for the part of an error's place that names a member of a union."""
    return isinstance(part, str) and ("[" in part or part in ("bool", "int", "float", "str"))
