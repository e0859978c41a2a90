"""What whoever runs a server relies on: readiness, draining, quotas, the audit log, the metrics' own key, traces, the doctor."""

from __future__ import annotations

import json
import logging
import socketserver
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import nullcontext, suppress
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from openai import RateLimitError
from typer.testing import CliRunner

from adapters.server.app.test_authentication import status
from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin import Chunk, tracing
from ctxwin.cli.main import app
from ctxwin.doctor.server import examine
from ctxwin.media import png
from ctxwin.store import open_store
from ctxwin_client import LiveStream, RemoteWindow, upload
from ctxwin_client.errors import TooManyRequests
from ctxwin_server.app.accounts import Rate, RunningRequests
from ctxwin_server.app.audit_log import AuditLog
from ctxwin_server.app.info import store_fault
from ctxwin_server.app.settings import Settings
from ctxwin_server.app.tenants import Tenant, load_tenants


def test_a_service_changes_no_setting_of_its_process() -> None:
    """It may be a guest; only a process of the server's own is tuned (`ctxwin_server.vllm.server.own_process`)."""
    before = sys.getswitchinterval()
    with serving() as server:
        assert call(server, "/ready") == (200, {"status": "ready"})
        assert sys.getswitchinterval() == before


def test_a_server_that_drains_finishes_what_runs_and_takes_nothing_new() -> None:
    with serving() as server, RemoteWindow(server.client(), "h") as window:
        assert call(server, "/ready") == (200, {"status": "ready"})
        held = threading.Event()
        begun = threading.Event()

        def slowly(*_: Any) -> Any:
            begun.set()
            assert held.wait(30)

        server.service.tenant_state("").windows.using(window.id)
        answers: list[Any] = []
        generate = server.engines[""].generate
        server.engines[""].generate = lambda *a, **k: (slowly(), generate(*a, **k))[1]  # type: ignore[method-assign]
        asking = threading.Thread(target=lambda: answers.append(window.ask("who?", max_tokens=2)))
        asking.start()
        assert begun.wait(30)
        draining = threading.Thread(target=lambda: server.service.drain(30))
        draining.start()
        while call(server, "/ready")[0] == 200:
            time.sleep(0.01)
        assert call(server, "/ready") == (503, {"status": "draining"})
        code, body = call(server, "/v1/windows", {})
        assert code == 503 and "shutting down" in body["error"]["message"]
        assert draining.is_alive() and not answers
        held.set()
        draining.join(30)
        asking.join(30)
        assert answers[0].usage.prompt_tokens > 0
        server.service.requests.draining = False  # the window's end is a request, too


def test_draining_gives_up_after_its_time() -> None:
    requests = RunningRequests(8)
    with requests.one(""):
        assert requests.drain(0.01) == 1
        with pytest.raises(Exception, match="shutting down"), requests.one(""):
            pass


def test_a_rate_is_paid_back_with_time() -> None:
    now = [0.0]
    rate = Rate(60, "requests", lambda: now[0])
    for _ in range(60):
        rate.take(1)
    with pytest.raises(TooManyRequests, match=r"60 requests a minute .* again in 1 s") as refused:
        rate.take(1)
    assert refused.value.after == 1
    now[0] = 1.0
    rate.take(1)
    rate.charge(60)  # a body that was longer than what was left
    with pytest.raises(TooManyRequests) as refused:
        rate.take(0)
    assert refused.value.after == 60
    now[0] = 61.0
    rate.take(0)


def test_quotas_are_a_tenants_own(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        '[[tenant]]\nname = "acme"\nkeys = ["a"]\nrequests_per_minute = 2\nbytes_per_minute = "1kB"\n'
        '[[tenant]]\nname = "bolt"\nkeys = ["b"]\n'
    )
    with serving(tenants=load_tenants(path)) as server:
        for _ in range(2):
            assert call(server, "/v1/windows", {}, authorization="Bearer a")[0] == 200
        with pytest.raises(RateLimitError, match="2 requests a minute") as refused:
            server.client("a", max_retries=0).post("/windows", body={}, cast_to=object)
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 31
        assert status(server, "GET", "/ready", authorization="Bearer a") == 200
        for _ in range(4):
            assert call(server, "/v1/windows", {}, authorization="Bearer b")[0] == 200


