"""One server with vLLM and two tenants for all tests of a file that need none of their own.

``ctxwin serve`` runs it, and vLLM's own command with our plugin where the file says ``STOCK = True``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serve.test_vllm_server import Process

TENANTS = """
[[tenant]]
name = "acme"
keys = ["key-acme"]

[[tenant]]
name = "bolt"
keys = ["key-bolt"]
"""


@pytest.fixture(scope="module")
def vllm_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    from serve.test_vllm_server import running_server

    folder = tmp_path_factory.mktemp("server")
    (folder / "tenants.toml").write_text(TENANTS)
    stock = getattr(request.module, "STOCK", False)
    ours = "--ctxwin-" if stock else "--"
    with running_server(
        folder, "--api-key", "key-own", f"{ours}tenants", str(folder / "tenants.toml"),
        f"{ours}store", f"tiered:memory:,disk:{folder / 'kv'}", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", stock=stock,
    ) as made:  # fmt: skip
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its server said."""
    report = yield
    server = item.funcargs.get("vllm_server") if report.failed else None
    if server is not None:
        report.sections.append(("end of the server's log", server.log.read_text(errors="replace")[-6000:]))
    return report
