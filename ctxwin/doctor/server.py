"""The checks of ``ctxwin doctor URL``: a running server, seen from a client's side."""

import http.client
import json
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from ctxwin import __version__
from ctxwin.doctor.checks import Finding, Status

_ABOUT, _READY = "/v1/ctxwin/about", "/ready"
_TIMEOUT_S, _MAX_BYTES = 30.0, 1 << 20  # of one answer, as any server may answer


def examine(url: str, key: str = "") -> list[Finding]:
    """Check a running server. Sends four requests, none of which costs a forward.

    Raises ValueError for an address that is not HTTP's, or a key that no header can have.
    """
    if not ((key := key.strip()).isascii() and key.isprintable()):
        raise ValueError("the server's key (CTXWIN_API_KEY) must be printable ASCII, as a header has it")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a server's address must begin with http:// or https://, got {url!r}")
    url = url.rstrip("/").removesuffix("/v1")
    status, text = _get(url + "/health")
    remedy = "start the server, or mend the address"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = f"trust its certificate: SSL_CERT_FILE=FILE ctxwin doctor {url}"
    elif url.startswith("http:") and not status and _speaks_tls(url):
        remedy = f"ask over TLS: ctxwin doctor https{url.removeprefix('http')}"
    findings = [_finding("health", status == 200, f"{url}/health: {text or status}", remedy)]
    if status != 200:
        return findings
    status, text = _get(url + _READY)
    if status == 404:
        remedy = "VLLM_PLUGINS=ctxwin vllm serve ..., or ctxwin serve ..."
        return [*findings, Finding("ctxwin", "broken", "an OpenAI server without ctxwin", remedy)]
    findings.append(_finding("ready", status == 200, text, "it takes nothing new: ask another one"))
    closed = _get(url + _ABOUT)[0] == 401
    status, text = _get(url + _ABOUT, key)
    if status != 200:
        remedy = "set CTXWIN_API_KEY to a key of this server" if status in (401, 403) else "see the server's log"
        return [*findings, Finding("key", "broken", text or str(status), remedy)]
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        if (about := json.loads(text))["object"] == "ctxwin.about":
            return [*findings, *_about_findings(about, closed)]
    return [Finding("ctxwin", "broken", f"{url} is not a ctxwin server of this version", "mend the address")]


def _about_findings(about: dict[str, Any], closed: bool) -> list[Finding]:
    store, promoted, metrics = about["store"], about["promoted"], about["metrics_open"]
    lanes = f"{about['fidelity']}: {', '.join(about['lanes'])}"
    lanes += f"; promoted: {', '.join(promoted)}" if promoted else ""
    usage = f"{store['items']} values, {store['bytes']} bytes of {store['limit'] or 'no limit'}"
    whose = about["tenant"] or "the server's own"
    tenants = f"on; this key is {whose}" if about["tenants"] else "off: clients share all"
    model = f"{', '.join(about['models'])}, {about['max_tokens']} tokens{', sees' * about['vision']}"
    version = f"ctxwin {about['version']} on {about['vllm'] or about['engine']}"
    untried = "audits promote lanes while it serves, or measure with `ctxwin eval probe`"
    refused = "401 without a key" if closed else "nothing: whoever reaches the port is served"
    same = f"this is {__version__}: use one on both sides"
    return [
        _finding("version", about["version"] == __version__, version, same, "note"),
        Finding("model", "ok", model),
        _finding("lanes", about["fidelity"] != "exact" or bool(promoted), lanes, untried, "note"),
        _finding("store", not store["fault"], store["fault"] or usage, "all is computed anew: see --store and the log"),
        Finding("windows", "ok", f"behind plain chats: {about['windows'] or 'never'}"),
        _finding("tenants", about["tenants"], tenants, "give --tenants FILE to keep clients apart", "note"),
        _finding("refused", closed, refused, "give --api-key or --tenants", "note"),
        _finding("metrics", not metrics, f"open: {metrics}", "give --metrics-key-file", "note"),
    ]


def _speaks_tls(url: str) -> bool:
    """Return whether a server that does not answer over plain HTTP does over TLS, whatever its certificate."""
    status, text = _get("https" + url.removeprefix("http") + "/health")
    return bool(status) or "CERTIFICATE" in text


def _finding(name: str, good: bool, what: str, remedy: str, otherwise: Status = "broken") -> Finding:
    return Finding(name, "ok", what) if good else Finding(name, otherwise, what, remedy)


def _get(url: str, key: str = "") -> tuple[int, str]:
    """Return the status and the text of an answer; 0 and the reason if there is none."""
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # nosec B310: `examine` takes http(s) only
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return int(answer.status), answer.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or type(error).__name__