def test_bytes_are_charged_as_they_arrive() -> None:
    tenant = Tenant(name="acme", keys=["a"], bytes_per_minute=1000)
    with serving(tenants=[tenant]) as server:
        body = {"system_prompt": "x" * 2000}
        assert call(server, "/v1/windows", body, authorization="Bearer a")[0] == 200
        code, said = call(server, "/v1/windows", {}, authorization="Bearer a")
        assert code == 429 and "1000 bytes a minute" in said["error"]["message"]


def stand_still(server: Server) -> list[Any]:
    """Return acme's rates, of bytes and of requests, which regain nothing however slow the test is."""
    rates: list[Any] = list(server.service.quotas["acme"])
    for rate in rates:
        rate._at, rate._clock = 0.0, lambda: 0.0
    return rates


def test_a_request_refused_for_bytes_uses_up_none_of_the_requests() -> None:
    tenant = Tenant(name="acme", keys=["a"], requests_per_minute=4, bytes_per_minute=1000)
    with serving(tenants=[tenant]) as server:
        _, requests = stand_still(server)
        assert call(server, "/v1/windows", {"system_prompt": "x" * 1100}, authorization="Bearer a")[0] == 200
        for _ in range(4):
            code, said = call(server, "/v1/windows", {}, authorization="Bearer a")
            assert code == 429 and "1000 bytes a minute" in said["error"]["message"]
        requests.take(3)  # what the one that was taken has left


def test_quotas_hold_for_the_messages_of_a_socket() -> None:
    tenant = Tenant(name="acme", keys=["a"], requests_per_minute=4, bytes_per_minute=2000)
    picture = png(np.zeros((84, 84, 3), np.uint8))
    with serving(tenants=[tenant]) as server, RemoteWindow(server.client("a")) as window:
        size, _ = stand_still(server)
        with LiveStream(server.client("a"), window.id) as live:
            assert live.ask("who?", 2).text and live.ask("who?", 2).text  # besides the window and the handshake
            with pytest.raises(TooManyRequests, match="4 requests a minute"):
                live.ask("who?", 2)
            for _ in range(4):
                live.push(picture + bytes(3000))
            live.settle()
            assert len(live.state.placed) == 1
            assert {type(error) for _, error in live.state.failures} == {TooManyRequests}
            with pytest.raises(TooManyRequests, match="2000 bytes a minute"):
                live.ask("who?", 2)
        assert -4000 < size._left < 0  # the debt of one message
        assert not server.service.body_bytes._held.total()
        server.service.quotas.clear()  # the window's end is a request, too


def test_the_audit_log_says_who_did_what_and_nothing_of_what_it_was(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with serving(tenants=[Tenant(name="acme", keys=["a"])], audit_log=str(log)) as server:
        client = server.client("a")
        secret = Chunk.text("the secret word is heron")
        name = upload(client, secret)
        with RemoteWindow(client, "h") as window:
            placed = window.append(secret)
            window.fork()
            window.evict(placed, forget=True)
            window.snapshot()
            told_before = len(log.read_text().splitlines())
            window.ask("who?", max_tokens=2)  # and an answer that is not remembered leaves nothing
            window.ask("who?", max_tokens=2, remember=True)
            frame = {"type": "push", "chunk": {"type": "text", "text": "heron"}}
            client.post(f"/windows/{window.id}/live", body=frame, cast_to=object)
            with LiveStream(client, window.id) as live:
                live.tell("heron")
                live.push(b"no picture")
                live.ask("who?", 2)
                live.ask("who?", 2, remember=True)
        client.delete(f"/chunks/{name}", cast_to=object)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    content = told[told_before : told_before + 4]
    del told[told_before : told_before + 4]
    assert [(line["action"], line["operation"]) for line in content] == [
        ("store", operation) for operation in ("ask", "push", "push", "ask")
    ]
    assert all(line["object"] == "ctxwin.window" and line["bytes"] and line["id"] == told[1]["id"] for line in content)
    assert [(line["action"], line["object"]) for line in told] == [
        ("store", "ctxwin.chunk"), ("store", "ctxwin.window"), ("store", "ctxwin.window"), ("share", "ctxwin.window"),
        ("delete", "ctxwin.window"), ("export", "ctxwin.window"), ("delete", "ctxwin.window"), ("delete", "ctxwin.chunk"),
    ]  # fmt: skip
    assert {(line["tenant"], line["client"]) for line in (*told, *content)} == {("acme", "127.0.0.1")}
    assert told[0]["id"] == told[-1]["id"] == name and "heron" not in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_the_audit_log_is_bounded_and_its_failure_is_no_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), most_bytes=2000)
    for i in range(200):
        log.record("acme", "host", "store", id=str(i))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 5 and all(file.stat().st_size <= 2000 for file in files)
    assert json.loads(files[0].read_text().splitlines()[-1])["id"] == "199"
    assert log._file is not None
    log._file.stream.close()
    with caplog.at_level(logging.ERROR, "ctxwin.serve"):
        log.record("acme", "host", "store")
    assert "could not be written" in caplog.text
    with pytest.raises(OSError, match=r"--audit-log must be a file .*/no/such/folder'"):
        Settings(audit_log=str(tmp_path / "no" / "such" / "folder")).service()


