"""Trust earned while serving: audits of real answers, the evidence they produce, and the lanes it admits.

A window of `Fidelity("auto")` on a model without a profile is exact at first. While the engine is idle its answers are replayed
with the strategies that would have saved work, and what they lose beyond the differences of exact answers is measured
(`auditor`, `replay`, `harm`). A strategy whose mean loss over windows is shown to be below a budget, by an anytime-valid bound
(`confidence`), is promoted for this model, engine, precision and tenant (`evidence`); audits of it continue, and it is demoted
when it does harm. `open_engine` hands all this to its engines (`attach_audits`); `ctxwin.window` knows only the contract,
`ctxwin.window.auditing.Auditing`.
"""

from ctxwin.audit.auditor import Auditor, auditor_of
from ctxwin.audit.options import Options
from ctxwin.audit.record import Decision, Evidence, Record, records
from ctxwin.audit.window_audit import attach_audits

__all__ = ["Auditor", "Decision", "Evidence", "Options", "Record", "attach_audits", "auditor_of", "records"]
