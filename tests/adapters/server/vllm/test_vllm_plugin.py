"""The plugin where it is not named, where it is, and where it cannot work; `test_vllm_chats` runs a server with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from adapters.server.vllm.processes import free_port, installed_plugin, running_server
from ctxwin import Chunk
from ctxwin.tiny import checkpoint_dir
from ctxwin_client import RemoteWindow

PROGRAM = """
import json, os, sys
from vllm.plugins import load_endpoint_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

def tried(rust, *given):
    sys.argv[1:] = given
    os.environ["VLLM_USE_RUST_FRONTEND"] = rust
    try:
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args([])
        known = any(name.startswith("ctxwin") for name in vars(args))
        args = parser.parse_args(list(given))
        from vllm import AsyncEngineArgs
        made = AsyncEngineArgs.from_cli_args(args)
        plugins = [plugin.name for plugin in load_endpoint_plugins(("generate",))]
        connector = (made.kv_transfer_config or {}).get("kv_connector")
        return [known, connector, made.enforce_eager, args.middleware, args.api_key, plugins]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

found = [tried(*given) for given in json.loads(sys.argv[1])]
ours = sorted(name for name in sys.modules if name.split(".")[0] in ("ctxwin", "ctxwin_client", "ctxwin_server"))
print(json.dumps([found, ours]))
"""


def tried(folder: Path, named: str | None, *cases: list[str]) -> tuple[list[Any], list[str]]:
    """What becomes of command lines of vLLM, and which of our modules were loaded.

    Args:
        named: VLLM_PLUGINS.
        cases: whether vLLM's Rust frontend is asked for, then the command line.
    """
    path = os.pathsep.join(filter(None, [str(installed_plugin(folder)), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("VLLM_PLUGINS", None)
    if named is not None:
        environment["VLLM_PLUGINS"] = named
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    found, ours = json.loads(done.stdout.splitlines()[-1])
    return found, ours


@pytest.mark.slow
def test_it_does_nothing_unless_it_is_named(tmp_path: Path) -> None:
    """vLLM loads general plugins that nobody has named: ours must cost nothing then."""
    found, ours = tried(tmp_path, None, ["0", "--model", str(checkpoint_dir())])
    assert found == [[False, None, False, [], None, []]]
    repair = {
        "ctxwin.errors",
        "ctxwin.engines",
        "ctxwin.engines.torchvision_repair",
    }  # where the import hook is installed
    assert set(ours) - repair == {
        "ctxwin", "ctxwin_server", "ctxwin_server.vllm", "ctxwin_server.vllm.plugin",
    }  # fmt: skip


@pytest.mark.slow
def test_named_it_brings_arguments_connector_gateway_and_routes(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[tenant]]\nname = "acme"\nkeys = ["key-acme"]\n')
    found, _ = tried(
        tmp_path, "ctxwin,other",
        ["0", "--model", "tiny", "--ctxwin-fidelity", "good"],
        ["0", "--model", "tiny", "--api-server-count", "2"],
        ["1", "--model", "tiny"],
        ["0", "--model", "tiny", "--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
        ["0", "--model", "tiny", "--ctxwin-tenants", str(tenants), "--api-key", "key-own", "--no-enforce-eager"],
    )  # fmt: skip
    assert "--fidelity must be auto, exact, patched or blind, got 'good'" in found[0]
    assert "--api-server-count must be 1" in found[1]
    assert "unset VLLM_USE_RUST_FRONTEND" in found[2]  # no gateway would stand in front of it
    assert "kv_transfer_config must not be set" in found[3]
    gateway = "ctxwin_server.app.middleware.Gateway"
    assert found[4] == [True, "CtxwinConnector", False, [gateway], ["key-own", "key-acme"], ["ctxwin"]]


@pytest.mark.slow
def test_traces_logs_and_the_end_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ask is one trace from the client to vLLM; logs are lines of JSON; SIGTERM lets a running answer finish."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans: dict[str, Any] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = messages.ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            for scope in (scope for resource in sent.resource_spans for scope in resource.scope_spans):
                spans.update({f"{span.name}/{span.span_id.hex()}": span for span in scope.spans})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    port = free_port()
    collector = HTTPServer(("127.0.0.1", port), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    trace = bytes(15) + b"\x07"
    arguments = ["--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces", "--logging-config.formatter", "json"]
    with running_server(tmp_path, *arguments, "--shutdown-timeout", "20", stock=True) as server:
        window = RemoteWindow(server.client(), "h")
        window.append(Chunk.text("one two three"))
        body = json.dumps({"query": "who?", "max_tokens": 2}).encode()
        headers = {"content-type": "application/json", "traceparent": f"00-{trace.hex()}-{7:016x}-01"}
        for path in (f"/v1/windows/{window.id}/ask", "/v1/chat/completions"):
            if path.endswith("completions"):
                said = [{"role": "user", "content": "who?"}]
                body = json.dumps({"model": "tiny", "messages": said, "max_tokens": 2}).encode()
            urllib.request.urlopen(urllib.request.Request(server.url + path, body, headers), timeout=60).read()
        until = time.monotonic() + 30
        while sum(name.startswith("llm_request/") for name in spans) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)
        mine = [span for span in spans.values() if span.trace_id == trace]
        named = {span.span_id: span.name for span in mine}
        joined = {(span.name, named.get(span.parent_span_id, "")) for span in mine}
        assert {("ctxwin.request", ""), ("ctxwin.ask", "ctxwin.request"), ("ctxwin.run", "ctxwin.ask")} <= joined
        assert {("llm_request", "ctxwin.run"), ("llm_request", "ctxwin.request")} <= joined
        answers: list[str] = []
        asking = threading.Thread(
            target=lambda: answers.append(window.ask("what is there, and where?", max_tokens=1500).text)
        )
        asking.start()
        time.sleep(0.5)
        server.process.terminate()
        asking.join(60)
        assert answers and server.process.wait(60) == 0
    lines = [line for line in server.log.read_text().splitlines() if "ctxwin serves windows" in line]
    assert json.loads(lines[0])["message"].startswith("ctxwin serves windows")
    collector.shutdown()