def test_an_audit_log_that_was_there_becomes_its_owners_alone(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    log.touch()
    log.chmod(0o644)
    Settings(audit_log=str(log)).service()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    AuditLog("/dev/null").close()  # no file of ours
    assert stat.S_IMODE(Path("/dev/null").stat().st_mode) == 0o666


def test_an_audit_log_has_one_writer(tmp_path: Path) -> None:
    """Two that rotate one file lose what the other one wrote."""
    log = str(tmp_path / "audit.jsonl")
    first = AuditLog(log, most_bytes=200)
    for _ in range(9):  # also behind a rotation
        first.record("acme", "host", "store", id="x")
        with pytest.raises(OSError, match="--audit-log must be a file of this server's alone"):
            Settings(audit_log=log).service()
    first.close()
    Settings(audit_log=log).service()


def test_a_stream_that_a_shutdown_cuts_off_says_so() -> None:
    with serving() as server:

        @server.app.get("/v1/stream")
        async def stream() -> Any:
            async def events() -> Any:
                yield b"data: {}\n\n"
                raise HTTPException(500)

            return StreamingResponse(events(), media_type="text/event-stream")

        with pytest.raises(IncompleteRead), urllib.request.urlopen(f"{server.url}/v1/stream") as answer:
            answer.read()
        server.service.requests.one = lambda *_, **__: nullcontext()  # type: ignore[method-assign]
        server.service.requests.draining = True
        with urllib.request.urlopen(f"{server.url}/v1/stream") as answer:
            _, last = answer.read().strip().split(b"\n\n")
        assert last.startswith(b"event: error\ndata: ") and "shutting down" in json.loads(last[19:])["error"]["message"]


def test_probes_may_ask_with_head() -> None:
    with serving(api_keys=["only"]) as server:
        for path in ("/ready", "/health"):
            assert status(server, "HEAD", path) == 200
        server.service.requests.draining = True
        assert status(server, "HEAD", "/ready") == 503
        server.service.requests.draining = False
        assert status(server, "HEAD", "/v1/windows/x") == 401


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>hi</html>",
        b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"status": "ok"}',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"object"',
        b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
    ],
)
def test_the_doctor_of_what_is_no_server_of_ours(answer: bytes) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert "broken" in {f.status for f in examine(f"http://127.0.0.1:{other.server_address[1]}")}
        other.shutdown()


def test_the_doctor_of_addresses_and_keys_that_are_none() -> None:
    for url in ("http://127.0.0.1:port", "http://127.0.0.1:1/a b"):
        assert [(f.name, f.status) for f in examine(url)] == [("health", "broken")]
    with pytest.raises(ValueError, match="must be printable ASCII") as raised:
        examine("http://127.0.0.1:1", "sk-secret\nx")
    assert "secret" not in str(raised.value)


