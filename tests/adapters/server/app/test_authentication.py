"""Who is let in: with a key to everything, without one, once there is any, to next to nothing."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin_client import RemoteWindow
from ctxwin_server.app.tenants import Tenant


def test_one_key_without_tenants_serves_its_owner() -> None:
    with serving(api_keys=["only"]) as server:
        assert call(server, "/v1/windows", {})[0] == 401
        with RemoteWindow(server.client("only"), "h") as window:
            assert window.tokens > 0
        body = {"messages": [], "kv_transfer_params": {"own": 1}}
        assert call(server, "/v1/chat/completions", body, authorization="Bearer only")[0] == 200
        assert server.passed == [body]


def status(server: Server, method: str, path: str, **headers: str) -> int:
    request = urllib.request.Request(server.url + path, b"{}" if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("tenants", [[], [Tenant(name="acme", keys=["key-a"])]])
def test_once_there_is_a_key_a_key_is_needed_everywhere(tenants: list[Tenant]) -> None:
    """vLLM guards ``/v1`` alone: ``/invocations`` and ``/tokenize`` took anybody's requests."""
    with serving(api_keys=["only"], tenants=tenants) as server:
        for path in ("/invocations", "/tokenize", "/v1/chat/completions", "/v1/chunks", "/v1/windows", "/health", "/x"):
            assert status(server, "POST", path) == 401, path
        for path in ("/v1/windows/x", "/docs", "/openapi.json", "/load", "/v1/models", "/metricsx", "/health/x", "/"):
            assert status(server, "GET", path) == 401, path
        assert status(server, "GET", "/metrics") == 200
        assert status(server, "GET", "/health") == 200
        assert not server.passed
        assert call(server, "/tokenize", {"messages": []}, authorization="Bearer only")[0] == 200


def test_metrics_need_a_key_by_option() -> None:
    with serving(api_keys=["only"], private_metrics=True) as server:
        assert status(server, "GET", "/metrics") == 401
        assert status(server, "GET", "/metrics/x") == 401
        assert status(server, "GET", "/metrics", authorization="Bearer only") == 200
    with serving(private_metrics=True) as server:
        assert status(server, "GET", "/metrics") == 200


PREFLIGHT = {"origin": "https://a.example", "access-control-request-method": "POST"}


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/windows", "/health", "/invocations", "/x"])
def test_options_need_a_key_as_any_other_method(path: str) -> None:
    """`/metrics` is an app of its own, which answered whatever the method was."""
    with serving(api_keys=["only"]) as server:
        assert status(server, "OPTIONS", path) == 401
        assert status(server, "OPTIONS", path, **PREFLIGHT) == 401  # where nothing answers preflights
        assert status(server, "OPTIONS", path, authorization="Bearer only") != 401
    with serving(tenants=[Tenant(name="acme", keys=["key-a"])]) as server:
        assert status(server, "OPTIONS", path) == 401
        assert status(server, "OPTIONS", path, authorization="Bearer key-a") in (403, 405)


def test_a_preflight_needs_no_key_where_other_sites_pages_are_served() -> None:
    with serving(api_keys=["only"], cors=[]) as server:
        assert status(server, "OPTIONS", "/metrics", **PREFLIGHT) == 401
    with serving(api_keys=["only"], cors=["https://a.example"]) as server:
        for path in ("/v1/chat/completions", "/metrics"):
            request = urllib.request.Request(server.url + path, None, PREFLIGHT, method="OPTIONS")
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.headers["access-control-allow-origin"]
                assert answer.read() == b"OK"
            for name in PREFLIGHT:  # half a preflight is none
                assert status(server, "OPTIONS", path, **{name: PREFLIGHT[name]}) == 401
            assert status(server, "OPTIONS", path) == 401
