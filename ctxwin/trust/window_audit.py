"""`WindowAudit`: a window's side of its audits: the fidelity in force, and the chunks that fell back to exact."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import KV_ONLY, Fidelity, Lane
from ctxwin.profiles import find_profile, resolve, with_overrides
from ctxwin.trust.auditor import Auditor, Job, auditor_of, enabled, forgets
from ctxwin.trust.evidence import STRATEGIES, Ledger
from ctxwin.trust.replay import Exchange, Finding, keys_of

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Answer
    from ctxwin.window.lanes import ServedMemo
    from ctxwin.window.layout import Layout
    from ctxwin.window.state import State

_RECENT = 8


@dataclass(frozen=True)
class ServedAnswer:
    """An answer's question, layout and fidelity.

    Attributes:
        window, parent: ids.
        state, state_after: the window's state at the question, and after new KV was written back to it.
        layout: the layout that served it.
        strategy: the promoted strategy that served it.
        fidelity: the fidelity in force.
        max_tokens, temperature: of the answer.
        memos: how chunks were served before (`Assembly.memo`).
    """

    window: str
    parent: str | None
    state: State
    state_after: State
    layout: Layout
    strategy: str | None
    fidelity: Fidelity
    query: str
    max_tokens: int
    temperature: float
    memos: OrderedDict[str, ServedMemo]


class WindowAudit:
    """Audits of one window.

    Args:
        engine: of the window.
        requested: the fidelity it was opened with; ``auto`` without a profile earns its lanes.
        on_finding: called in the auditor's thread with the finding of an audit, the ids that fall back, and the question.

    Attributes:
        earns: the window's fidelity follows the evidence.
        due: the last answer, if it is going to be audited.
    """

    def __init__(
        self,
        engine: Engine,
        requested: Fidelity,
        on_finding: Callable[[Finding, Sequence[str], str], None] = lambda *_: None,
    ) -> None:
        self._engine, self._requested, self._on_finding = engine, requested, on_finding
        self._fixed = resolve(requested, engine.spec.model)
        self._recurrent = engine.spec.kv.recurrent
        always_exact = self._recurrent and not engine.spec.kv.maps
        if self._recurrent and requested.mode == "auto":
            self._fixed = requested.model_copy(update={"mode": "exact"})
        if always_exact and self._fixed.mode != "exact":
            raise UnsupportedModel(
                f"{engine.spec.model} has recurrent layers, whose states depend on the entire prefix: mode must be 'exact' "
                f"or 'auto', got {requested.mode!r}; open it with position_free=True for others"
            )
        profiled = find_profile(engine.spec.model) is not None
        if self._fixed.eliminate and self._fixed.merge is not None and not engine.drops_tokens:
            raise UnsupportedModel(
                f"eliminate must be False on the {engine.spec.name} engine with {engine.spec.model}, which keeps every token "
                "that it has computed, got True; omit it, or open the model as hf:MODEL"
            )
        self.earns = requested.mode == "auto" and enabled() and not always_exact and (self._recurrent or not profiled)
        self.due: Answer | None = None
        self._exact: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._recent: deque[Exchange] = deque(maxlen=_RECENT)
        self._cached_ledger: Ledger | None = None

    @property
    def _auditor(self) -> Auditor:
        return auditor_of(self._engine)

    @property
    def _ledger(self) -> Ledger:
        if self._cached_ledger is None:
            self._cached_ledger = self._auditor.ledger(self._engine, self._requested.reference)
        return self._cached_ledger

    @property
    def strategy(self) -> str | None:
        """The promoted strategy that serves the window; None if it is exact, or if its fidelity was chosen."""
        name = self._ledger.promoted() if self.earns else None
        return None if name is None or STRATEGIES[name].lane in self._forbidden else name

    @property
    def fidelity(self) -> Fidelity:
        """The fidelity in force."""
        return self._fidelity_of(self.strategy)

    @property
    def _forbidden(self) -> tuple[Lane, ...]:
        allowed = ("patched",) if self._engine.spec.state_patches else ()
        return (*self._requested.forbid, *(lane for lane in KV_ONLY if self._recurrent and lane not in allowed))

    def _fidelity_of(self, strategy: str | None) -> Fidelity:
        if strategy is None:
            return self._fixed.model_copy(update={"forbid": self._forbidden}) if self._recurrent else self._fixed
        fidelity = STRATEGIES[strategy].fidelity
        forbid = tuple(dict.fromkeys((*fidelity.forbid, *self._forbidden)))
        return with_overrides(fidelity, self._requested).model_copy(update={"forbid": forbid})

    def in_force(self) -> tuple[str | None, Fidelity]:
        """Return the strategy and the fidelity in force, for one answer."""
        strategy = self.strategy
        return strategy, self._fidelity_of(strategy)

    @property
    def exact(self) -> frozenset[str]:
        """Placement ids that fell back to exact."""
        return self._exact

    def with_fallbacks(self, state: State) -> State:
        """Return ``state`` with ``exact_only`` set on the chunks that fell back to exact."""
        exact = self._exact
        if not any(p.id in exact and not p.exact_only for p in state.placed):
            return state
        return state.replace(placed=tuple(p.replace(exact_only=True) if p.id in exact else p for p in state.placed))

    def branch(self, on_finding: Callable[[Finding, Sequence[str], str], None]) -> WindowAudit:
        """Return the audits of a fork, with the same fallbacks and recent questions."""
        branch = WindowAudit(self._engine, self._requested, on_finding)
        branch._exact, branch._recent = self._exact, deque(self._recent, maxlen=_RECENT)
        return branch

    def _rate(self, strategy: str, record: ServedAnswer) -> float:
        """Return the share of such answers to audit: by the number of answers of this strategy and shape; 1 if suspected."""
        lanes = frozenset(choice.lane for choice in record.layout.choices)
        shape = lanes, len(record.layout.choices).bit_length(), len(record.query).bit_length(), record.temperature == 0
        kind = self._ledger.record.binding, strategy, self._ledger.since(strategy), shape
        rate = self._auditor.sampler.rate(kind, self._auditor.options.rate)
        return 1.0 if rate and self._ledger.is_suspected(strategy) else rate

    def forget(self) -> None:
        """Drop recent questions, which may be about forgotten content."""
        self._recent.clear()

    def submit(self, record: ServedAnswer, answer: Answer, *, ended: bool, audited: bool = True) -> None:
        """Submit an answer to the auditor if it is due; ``ended``: the model ended it by itself."""
        strategy, fidelity, layout = record.strategy, record.fidelity, record.layout
        options = self._auditor.options if self.earns or fidelity.audit else None
        query, greedy = record.query, record.temperature == 0
        self.due = None
        if not audited or options is None or not query or not layout.choices:
            return
        exact = all(choice.conditioning.exact for choice in layout.choices)
        if strategy is not None:
            self._ledger.count_answer(strategy)
        rate = fidelity.audit
        if strategy is not None and not exact:
            rate = max(rate, self._rate(strategy, record))
        auditing = self._auditor.sampler.draw(rate)
        trying = self.earns and strategy is None and exact and greedy
        exchange = Exchange(query, tuple(int(i) for i in answer.token_ids), ended, record.max_tokens)
        recent = tuple(reversed(self._recent))
        if greedy:
            self._recent.append(exchange)
        if not auditing and not trying:
            return
        self.due = answer if auditing else None
        from ctxwin.window.answer import fill_audit

        def done(finding: Finding) -> None:
            fill_audit(answer, finding.strict.kl)
            above_budget = finding.strict.kl > fidelity.kl_budget if fidelity.kl_budget is not None else False
            fallbacks: tuple[str, ...] = ()
            if above_budget or (strategy is not None and finding.strict.changed):
                fallbacks = finding.concerned
                with self._lock:
                    self._exact |= set(fallbacks)
            self._on_finding(finding, fallbacks, query)

        self._auditor.offer(
            Job(
                engine=self._engine,
                window=record.window,
                parent=record.parent,
                state=record.state,
                state_after=record.state_after,
                memos=record.memos.copy(),
                fidelity=fidelity,
                strategy=strategy,
                keys=tuple(keys_of(layout)),
                exchange=exchange,
                recent=recent,
                computed=answer.usage.computed_tokens,
                trying=trying,
                auditing=auditing,
                done=done,
                ledger=self._ledger if self.earns else None,
                forgets=forgets(self._engine),
            )
        )
