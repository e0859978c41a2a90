"""`WindowTrust`: a window's side of its audits: what it may be served with now, and what fell back to exact."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import KV_ONLY, Fidelity, Lane
from ctxwin.profiles import find_profile, overriding, resolve
from ctxwin.trust.auditor import Auditor, Job, auditor_of, enabled, forgets
from ctxwin.trust.evidence import WAYS, Ledger
from ctxwin.trust.replay import Exchange, Finding, keys_of

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Answer
    from ctxwin.window.assembly import Laid
    from ctxwin.window.lanes import Before
    from ctxwin.window.state import State

_RECENT = 8


@dataclass(frozen=True)
class Served:
    """How an answer came about.

    Attributes:
        window, parent: ids.
        before, after: the state when it was asked, and with what was learnt of each chunk's KV.
        way: the promoted way it was served by; fidelity: in force.
        earlier: how chunks were served before (`Assembly.before`).
        max_tokens, temperature: of the answer.
    """

    window: str
    parent: str | None
    before: State
    after: State
    laid: Laid
    way: str | None
    fidelity: Fidelity
    query: str
    max_tokens: int
    temperature: float
    earlier: OrderedDict[str, Before]


class WindowTrust:
    """Of one window.

    Args:
        engine: of the window.
        asked: the fidelity it was opened with; ``auto`` without a profile earns its lanes.
        told: called in the auditor's thread with what an audit found, the ids that fall back, and the question.

    Attributes:
        earns: whether the window's fidelity follows the evidence.
        due: the last answer, where it is going to be audited.
    """

    def __init__(
        self, engine: Engine, asked: Fidelity, told: Callable[[Finding, Sequence[str], str], None] = lambda *_: None
    ) -> None:
        self._engine, self._asked, self._told = engine, asked, told
        self._fixed = resolve(asked, engine.spec.model)
        self._recurrent = engine.spec.kv.recurrent
        stays = self._recurrent and not engine.spec.kv.maps
        if self._recurrent and asked.mode == "auto":
            self._fixed = asked.model_copy(update={"mode": "exact"})
        if stays and self._fixed.mode != "exact":
            raise UnsupportedModel(
                f"{engine.spec.model} has recurrent layers, whose states are of all that stood in front: mode must be 'exact' "
                f"or 'auto', got {asked.mode!r}; open it with position_free=True for others"
            )
        profiled = find_profile(engine.spec.model) is not None
        self.earns = asked.mode == "auto" and enabled() and not stays and (self._recurrent or not profiled)
        self.due: Answer | None = None
        self._exact: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._recent: deque[Exchange] = deque(maxlen=_RECENT)
        self._found: Ledger | None = None

    @property
    def _auditor(self) -> Auditor:
        return auditor_of(self._engine)

    @property
    def _ledger(self) -> Ledger:
        if self._found is None:
            self._found = self._auditor.ledger(self._engine, self._asked.reference)
        return self._found

    @property
    def way(self) -> str | None:
        """The promoted way that the window is served by; None where it is exact, or its fidelity was chosen."""
        name = self._ledger.promoted() if self.earns else None
        return None if name is None or WAYS[name].lane in self._forbidden else name

    @property
    def fidelity(self) -> Fidelity:
        """The one in force."""
        return self._of(self.way)

    @property
    def _forbidden(self) -> tuple[Lane, ...]:
        kept = ("patched",) if self._engine.spec.state_patches else ()
        return (*self._asked.forbid, *(lane for lane in KV_ONLY if self._recurrent and lane not in kept))

    def _of(self, way: str | None) -> Fidelity:
        if way is None:
            return self._fixed.model_copy(update={"forbid": self._forbidden}) if self._recurrent else self._fixed
        known = WAYS[way].fidelity
        forbid = tuple(dict.fromkeys((*known.forbid, *self._forbidden)))
        return overriding(known, self._asked).model_copy(update={"forbid": forbid})

    def in_force(self) -> tuple[str | None, Fidelity]:
        """Way and fidelity, for one answer."""
        way = self.way
        return way, self._of(way)

    @property
    def exact(self) -> frozenset[str]:
        """Placement ids that fell back to exact."""
        return self._exact

    def marked(self, state: State) -> State:
        """``state`` with what fell back to exact marked so."""
        exact = self._exact
        if not any(p.id in exact and not p.exact_only for p in state.placed):
            return state
        return state.replace(placed=tuple(p.replace(exact_only=True) if p.id in exact else p for p in state.placed))

    def branch(self, told: Callable[[Finding, Sequence[str], str], None]) -> WindowTrust:
        """For a fork: what fell back and what was asked lately stay."""
        made = WindowTrust(self._engine, self._asked, told)
        made._exact, made._recent = self._exact, deque(self._recent, maxlen=_RECENT)
        return made

    def forget(self) -> None:
        """Content was forgotten: what was asked lately may be about it."""
        self._recent.clear()

    def answered(self, served: Served, answer: Answer, *, ended: bool, audited: bool = True) -> None:
        """Hands an answer over to the auditor where it is due; ``ended``: its end was the model's own."""
        way, fidelity, laid = served.way, served.fidelity, served.laid
        options = self._auditor.options if self.earns or fidelity.audit else None
        query, greedy = served.query, served.temperature == 0
        self.due = None
        if not audited or options is None or not query or not laid.choices:
            return
        exact = all(choice.served.exact for choice in laid.choices)
        if way is not None:
            self._ledger.answered(way)
        rate = fidelity.audit
        if way is not None and not exact:
            rate = max(rate, 1.0 if options.rate and self._ledger.suspected(way) else options.rate)
        auditing = self._auditor.due(self._engine.tenant, rate)
        trying = self.earns and way is None and exact and greedy
        exchange = Exchange(query, tuple(int(i) for i in answer.token_ids), ended, served.max_tokens)
        recent = tuple(reversed(self._recent))
        if greedy:
            self._recent.append(exchange)
        if not auditing and not trying:
            return
        self.due = answer if auditing else None
        from ctxwin.window.answer import fill_audit

        def done(found: Finding) -> None:
            fill_audit(answer, found.strict.kl)
            above = found.strict.kl > fidelity.kl_budget if fidelity.kl_budget is not None else False
            fallen: tuple[str, ...] = ()
            if above or (way is not None and found.strict.changed):
                fallen = found.concerned
                with self._lock:
                    self._exact |= set(fallen)
            self._told(found, fallen, query)

        self._auditor.offer(
            Job(
                engine=self._engine,
                window=served.window,
                parent=served.parent,
                before=served.before,
                after=served.after,
                earlier=served.earlier.copy(),
                fidelity=fidelity,
                way=way,
                keys=tuple(keys_of(laid)),
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
