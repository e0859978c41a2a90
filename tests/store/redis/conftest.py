"""A Redis server on a loopback port of its own, without persistence, that ends with its module; stores on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ctxwin.store.redis import RedisStore
from store.redis_server import Server
from store.redis_stores import LARGE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be killed."""
    with Server(tmp_path) as made:
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, LARGE, tenant=uuid.uuid4().hex)) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """The server itself, past the store."""
    redis = pytest.importorskip("redis", reason="redis-py is not installed; run pip install 'ctxwin[redis]'")
    with closing(redis.Redis(port=server.port)) as made:
        yield made
