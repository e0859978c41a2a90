"""Trust that is earned while serving: audits of real answers, the evidence they leave, and the lanes it admits.

A window of `Fidelity("auto")` on a model without a profile is exact at first. While the engine is idle its answers are replayed
through the ways that would have saved work, and what a way changes is counted (`auditor`, `replay`). A way whose share of
changed answers is shown to be under a budget, by a bound that holds however often one looks (`confidence`), is promoted for
this model, engine, precision and tenant (`evidence`); it goes on being audited, and is given up when it does harm.
"""

from ctxwin.trust.auditor import Auditor, Options, auditor_of
from ctxwin.trust.evidence import Decision, Evidence, Record, records

__all__ = ["Auditor", "Decision", "Evidence", "Options", "Record", "auditor_of", "records"]
