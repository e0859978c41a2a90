"""A plain conversation that moves between servers of vLLM, one of which is killed: answers are vLLM's, KV is the store's."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from adapters.server.vllm.processes import Process, running_server
from store.redis_server import Server as Redis
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.redis, pytest.mark.timeout(900)]
BLOCK = 16
RECORDS = "ctxwin_chat_records_total"


def ask(server: Process, turns: int, windows: str, name: str) -> tuple[str, dict[str, Any], int]:
    """Answer, report and prompt tokens of a conversation's turn."""
    system = {"role": "system", "content": "You watch the doors of a long corridor."}
    messages = [
        {"role": "user", "content": f"The door of room {i} is open. " * 3 + f"Is the door of room {i} open?"}
        for i in range(turns)
    ]
    answers = [{"role": "assistant", "content": "yes"} for _ in range(turns)]
    history = [turn for pair in zip(messages, answers, strict=True) for turn in pair][:-1]
    answer = server.client().chat.completions.create(
        model="tiny", messages=[system, *history], max_tokens=8, temperature=0, logprobs=True, user=name,
        extra_body={"ctxwin": {"windows": windows, "fidelity": {"mode": "exact"}}, "cache_salt": name},
    )  # fmt: skip
    assert answer.usage is not None
    report = (answer.usage.model_extra or {}).get("ctxwin", {})
    return str(answer.choices[0].message.content), report, answer.usage.prompt_tokens


def records(server: Process, result: str) -> float:
    return sum(value for name, value in server.metrics().items() if name.startswith(RECORDS) and f'"{result}"' in name)


@pytest.mark.parametrize("stock", [(False, False), (False, True), (True, True)], ids=["ours", "successor", "vllm"])
def test_a_conversation_outlives_the_server_that_had_it(tmp_path: Path, stock: tuple[bool, bool]) -> None:
    """Turns at either server, the last one after the other was killed: each computes what is new.

    ``stock``: which of them is vLLM's own command with our plugin.
    """
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with Redis(tmp_path) as redis:
        options = {"store": f"tiered:memory:,{redis.url}", "windows": "auto"}
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(running_server(folder, *arguments(options, plugin), stock=plugin))
                for folder, plugin in zip(folders, stock, strict=True)
            )
            tokens_of = dict[int, int]()
            previous, taken_up, written = 0, {first.url: 0, second.url: 0}, {first.url: 0, second.url: 0}
            for turn, server in enumerate([first, second, first, first, second], 1):
                if turn == 5:
                    os.killpg(first.process.pid, signal.SIGKILL)
                text, report, tokens = ask(server, turn, "auto", "moves")
                assert text == ask(server, turn, "off", f"alone {turn}")[0] and report["exact"]
                if turn in (2, 3, 5):
                    taken_up[server.url] += 1
                    beyond = report["computed_tokens"] - report["lanes"]["computed"]
                    # A server begins at once where its vLLM has all but a few tokens, and computes those that another one added.
                    added = previous - tokens_of[1 if turn == 3 else 2] if turn > 2 else 0
                    assert 0 <= beyond - added <= BLOCK, "all else but the block that they begin in came from the store"
                tokens_of[turn] = tokens
                assert turn == 1 or report["lanes"]["computed"] < tokens - previous + 16
                written[server.url] += 1
                assert wait_until(partial(is_counted, server, written[server.url], "written"), 60)
                assert records(server, "taken_up") == taken_up[server.url]
                assert not records(server, "failed") + records(server, "fenced_off")
                previous = tokens


def arguments(options: dict[str, str], plugin: bool) -> list[str]:
    named = [word for name, value in options.items() for word in (f"--{'ctxwin-' * plugin}{name}", value)]
    return [*named, "--max-model-len", "2048"]


def is_counted(server: Process, count: int, result: str) -> bool:
    return records(server, result) == count
