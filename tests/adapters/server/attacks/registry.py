"""All attacks by name, and how one is tried."""

from __future__ import annotations

import re
from collections.abc import Callable

from adapters.server.attacks import access, foreign_kv, load, sizes
from adapters.server.attacks.victim import Victim

Attack = Callable[[Victim], None]


def _named(prefix: str) -> dict[str, Attack]:
    functions = {name: value for module in (access, foreign_kv, load, sizes) for name, value in vars(module).items()}
    return {name.removeprefix(prefix): functions[name] for name in sorted(functions) if re.match(rf"{prefix}\d", name)}


ATTACKS = _named("attack_")
"""By name: what breaks the promise raises AssertionError. Names start with the number in the table of docs/security.md."""
OPEN = _named("open_")
"""Attacks on a server with one key and without tenants."""
LOAD = ("08_", "21_", "22_", "26_", "29_")
"""Attacks that are no more than many requests, each of which the server owes an answer."""


def attempt(made: Attack, at: Victim) -> str:
    """How an attack broke a promise, or ""."""
    try:
        made(at)
    except AssertionError as error:
        return str(error)[:300] or "an assertion"
    except (TypeError, KeyError, AttributeError) as error:  # an answer of another form than expected
        return f"{type(error).__name__}: {error}"[:300]
    return ""
