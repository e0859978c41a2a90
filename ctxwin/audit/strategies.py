"""Strategies that audits may promote, and the probability of error that each may spend on its attempts."""

import math
from dataclasses import dataclass

from ctxwin.fidelity import LANES, AdvancedFidelity, Fidelity, Lane


def attempt_share(attempt: int) -> float:
    """Return the part of a strategy's probability of error that an attempt may spend; over all attempts they sum to 1."""
    return 0.8 if not attempt else 0.2 * 6 / (math.pi * attempt) ** 2


@dataclass(frozen=True)
class Strategy:
    """A fidelity that may be promoted.

    Attributes:
        lane: a layout is a trial of the strategy if this lane serves something in it.
        share: its part of the probability of error; those of all strategies sum to 1.
        remembers: only for windows that shall remember evicted chunks (``reference="nearer"``).
    """

    lane: Lane
    fidelity: Fidelity
    share: float
    remembers: bool = False


def _with(*lanes: Lane) -> Fidelity:
    """Return a fidelity of the exact lanes and ``lanes``.

    Survivors of slides only: those that lost a chunk from their midst do more harm (`evals/studies/trust.py`) and are rare.
    """
    forbidden = tuple(lane for lane in LANES if lane not in {"computed", "formed", "resident", *lanes})
    return Fidelity("patched", orbit="orbit" in lanes, survivors="slid", advanced=AdvancedFidelity(forbid=forbidden))


STRATEGIES: dict[str, Strategy] = {
    "survivor": Strategy("survivor", _with("survivor"), 0.4),
    "patched": Strategy("patched", _with("survivor", "patched"), 0.15),
    "orbit": Strategy("orbit", _with("survivor", "patched", "orbit"), 0.05),
    "kept": Strategy("survivor", _with("survivor").model_copy(update={"survivors": "keep"}), 0.1, remembers=True),
    "partial": Strategy("partial", _with("partial").model_copy(update={"recompute": 32}), 0.15),
    "edited": Strategy("edited", _with("edited").model_copy(update={"edited_tokens": 16}), 0.05),
    "blind": Strategy("canonical", Fidelity("blind"), 0.1),
}
"""Strategies to try, by name."""


def error_of(strategy: str, attempt: int, level: float) -> float:
    """Return the error of the bound that decides on an attempt of a strategy; > 0 after any number of attempts."""
    share = STRATEGIES[strategy].share if strategy in STRATEGIES else 0.0
    return max((1 - level) * share * attempt_share(attempt), 1e-300)
