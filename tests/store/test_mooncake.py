"""The Mooncake store against a real master: the conformance suite, damage, other processes, tenants, bad addresses.

The master runs on loopback ports of its own and ends with this module.
"""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ctxwin.store import Store, open_store
from ctxwin.store.mooncake import MooncakeStore
from ctxwin.store.testing import StoreConformance
from ctxwin_server.app.settings import Settings

SMALL = 32 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    try:
        import mooncake.store
    except ImportError as error:
        pytest.skip(
            f"Mooncake cannot be loaded ({error}); run pip install 'ctxwin[mooncake]', and Debian's libibverbs1"
        )
    program = shutil.which(str(Path(mooncake.store.__file__).parent / "mooncake_master"))
    if program is None:
        pytest.skip("this build of Mooncake brings no mooncake_master")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    options = {"rpc_address": "127.0.0.1", "rpc_port": ports[0], "metrics_port": ports[1], "default_kv_lease_ttl": 1000}
    words = [f"-{name}={value}" for name, value in {**options, "enable_metric_reporting": "false"}.items()]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            assert process.poll() is None, "mooncake_master ended at once"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", ports[0])) == 0:
                    break
            time.sleep(0.05)
        yield f"mooncake://127.0.0.1:{ports[0]}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def store(master: str) -> Iterator[MooncakeStore]:
    with closing(MooncakeStore(master, SMALL, tenant=uuid.uuid4().hex)) as made:
        yield made


class TestMooncake(StoreConformance):
    examples = 2

    @pytest.fixture(autouse=True)
    def on(self, master: str) -> None:
        self.url = master

    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return open_store(self.url, max_bytes=max_bytes or SMALL, ttl=ttl, tenant=uuid.uuid4().hex)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"junk", lambda b: b[:-5] + b"?" + b[-4:]]
)
def test_a_damaged_value_is_a_miss_and_deleted(
    store: MooncakeStore, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.put("span/a", bytes(range(200)))
    name = store._space + "span/a"
    assert store._client.upsert(name, damage(store._client.get(name))) == 0  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, logger="ctxwin.store"):
        assert store.get("span/a") is None
    assert "is corrupt and was deleted" in caplog.text and store._client.is_exist(name) == 0
    assert store.stats().corrupt == 1


def test_what_mooncake_loses_is_a_miss(store: MooncakeStore) -> None:
    store.put("span/a", b"x")
    assert store.lease("span/a")
    store._client.remove(store._space + "span/a", True)
    assert store.get("span/a") is None and not list(store.list())
    assert (store.stats().items, store.stats().bytes, store.stats().leased) == (0, 0, 0)


def test_processes_share_values_and_tenants_do_not(master: str, store: MooncakeStore) -> None:
    tenant = uuid.uuid4().hex
    code = (
        "import sys; from ctxwin.store import open_store\n"
        "store = open_store(sys.argv[1], max_bytes=1 << 25, tenant=sys.argv[2])\n"
        "print(store.get('span/a'), store.put('span/b', b'theirs'), flush=True)\n"
        "sys.stdin.read(1)\n"
    )
    with closing(open_store(master, max_bytes=SMALL, tenant=tenant)) as mine:
        assert mine.put("span/a", b"mine") and store.get("span/a") is None
        command = [sys.executable, "-c", code, master, tenant]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline().strip() == "b'mine' True"
            assert mine.get("span/b") == b"theirs"
            other.communicate("x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mooncake://", "must be mooncake://MASTER:PORT"),
        ("mooncake://host", "must be"),
        ("mooncake://host:1/0", "must be"),
        ("mooncake://host:1?speed=9", "with speed"),
        ("mooncake://127.0.0.1:1", "cannot be reached"),
    ],
)
def test_addresses_that_name_no_cluster(master: str, url: str, said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        open_store(url, max_bytes=SMALL)


def test_a_server_on_mooncake_needs_a_registry() -> None:
    with pytest.raises(ValueError, match="must have a --registry redis"):
        Settings(store="tiered:memory:,mooncake://127.0.0.1:50051").service()
