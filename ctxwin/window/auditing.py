"""`Auditing`: the fidelity in force in a window; audits of its answers extend it, see `ctxwin.audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ctxwin.engines.sampling import Sampling, sampling_under
from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import KV_ONLY, Fidelity, Lane
from ctxwin.profiles import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Answer
    from ctxwin.window.layout import Layout
    from ctxwin.window.protocols import OnFinding, ServedAnswer
    from ctxwin.window.state import State


class Auditing:
    """Audits of one window: the fidelity in force, and the chunks that fell back to exact.

    This one audits nothing: ``auto`` is the model's profile, and exact without one. `Engine.auditing` opens
    `ctxwin.audit.WindowAudit` instead, on engines of `open_engine`.

    Args:
        engine: of the window.
        requested: the fidelity it was opened with.
        on_finding: see `OnFinding`.

    Raises:
        UnsupportedModel: a fidelity that the model or the engine cannot serve.
        ValueError: one that audits cannot follow.

    Attributes:
        requested: see above.
        due: the last answer, if it is going to be audited.
    """

    def __init__(self, engine: Engine, requested: Fidelity, on_finding: OnFinding = lambda *_: None) -> None:
        self._engine, self.requested, self._on_finding = engine, requested, on_finding
        self._fixed = resolve(requested, engine.spec.model)
        self._recurrent = engine.spec.kv.recurrent
        self._always_exact = self._recurrent and not engine.spec.kv.maps
        if self._recurrent and requested.mode == "auto":
            self._fixed = requested.model_copy(update={"mode": "exact"})
        if self._always_exact and self._fixed.mode != "exact":
            raise UnsupportedModel(
                f"{engine.spec.model} has recurrent layers, whose states depend on the entire prefix: mode must be 'exact' "
                f"or 'auto', got {requested.mode!r}; open it with position_free=True for others"
            )
        if self._fixed.audit and self._fixed.merges_prompt:
            raise ValueError(f"audit must be 0 with merge_prompt, which audits do not replay, got {self._fixed.audit}")
        engine.check_hold(sampling_under(self._fixed, Sampling(), merged=True))
        self.due: Answer | None = None
        self._exact: frozenset[str] = frozenset()

    @property
    def fidelity(self) -> Fidelity:
        """The fidelity in force."""
        return self.in_force()[1]

    def in_force(self) -> tuple[str | None, Fidelity]:
        """Return the promoted strategy, None where none serves, and the fidelity in force, for one answer."""
        return None, self._fixed.with_advanced(forbid=self._forbidden) if self._recurrent else self._fixed

    @property
    def _forbidden(self) -> tuple[Lane, ...]:
        allowed = ("patched",) if self._engine.spec.state_patches else ()
        refused = (lane for lane in KV_ONLY if self._recurrent and lane not in allowed)
        return (*self.requested.advanced.forbid, *refused)

    @property
    def exact(self) -> frozenset[str]:
        """Placement ids that fell back to exact."""
        return self._exact

    def with_fallbacks(self, state: State) -> State:
        """Return ``state`` with ``exact_only`` set on the placed and evicted chunks that fell back to exact."""
        changes = {}
        for name, chunks in (("placed", state.placed), ("evicted", state.evicted)):
            if unmarked := {p.id for p in chunks.having(self._exact) if not p.exact_only}:
                changes[name] = chunks.changed(unmarked, exact_only=True)
        return state.replace(**changes) if changes else state

    def branch(self, on_finding: OnFinding) -> Self:
        """Return the audits of a fork, with the same fallbacks."""
        branch = type(self)(self._engine, self.requested, on_finding)
        branch._exact = self._exact
        return branch

    def adopt(self, branch: Self) -> None:
        """Add the fallbacks of a branch whose state is adopted."""
        self._exact |= branch.exact

    def answer_for(self, owner: Self, names: Mapping[str, str]) -> None:
        """Report findings and fallbacks to ``owner``, and take on its own; ``names``: its placement ids, by this window's."""

    def forget(self) -> None:
        """Drop what may be about forgotten content."""

    def submit(
        self, served: ServedAnswer, layout: Layout, answer: Answer, *, ended: bool, audited: bool = True
    ) -> None:
        """Take an answer that may be audited, and the layout that served it; ``ended``: the model ended it by itself."""


def open_audits(engine: Engine, requested: Fidelity, on_finding: OnFinding) -> Auditing:
    """Return the audits of a window. Raises ValueError if audits are requested of an engine that has none."""
    audits: Auditing = (engine.auditing or Auditing)(engine, requested, on_finding)
    if engine.auditing is None and audits.fidelity.audit:
        raise ValueError(
            f"audit must be 0 on an engine without audits, got {audits.fidelity.audit}; open it with open_engine, or pass "
            "it to ctxwin.audit.attach_audits first"
        )
    return audits
