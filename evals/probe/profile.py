"""From a probe's result to the profile that windows follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxwin.fidelity import Fidelity
from ctxwin.profiles import Profile, model_digest


def as_profile(result: Mapping[str, Any], model: str) -> Profile:
    """The profile of a probe's result; the figures that its verdict rests on, not all of them.

    Args:
        result: of `ctxwin.evals.probe.probe.Probe.run`.
        model: folder or Hub name of the model.
    """
    verdict = result["verdict"]
    arms = result["arms"].get(verdict["evidence"], {})
    survivors = result.get("survivors", [])
    measured = {
        "source": result["source"],
        "engine": result["engine"],
        "limits": verdict["limits"],
        "reasons": verdict["reasons"],
        "blind": _brief(arms.get("blind")),
        "noise": _brief(arms.get("stepwise")),
        "settings": [{k: s[k] for k in ("rank", "layers", "share", "safe")} for s in result.get("proving", [])],
        "served": result["served"],
        "functional_rank": result.get("functional_rank", {}),
        "survivors_by_slides": {str(s["slides"]): s["other_than_both"] for s in survivors},
    }
    asked = arms.get("blind") or {}
    return Profile(
        weights=model_digest(model),
        model=model.rstrip("/").rpartition("/")[2] or model,
        verdict=verdict["sentence"],
        finding=verdict["finding"],
        fidelity=Fidelity(**result["fidelity"]),
        measured=measured,
        n=int(asked.get("n", 0)),
        date=result["date"],
        ctxwin=result["ctxwin"],
    )


def _brief(figures: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a reader of a profile needs of an arm's figures."""
    keep = ("n", "clusters", "flips", "flips_ci95", "kl", "kl_ci95", "right")
    return None if figures is None else {k: figures[k] for k in keep}
