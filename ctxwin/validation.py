"""Pydantic's complaints as one line, and texts that are none."""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_EXPECTED = {
    "missing": "must be given",
    "union_tag_not_found": "must be given",
    "extra_forbidden": "must be left out: there is no such field",
}
_SIGNS = {"greater than or equal to": ">=", "less than or equal to": "<=", "greater than": ">", "less than": "<"}
_UNION_MEMBER = re.compile(r".*\[|(constrained-)?(bool|int|float|str)$")


def validate(validator: Callable[[Any], Any], data: Any, prefix: str = "the request is malformed: ") -> Any:
    """Validate ``data`` with pydantic; raise ValueError with its errors on one line, behind ``prefix``."""
    try:
        return validator(data)
    except ValidationError as error:
        raise ValueError(prefix + describe(error)) from None


def as_list(name: str, values: Any, item: str) -> list[Any]:
    """Return ``values`` as a list; raise TypeError for what has no order, and for one value: pydantic's models are iterable."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | BaseModel | Mapping | set | frozenset):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}; pass a list, with {item} for each")
    return list(values)


def check_integer(name: str, value: Any, low: int, high: int | None = None, note: str = "") -> None:
    """Raise ValueError for what is no int, or outside ``low..high``; ``note`` follows the range in the message."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        accepted = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an int {accepted}{note}, got {value!r}"[:300])


def check_flags(**flags: Any) -> None:
    """Raise TypeError for a flag that is no bool: the text "false" would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}"[:300])


def check_numbers(**values: Any) -> None:
    """Raise TypeError for what is no real number and not None."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
            raise TypeError(f"{name} must be a number, got {value!r}"[:300])


def check_json(name: str, value: Any) -> None:
    """Raise TypeError or ValueError for what JSON does not have: sets, bytes, objects, infinities."""
    try:
        None if isinstance(value, str | int | None) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be JSON (text, numbers, lists, dicts), got {value!r}"[:300]) from None


def check_unicode(name: str, text: str) -> None:
    """Raise TypeError for what is no text, ValueError for half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode, got half of a surrogate pair, {text[error.start]!r}; "
            "pass text.encode(errors='replace').decode()"
        ) from None


def describe(error: ValidationError) -> str:
    """Return pydantic's errors as ``NAME must be X, got Y``, the first four of them."""
    problems: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):  # a union has one for each member
        path = tuple(part for part in map(str, one["loc"]) if not _UNION_MEMBER.match(part))
        field = one.get("ctx", {}).get("discriminator")  # the field whose value names the member of a union
        problems.setdefault((*path, field.strip("'")) if field else path, []).append(one)
    return "; ".join(_problem(path, errors) for path, errors in [*problems.items()][:4])


def _problem(path: tuple[str, ...], errors: list[ErrorDetails]) -> str:
    first, *others = dict.fromkeys(map(_expected, errors))
    if not first.startswith("must "):  # of a validator of our own, which names the field
        names = path[:-1] if path and first.startswith(path[-1]) else path
        return f"{'.'.join(names)}: {first}" if names else first
    got = errors[0].get("ctx", {}).get("tag", errors[0]["input"])
    value = "" if errors[0]["type"] in _EXPECTED else f", got {reprlib.repr(got)}"
    return ".".join(path or ("it",)) + " " + " or ".join([first, *(o.removeprefix("must be ") for o in others)]) + value


def _expected(one: ErrorDetails) -> str:
    if one["type"] == "value_error":
        return str(one["ctx"]["error"])
    if one["type"] == "union_tag_invalid":
        return f"must be one of {one['ctx']['expected_tags']}"
    expected = re.sub(r"^\w+ should ", "must ", one["msg"]).replace(" after validation", "")
    expected = expected.partition(",")[0] if "must be a valid" in expected else expected
    for words, sign in _SIGNS.items():
        expected = expected.replace(words, sign)
    return _EXPECTED.get(one["type"], expected)
