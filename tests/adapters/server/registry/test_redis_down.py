"""A server whose shared store, a real Redis, goes away and comes back: clients and balancers are told so."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adapters.server.calls import call, wait_for
from adapters.server.serving import serving
from store.redis_server import Server

pytestmark = pytest.mark.redis
TEXT = {"type": "text", "text": "The door of room 3 is open. "}


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(3).integers(0, 255, (28, 28, 3), dtype=np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image", "image": url}


@pytest.mark.parametrize(("place", "uploaded"), [("{redis}", 503), ("tiered:memory:,{redis}", 201)])
def test_a_store_that_does_not_answer_is_503(place: str, uploaded: int, tmp_path: Path) -> None:
    """A tier in front of it takes uploads meanwhile, but a balancer sends them elsewhere."""
    with Server(tmp_path) as redis, serving(store=place.format(redis=redis.url)) as server:
        assert call(server, "/ready") == (200, {"status": "ready"})
        status, kept = call(server, "/v1/chunks", TEXT)
        assert status == 201
        redis.kill()
        wait_for(lambda: call(server, "/ready")[0] == 503)
        assert call(server, "/ready")[1] == {"status": "store does not answer"}
        assert call(server, "/health")[0] != 503, "the process itself is well"
        for body in (picture(), {**TEXT, "text": "another"}):
            status, said = call(server, "/v1/chunks", body)
            assert status == uploaded, said
            assert uploaded != 503 or "store must answer" in said["error"]["message"]
        redis.start()
        wait_for(lambda: call(server, "/ready")[0] == 200)
        wait_for(lambda: call(server, "/v1/chunks", picture())[0] in (200, 201))
        assert call(server, "/v1/chunks", TEXT)[1]["id"] == kept["id"]