def test_the_doctor_of_a_server_behind_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*made, "-days", "1", "-subj", "/CN=127.0.0.1"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Closed(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                context.wrap_socket(self.request, server_side=True).close()

    with socketserver.TCPServer(("127.0.0.1", 0), Closed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (found,) = examine(url := f"https://127.0.0.1:{server.server_address[1]}")
        assert found.remedy == f"trust its certificate: SSL_CERT_FILE=FILE ctxwin doctor {url}"
        (found,) = examine(url.replace("https", "http"))
        assert found.remedy == f"ask over TLS: ctxwin doctor {url}"
        server.shutdown()


def test_metrics_have_a_key_of_their_own() -> None:
    with serving(tenants=[Tenant(name="acme", keys=["a"])], api_keys=["own"], metrics_key="scrape") as server:
        for key, expected in (("", 401), ("a", 401), ("wrong", 401), ("scrape", 200), ("own", 200)):
            given = {"authorization": f"Bearer {key}"} if key else {}
            assert status(server, "GET", "/metrics", **given) == expected, key
        assert status(server, "GET", "/v1/ctxwin/about", authorization="Bearer scrape") == 401
    with serving(metrics_key="scrape") as server:
        assert status(server, "GET", "/metrics") == 401
        assert status(server, "GET", "/metrics", authorization="Bearer scrape") == 200


def test_the_doctor_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tenants=[Tenant(name="acme", keys=["a"])]) as server:
        found = {finding.name: finding for finding in examine(server.url + "/v1", "a")}
        assert [f.name for f in found.values() if f.status == "broken"] == []
        assert found["tenants"].what == "on; this key is acme" and found["refused"].what == "401 without a key"
        assert "patched" in found["lanes"].what and "tiny" in found["model"].what
        (*_, last) = examine(server.url, "wrong")
        assert (last.name, last.status) == ("key", "broken") and "CTXWIN_API_KEY" in last.remedy
        store = server.engines["acme"].repo.store
        monkeypatch.setattr(store, "put", lambda key, value: False)
        found = {finding.name: finding for finding in examine(server.url, "a")}
        assert found["store"].status == "broken" and "takes no new value" in found["store"].what
        monkeypatch.undo()
        server.service.requests.draining = True
        done = CliRunner().invoke(app, ["doctor", server.url, "--json"], env={"CTXWIN_API_KEY": "a"})
        assert done.exit_code == 1 and "draining" in done.output
        server.service.requests.draining = False
    assert [f.status for f in examine(server.url)] == ["broken"]


def test_what_is_wrong_with_a_store_is_said(tmp_path: Path) -> None:
    assert store_fault(open_store(f"disk:{tmp_path}")) == ""
    closed = open_store("memory:")
    closed.close()
    assert store_fault(closed)


def test_an_ask_is_a_trace_below_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    trace = f"{0xABC:032x}"
    with serving(tenants=[Tenant(name="acme", keys=["a"])]) as server, RemoteWindow(server.client("a"), "h") as window:
        window.append(Chunk.text("one two three"))
        with monkeypatch.context() as traced:
            traced.setattr(tracing, "_tracer", None)
            tracing.start(provider)
            headers = {"content-type": "application/json", "authorization": "Bearer a"}
            headers["traceparent"] = f"00-{trace}-{7:016x}-01"
            path = f"{server.url}/v1/windows/{window.id}/ask"
            body = json.dumps({"query": "who?", "max_tokens": 2}).encode()
            urllib.request.urlopen(urllib.request.Request(path, body, headers), timeout=60).read()
            headers["traceparent"] = f"00-{trace}-{8:016x}-01"
            call(server, "/v1/chat/completions", {"messages": []}, **headers)
        window.ask("who?", max_tokens=2)
    spans = memory.get_finished_spans()
    assert {f"{s.context.trace_id:032x}" for s in spans} == {trace}
    by_name = {s.name: s for s in spans if s.parent is not None and s.parent.span_id != 8}
    ask = by_name["ctxwin.ask"]
    assert (
        by_name["ctxwin.request"].parent.span_id == 7
        and ask.parent.span_id == by_name["ctxwin.request"].context.span_id
    )
    for name in ("ctxwin.lay_out", "ctxwin.run", "ctxwin.settle"):
        assert by_name[name].parent.span_id == ask.context.span_id
    assert ask.attributes["ctxwin.computed_tokens"] > 0 and ask.attributes["ctxwin.lane.computed"] > 0
    (passed,) = [s for s in spans if s.parent.span_id == 8]
    assert (
        server.heads[-1]["traceparent"].split("-")[2] == f"{passed.context.span_id:016x}"
    )  # vLLM's span goes below it
    assert sum(s.name == "ctxwin.ask" for s in spans) == 1  # none once it is stopped
