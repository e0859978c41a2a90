"""`WindowAudit`: a window's side of its audits: the fidelity in force, and the chunks that fell back to exact."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from ctxwin.audit.auditor import Auditor, Job, auditor_of, enabled
from ctxwin.audit.evidence import EvidenceFile
from ctxwin.audit.harm import Kind, value_of
from ctxwin.audit.replay import Exchange, Finding, keys_of
from ctxwin.audit.strategies import STRATEGIES
from ctxwin.profiles import find_profile
from ctxwin.window.answer import amend
from ctxwin.window.auditing import Auditing

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.fidelity import Fidelity
    from ctxwin.window.answer import Answer
    from ctxwin.window.choice import Choice
    from ctxwin.window.layout import Layout
    from ctxwin.window.protocols import OnFinding, ServedAnswer

_RECENT = 8


class WindowAudit(Auditing):
    """Audits of one window.

    ``auto`` without a profile earns its lanes; ``on_finding`` is called in the auditor's thread.

    Attributes:
        earns: the window's fidelity follows the evidence.
    """

    def __init__(self, engine: Engine, requested: Fidelity, on_finding: OnFinding = lambda *_: None) -> None:
        super().__init__(engine, requested, on_finding)
        profiled = not self._recurrent and find_profile(engine.spec.model) is not None
        self.earns = requested.mode == "auto" and enabled() and not self._always_exact and not profiled
        if self.earns and not requested.keeps_survivors:  # strategies keep some unless told not to
            forbid = tuple(dict.fromkeys((*requested.advanced.forbid, "survivor")))
            self.requested, self._fixed = (f.with_advanced(forbid=forbid) for f in (requested, self._fixed))
        self._lock = threading.Lock()
        self._recent: deque[Exchange] = deque(maxlen=_RECENT)
        self._tell_owner: Callable[[set[str]], None] = lambda fallen: None

    @property
    def _auditor(self) -> Auditor:
        return auditor_of(self._engine)

    @cached_property
    def _evidence(self) -> EvidenceFile:
        return self._auditor.evidence_of(self._engine, self.requested.advanced.reference)

    def in_force(self) -> tuple[str | None, Fidelity]:
        """See `Auditing.in_force`. A promoted strategy serves as it was tried, but for lanes that are forbidden."""
        strategy = self._evidence.promoted(self._forbidden) if self.earns else None
        if strategy is None:
            return super().in_force()
        tried, base = STRATEGIES[strategy].fidelity, self.requested
        forbid = tuple(dict.fromkeys((*tried.advanced.forbid, *self._forbidden)))
        layout = {"layout": tried.advanced.layout, "basis": tried.advanced.basis, "forbid": forbid}
        advanced = base.advanced.model_copy(update=layout)
        changes = {"audit": base.audit, "kl_budget": base.kl_budget, "advanced": advanced}
        return strategy, tried.model_copy(update=changes)

    def branch(self, on_finding: OnFinding) -> Self:
        """Return the audits of a fork, with the same fallbacks and recent questions."""
        branch = super().branch(on_finding)
        branch._recent.extend(self._recent)
        return branch

    def _rate(self, strategy: str, answer: ServedAnswer, choices: Sequence[Choice], form: Kind) -> float:
        """Return the share to audit of the answers of this strategy, shape and kind, by their number; 1 if suspected."""
        sizes = len(choices).bit_length(), len(answer.query).bit_length()
        shape = (frozenset(choice.lane for choice in choices), *sizes, answer.temperature == 0, form)
        kind = self._evidence.record.binding, strategy, self._evidence.since(strategy), shape
        rate = self._auditor.sampler.rate(kind, self._auditor.options.rate)
        return 1.0 if rate and self._evidence.is_suspected(strategy) else rate

    def adopt(self, branch: Self) -> None:
        super().adopt(branch)
        self._recent = branch._recent.copy()
        branch._tell_owner = self._fall_back  # what audits of its answers are still to find

    def _fall_back(self, placements: set[str]) -> None:
        with self._lock:
            fallen = placements - self._exact
            self._exact |= fallen
        if fallen:  # two windows that adopted one another tell each other
            self._tell_owner(fallen)

    def answer_for(self, owner: Self, names: Mapping[str, str]) -> None:
        self._tell_owner = lambda fallen: owner._fall_back({names.get(p, p) for p in fallen})
        with self._lock:
            self._exact |= {placement for placement, name in names.items() if name in owner.exact}
        self._on_finding = lambda fallen, *finding: owner._on_finding([names.get(p, p) for p in fallen], *finding)

    def forget(self) -> None:
        """Drop recent questions, which may be about forgotten content."""
        self._recent.clear()

    def submit(
        self, served: ServedAnswer, layout: Layout, answer: Answer, *, ended: bool, audited: bool = True
    ) -> None:
        """Submit an answer to the auditor if it is due; ``ended``: the model ended it by itself."""
        strategy, fidelity = served.strategy, served.fidelity
        query, greedy = served.query, served.temperature == 0
        self.due = None
        if not audited or not (self.earns or fidelity.audit) or not query or not layout.choices:
            return
        exact = all(choice.conditioning.exact for choice in layout.choices)
        if strategy is not None:
            self._evidence.count_answer(strategy)
        rate = fidelity.audit
        form: Kind = "scored" if greedy and value_of(answer.text, complete=ended) is not None else "text"
        if self.earns:
            self._evidence.count_kind(form)
        if strategy is not None and not exact:
            rate = max(rate, self._rate(strategy, served, layout.choices, form))
        is_audited = self._auditor.sampler.draw(rate)
        is_trial_candidate = self.earns and strategy is None and exact and greedy
        exchange = Exchange(query, tuple(int(i) for i in answer.token_ids), ended, served.max_tokens, greedy)
        recent = tuple(reversed(self._recent))
        if greedy:
            self._recent.append(exchange)
        if not is_audited and not is_trial_candidate:
            return
        self.due = answer if is_audited else None
        computed = [choice for choice in layout.choices if choice.compute] if is_trial_candidate else []

        def done(finding: Finding) -> None:
            amend(answer, audit=finding.strict.kl)
            above_budget = fidelity.kl_budget is not None and finding.strict.kl > fidelity.kl_budget
            harmful = above_budget or (strategy is not None and finding.harm.share >= 1)
            fallbacks = finding.concerned if harmful else ()
            self._fall_back(set(fallbacks))
            self._on_finding(fallbacks, query, finding.divergences(), str(finding))

        self._auditor.offer(
            Job(
                **vars(replace(served, memos=served.memos.copy())),
                engine=self._engine,
                keys=tuple(keys_of(layout)),
                exchange=exchange,
                recent=recent,
                computed=answer.usage.computed_tokens,
                repeated=self._auditor.count_repeated(self._engine.tenant, computed),
                is_trial_candidate=is_trial_candidate,
                is_audited=is_audited,
                done=done,
                evidence=self._evidence if self.earns else None,
                forgettings=self._engine.repo.forgettings,
            )
        )


def attach_audits(engine: Engine) -> None:
    """Have the answers of windows that are opened on ``engine`` from now on audited, as `open_engine` does."""
    engine.auditing = WindowAudit
