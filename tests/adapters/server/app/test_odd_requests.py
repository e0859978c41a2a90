"""No odd option of a request is an error of the server's: it is served, or refused by what it is.

``CTXWIN_ODD_REQUESTS`` is how many the slow test sends (20,000 by default), and ``CTXWIN_ODD_SEED`` which.
"""

from __future__ import annotations

import json
import os

import pytest

from adapters.server.odd_requests import odd_requests, send
from adapters.server.vllm.processes import Process

pytestmark = pytest.mark.vllm
LONG = (pytest.mark.slow, pytest.mark.timeout(3600))
COUNTS = [
    40,
    pytest.param(150, marks=[pytest.mark.slow, pytest.mark.guard]),
    pytest.param(int(os.environ.get("CTXWIN_ODD_REQUESTS", "20000")) // 2, marks=LONG),
]
SEED = int(os.environ.get("CTXWIN_ODD_SEED", "0"))


@pytest.mark.parametrize("key", ["key-own", "key-acme"])
@pytest.mark.parametrize("count", COUNTS)
def test_no_odd_option_is_an_error_of_the_servers(vllm_server: Process, key: str, count: int) -> None:
    outcome = send(vllm_server.url, key, odd_requests(count, SEED + (key == "key-acme")))
    print(json.dumps(outcome.statuses))
    assert not outcome.failed, f"{len(outcome.failed)} of {count}: " + "\n\n".join(map("\n".join, outcome.failed[:20]))
    assert outcome.statuses[200] > count / 10 and outcome.statuses[400] > count / 10
    assert vllm_server.process.poll() is None


def test_the_same_seed_draws_the_same_requests() -> None:
    assert list(odd_requests(50, 3)) == list(odd_requests(50, 3)) != list(odd_requests(50, 4))
