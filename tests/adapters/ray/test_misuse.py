"""What an operator of a fleet gets wrong: each is one clear error, before or without anything being lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

from adapters.server.serving import serving
from ctxwin import Chunk
from ctxwin.errors import CtxwinError
from ctxwin.store import STORE_KEY, Store, open_store
from ctxwin_client import RemoteWindow
from ctxwin_ray import FleetArguments
from ctxwin_ray import run as runs
from ctxwin_ray.application import fleet, validated
from ctxwin_ray.replica import Replica, journal
from store.redis_server import Server as Redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with Redis(tmp_path) as made:
        yield made


def deploy(**given: Any) -> Any:
    return fleet(FleetArguments(model="tiny", **given))


def configure(redis: Redis, **options: str) -> None:
    import redis as client

    with client.Redis(port=redis.port) as asked:
        for name, value in options.items():
            asked.config_set(name.replace("_", "-"), value)


class Member(Replica):
    """A replica as it is once its engine runs."""

    def __init__(self) -> None: ...

    def __del__(self) -> None: ...  # type: ignore[override]


def member(records: Store, fleet: str = "porch", identity: str = "0a" * 32) -> Member:
    made = Member()
    made._fleet, made._records, made._identity = fleet, records, identity
    return made


def test_no_redis_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{free.getsockname()[1]}/0"
    with pytest.raises(OSError, match=r"cannot be reached .* check its address and login"):
        deploy(settings={"store": url})


def test_the_password_is_wrong(redis: Redis) -> None:
    configure(redis, requirepass="right")
    for url in (redis.url, redis.url.replace("//", "//:wrong@")):
        with pytest.raises(OSError, match="check its address and login") as raised:
            deploy(settings={"store": url})
        assert "wrong@" not in str(raised.value)


def test_the_redis_evicts_by_itself(redis: Redis) -> None:
    configure(redis, maxmemory="100mb", maxmemory_policy="allkeys-lru")
    with pytest.raises(ValueError, match="maxmemory-policy to noeviction"):
        deploy(settings={"store": f"tiered:memory:,{redis.url}"})
    configure(redis, maxmemory_policy="noeviction")
    open_store(redis.url).close()


def test_replicas_share_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must share the windows' versions in a Redis"):
        deploy(settings={"store": f"disk:{tmp_path}"})


def test_mooncake_has_no_registry_or_no_master(redis: Redis) -> None:
    store = "mooncake://127.0.0.1:1"
    with pytest.raises(ValueError, match="must have a --registry"):
        deploy(settings={"store": store})
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)
    with pytest.raises(OSError, match="mooncake"):
        open_store(store)


def test_two_fleets_use_one_registry(redis: Redis) -> None:
    records = open_store(redis.url)
    member(records)._check_member()
    with pytest.raises(
        ValueError, match="registry must be one fleet's, and fleet 'porch' uses it; give another database"
    ):
        member(open_store(redis.url), fleet="yard")._check_member()
    member(records)._check_member()
    member(open_store(redis.url.replace("/0", "/1")), fleet="yard")._check_member()


def test_a_replica_has_other_weights(redis: Redis) -> None:
    records = open_store(redis.url)
    member(records)._check_member()
    with pytest.raises(ValueError, match="same weights, got 0b0b0b0b0b0b beside 0a0a0a0a0a0a"):
        member(records, identity="0b" * 32)._check_member()


def test_a_replica_has_another_store_key(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    member(open_store(redis.url))._check_member()
    monkeypatch.setenv(STORE_KEY, "sixteen bytes or more")
    with pytest.raises(ValueError, match=f"must have the same {STORE_KEY}"):
        member(open_store(redis.url))._check_member()


def test_there_is_no_room_in_redis(redis: Redis) -> None:
    """What is answered is there; the edit that did not fit is refused and taken back."""
    with serving(store=redis.url) as server:
        window = RemoteWindow(server.client(max_retries=0), "h", 900)
        ids = window.extend([Chunk.text(f"The door of room {i} is open. ") for i in range(4)])
        configure(redis, maxmemory="1mb")
        with pytest.raises(CtxwinError, match="must answer before a window's version counts"):
            window.evict(ids[0])
        configure(redis, maxmemory="0")
        registry = server.service.tenant_state("").windows
        registry.records._wake = 0.0  # type: ignore[attr-defined]  # it is left alone for a while otherwise
        assert window.ids == tuple(ids)
        window.evict(ids[0])
        window.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, r"a number from 1 on, or \[least, most\], got 0"),
        ({"replicas": (3, 2)}, r"got \(3, 2\)"),
        ({"settings": {"stroe": "memory:"}}, "options of ctxwin serve with underscores: stroe must be left out"),
        ({"vllm": ["--port=80"]}, "must be without --port"),
        ({"vllm": ["--restarts", "3"]}, "must be without --restarts"),
        ({"settings": {"outputs": "no"}}, "outputs must be a valid boolean, got 'no'"),
        ({"settings": {"max_windows": "8"}}, "max_windows must be a valid integer, got '8'"),
        ({"settings": {"audit_log": True}}, "audit_log must be a valid string, got True"),
    ],
)
def test_arguments_that_no_fleet_can_have(redis: Redis, given: dict[str, Any], message: str) -> None:
    given = {"settings": {"store": redis.url}, **given}
    with pytest.raises(ValueError, match=message):
        deploy(**given)


def test_what_yaml_reads_as_something_else_is_taken_as_written() -> None:
    given: dict[str, Any] = {"prefill": False, "lazy_drops": True, "store_bytes": 10**9, "window_ttl": 60}
    read, limits = validated({"model": "tiny", "replicas": 1, "settings": given})
    assert read.settings == {"prefill": "off", "lazy_drops": "on", "store_bytes": "1000000000", "window_ttl": 60}
    assert limits.window_ttl_s == 60
    for less in ({"gpus": -1}, {"cpus": -0.5}):
        with pytest.raises(ValueError, match="must be >= 0"):
            validated({"model": "tiny", "replicas": 1, **less})


def test_the_machine_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ValueError, match="2 replicas with 1 GPUs each must have 2, got a machine with 0"):
        runs._check_resources(FleetArguments(model="tiny", gpus=1))
    with pytest.raises(ValueError, match=r"got a machine with 2; give fewer replicas, less of each \(--cpus\)"):
        runs._check_resources(FleetArguments(model="tiny", replicas=(3, 5)))
    runs._check_resources(FleetArguments(model="tiny", replicas=4, cpus=0.5))


def test_a_request_that_ends_engines_is_refused_by_replicas_that_come_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And by those beside: the journal is the fleet's, on one machine."""
    from ctxwin.errors import EngineFailed
    from ctxwin_client.errors import Quarantined
    from ctxwin_server.app.quarantine import Quarantine

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    died: set[int] = set()
    replicas = [Quarantine(journal("porch"), lambda i=i: i in died) for i in range(3)]  # type: ignore[misc]
    for i in range(2):
        with pytest.raises(EngineFailed), replicas[i].running("killer"):
            died.add(i)
            raise EngineFailed("died")
    with pytest.raises(Quarantined), replicas[2].running("killer"):
        pass
    with pytest.raises(Quarantined), Quarantine(journal("porch")).running("killer"):
        pass
    with Quarantine(journal("yard")).running("killer"):
        pass


def test_the_end_of_its_terminal_ends_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "running", lambda *_: nullcontext("http://fleet"))
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    hanging_up = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGHUP))
    try:
        hanging_up.start()
        runs.run(FleetArguments(model="tiny"), "127.0.0.1", 1, "")
    finally:
        hanging_up.cancel()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_each_replica_writes_an_audit_log_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r7"))
    monkeypatch.setattr("ctxwin_ray.replica.serve.get_replica_context", lambda: context)
    made = Member()
    Replica.__init__(made, "tiny", [], {"audit_log": f"{tmp_path}/audit"}, "porch")
    assert made._settings.audit_log == f"{tmp_path}/audit.r7"


def test_somebody_elses_folder_is_not_taken_for_the_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = journal("porch").parent
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="must be a folder of this user's"):
        journal("porch")
