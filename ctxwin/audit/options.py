"""`Options`: how an engine's windows earn trust."""

import math
import os
from dataclasses import dataclass
from typing import Any, Self

from ctxwin.audit.harm import CAP
from ctxwin.validation import check_integer


@dataclass(frozen=True)
class Options:
    """How an engine's windows earn trust.

    Attributes:
        budget: largest share of scored answers that may lose their value, in the mean over windows, at which a strategy is
            promoted (`ctxwin.audit.harm`).
        excess_budget: largest mean loss of text, in nats a token beyond what exact answers differ by among themselves.
        level: confidence level of the anytime-valid bounds on both.
        token_limit: tokens that trials of a strategy may compute. Where a promotion would take more, even if no further answer
            is harmed, its trials stop until the mix of answers or these options change.
        rate: share of the answers of promoted strategies that are still audited, drawn at random: more of the first ones of
            each kind (`ctxwin.audit.sampling`), and all of them for a while after a harmed one.
        questions: maximum questions on each replayed layout of a trial: 1 is the one that was asked, more add recent ones of
            the same window whose exact answer is unchanged. All belong to one unit, so more of them distinguish a rare harm
            from a frequent one sooner, but do not reduce the number of windows that a promotion takes.
        share: maximum share of the engine's time that audits take, over minutes, and of the tokens computed again where reuse
            would have saved them that trials compute. A window is followed by trials from its first answer, or not at all, so
            the first windows have none. 1: no bound.
        quiet_s: seconds that the engine must be idle before an audit begins, so that none begins between requests in close
            succession.
        queue: maximum answers of a tenant that wait to be audited; the oldest are dropped.
        seed: of the draws, one generator for each auditor; None: chosen by the system.
    """

    budget: float = 0.01
    excess_budget: float = 0.01
    level: float = 0.95
    token_limit: int = 20_000_000
    rate: float = 0.02
    questions: int = 1
    share: float = 0.25
    quiet_s: float = 0.05
    queue: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "level"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not 0 < self.excess_budget < CAP:
            raise ValueError(f"excess_budget must be between 0 and {CAP} nats, got {self.excess_budget}")
        for name in ("rate", "share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.quiet_s < math.inf:
            raise ValueError(f"quiet_s must be >= 0 and finite, got {self.quiet_s}")
        for name in ("questions", "queue", "token_limit"):
            check_integer(name, getattr(self, name), 1)

    @classmethod
    def from_environment(cls) -> Self:
        """Return the options with what ``CTXWIN_AUDIT_SHARE`` and ``CTXWIN_AUDIT_RATE`` set. Raises ValueError."""
        options: dict[str, Any] = {}
        for name, variable in (("share", "CTXWIN_AUDIT_SHARE"), ("rate", "CTXWIN_AUDIT_RATE")):
            if text := os.environ.get(variable):
                try:
                    options[name] = float(text)
                    cls(**options)
                except ValueError:
                    raise ValueError(f"{variable} must be a number from 0 to 1, got {text!r}") from None
        return cls(**options)
