"""The checks of ``ctxwin doctor URL``: a running server, seen from a client's side."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from ctxwin import __version__
from ctxwin.doctor.checks import Finding, Status
from ctxwin.serve.endpoints import ABOUT, READY

_TIMEOUT_S = 30.0
_MOST = 1 << 20
"""Bytes of one answer that are read, whatever answers there."""


def examine(url: str, key: str = "") -> list[Finding]:
    """What a server answers, and what is wrong with that. Sends four requests, none of which costs a forward.

    Raises ValueError for an address that is not HTTP's.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a server's address must begin with http:// or https://, got {url!r}")
    url = url.rstrip("/").removesuffix("/v1")
    status, said = _get(url + "/health")
    found = [
        _judged("health", status == 200, f"{url}/health: {said or status}", "start the server, or mend the address")
    ]
    if status != 200:
        return found
    status, said = _get(url + READY)
    if status == 404:
        remedy = "VLLM_PLUGINS=ctxwin vllm serve ..., or ctxwin serve ..."
        return [*found, Finding("ctxwin", "broken", "an OpenAI server without ctxwin", remedy)]
    found.append(_judged("ready", status == 200, said, "it takes nothing new: ask another one"))
    closed = _get(url + ABOUT)[0] == 401
    status, said = _get(url + ABOUT, key)
    if status != 200:
        remedy = "set CTXWIN_API_KEY to a key of this server" if status in (401, 403) else "see the server's log"
        return [*found, Finding("key", "broken", said or str(status), remedy)]
    return [*found, *_told(json.loads(said), closed)]


def _told(about: dict[str, Any], closed: bool) -> list[Finding]:
    store, proven = about["store"], about["promoted"]
    lanes = f"{about['fidelity']}: {', '.join(about['lanes'])}" + (f"; promoted: {', '.join(proven)}" if proven else "")
    held = f"{store['items']} values, {store['bytes']} bytes of {store['limit'] or 'no limit'}"
    tenants = (
        "on; this key is " + (about["tenant"] or "the server's own") if about["tenants"] else "off: clients share all"
    )
    model = f"{', '.join(about['models'])}, {about['max_tokens']} tokens{', sees' * about['vision']}"
    version = f"ctxwin {about['version']} on {about['vllm'] or about['engine']}"
    untried = "audits promote lanes while it serves, or measure with `ctxwin eval probe`"
    refused = "401 without a key" if closed else "nothing: whoever reaches the port is served"
    return [
        _judged(
            "version", about["version"] == __version__, version, f"this is {__version__}: use one on both sides", "note"
        ),
        Finding("model", "ok", model),
        _judged("lanes", about["fidelity"] != "exact" or bool(proven), lanes, untried, "note"),
        _judged(
            "store",
            not store["fault"],
            store["fault"] or held,
            "all is computed again meanwhile: see --store and the log",
        ),
        Finding("windows", "ok", f"behind plain chats: {about['windows'] or 'never'}"),
        _judged("tenants", about["tenants"], tenants, "give --tenants FILE to keep clients apart", "note"),
        _judged("refused", closed, refused, "give --api-key or --tenants", "note"),
        _judged(
            "metrics", not about["metrics_open"], f"open: {about['metrics_open']}", "give --metrics-key-file", "note"
        ),
    ]


def _judged(name: str, good: bool, what: str, remedy: str, otherwise: Status = "broken") -> Finding:
    return Finding(name, "ok", what) if good else Finding(name, otherwise, what, remedy)


def _get(url: str, key: str = "") -> tuple[int, str]:
    """The status and the text of an answer; 0 and the reason where there is none."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # nosec B310: `examine` takes http(s) only
            return int(answer.status), answer.read(_MOST).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(_MOST).decode(errors="replace")
    except OSError as error:
        return 0, str(error)
