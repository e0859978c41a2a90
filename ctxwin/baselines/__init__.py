"""Baselines for the same asks: users of a prefix cache, and an exact re-prefill.

`PrefixCache` counts one prompt as vLLM would, `PrefixUser` keeps the chunks in the prompt, `Ledger` counts a window beside three
such users, and `Reference` answers by an exact re-prefill or by blind reuse.
"""

from ctxwin.baselines.ledger import Ledger
from ctxwin.baselines.policies import NAMES, POLICIES, PrefixUser
from ctxwin.baselines.prefix_cache import PrefixCache, Prompt
from ctxwin.baselines.reprefill import Reference

__all__ = ["NAMES", "POLICIES", "Ledger", "PrefixCache", "PrefixUser", "Prompt", "Reference"]
