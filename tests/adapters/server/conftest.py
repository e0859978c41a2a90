"""One server with vLLM for the tests of several files (`shared_servers`).

`tests/conftest.py` has them run in a row and in one process; the server ends behind the last of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shared_servers import SERVER_OF

if TYPE_CHECKING:
    from adapters.server.serving import Server
    from adapters.server.vllm.processes import Process

TENANTS = """
[[tenant]]
name = "acme"
keys = ["key-acme"]

[[tenant]]
name = "bolt"
keys = ["key-bolt"]
"""
_TESTS = Path(__file__).parents[2]
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def _arguments(name: str, folder: Path) -> list[str]:
    ours = "--ctxwin-" if name == "stock" else "--"
    (folder / "tenants.toml").write_text(TENANTS)
    stored = [f"{ours}tenants", str(folder / "tenants.toml"), f"{ours}store", f"tiered:memory:,disk:{folder / 'kv'}"]
    kept = ["--lazy-drops", "pictures=4,turns=5", "--limit-mm-per-prompt", '{"image": 8}', "--max-frames", "7"]
    return ["--api-key", "key-own", *stored, *_TOOLS, *(kept if name == "keys" else ())]


class Servers:
    """The server of the tests that run, one at a time."""

    def __init__(self) -> None:
        self.name = ""
        self.running: Process | None = None
        self._stack = ExitStack()

    def get(self, name: str, folder: Path) -> Process:
        from adapters.server.vllm.processes import running_server

        if name != self.name or self.running is None or self.running.process.poll() is not None:
            self.close()
            made = running_server(folder, *_arguments(name, folder), stock=name == "stock")
            self.name, self.running = name, self._stack.enter_context(made)
        return self.running

    def close(self) -> None:
        self.name, self.running = "", None
        self._stack.close()


_SERVERS = Servers()


def _server_of(item: pytest.Item | None) -> str:
    return "" if item is None else SERVER_OF.get(item.path.relative_to(_TESTS).as_posix(), "")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server without vLLM and with small limits, for files that need no other one."""
    from adapters.server.serving import serving
    from ctxwin_server.protocol.limits import Limits

    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


@pytest.fixture
def vllm_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """The server that the tests of the file share."""
    return _SERVERS.get(_server_of(request.node), tmp_path_factory.mktemp("server"))


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if _SERVERS.name and _server_of(nextitem) != _SERVERS.name:
        _SERVERS.close()


def pytest_sessionfinish() -> None:
    _SERVERS.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its server said."""
    report = yield
    server = item.funcargs.get("vllm_server") if report.failed else None
    if server is not None:
        report.sections.append(("end of the server's log", server.log.read_text(errors="replace")[-6000:]))
    return report
