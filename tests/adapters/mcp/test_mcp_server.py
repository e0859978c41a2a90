"""`ctxwin mcp` with the official client over standard input and output: a window in process, and one on a server with a key."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mcp import StdioServerParameters, stdio_client
from mcp.client import Client
from mcp.server.mcpserver.exceptions import ToolError
from typer.testing import CliRunner

from adapters.server.serving import serving
from ctxwin import Chunk, Window
from ctxwin.cli.main import app
from ctxwin.errors import ReadOnlyWindow
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow
from ctxwin_client.mcp import WindowTools, mcp_server
from node_graphs import Chatty
from twins import guard
from window.fake import FakeEngine

FRAMES = world.make_stream(seed=5, n_frames=6)
TOOLS = {"plan", "look_back", "forget", "fork", "adopt", "drop", "ask"}
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # hosts pass on little of their environment
Call = Callable[..., Awaitable[dict[str, Any]]]


def with_host(use: Callable[[Call], Awaitable[None]], *args: str, **env: str) -> None:
    """Runs ``use`` as an agent host that has started ``ctxwin mcp`` with these arguments."""

    async def host() -> None:
        started = StdioServerParameters(command=sys.executable, args=["-m", "ctxwin", "mcp", *args], env=PATHS | env)
        async with Client(stdio_client(started)) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS

            async def call(name: str, **arguments: Any) -> dict[str, Any]:
                result = await client.call_tool(name, arguments)
                shown = " ".join(getattr(part, "text", "") for part in result.content)
                if result.is_error:
                    raise RuntimeError(shown)
                return dict(result.structured_content or {})

            await use(call)

    asyncio.run(asyncio.wait_for(host(), 120))


@guard
def test_a_window_in_process_is_looked_back_in_forked_and_forgotten() -> None:
    async def use(call: Call) -> None:
        plan = await call("plan")
        assert plan["placed"] and plan["evicted_count"] == len(plan["evicted"]) > 0
        gone, stays = plan["evicted"][-1]["id"], plan["placed"][-1]["id"]
        with pytest.raises(RuntimeError, match="branch"):
            await call("forget", id=stays, branch="another")
        assert (await call("plan")) == plan, "what a tool does not take must not be done without it"
        assert plan["evicted"][-1]["label"] == "t=0 s [image]"
        asked = await call("ask", query="color of 12?", max_tokens=3)
        assert asked["computed_tokens"] <= asked["prompt_tokens"]
        fork = await call("fork")
        back = await call("look_back", query=f"what was in {gone}?", reserve_tokens=64, window=fork["branch"])
        assert back["recalled"] == [gone] and back["tokens"] + 64 <= back["budget"]
        assert gone not in [c["id"] for c in (await call("plan"))["placed"]], "a branch changes nothing in the window"
        assert (await call("adopt", branch=fork["branch"]))["version"] > plan["version"]
        assert gone in [c["id"] for c in (await call("plan"))["placed"]]
        await call("forget", id=stays)
        with pytest.raises(RuntimeError, match=stays):
            await call("forget", id=stays)
        with pytest.raises(RuntimeError, match="window must be one of"):
            await call("plan", window=fork["branch"])

    with_host(use, "--demo")


def test_a_window_on_a_server_is_the_same_that_its_agent_holds() -> None:
    with serving(api_keys=["secret"]) as server:
        window = RemoteWindow(server.client("secret"), "You watch a camera.", 700)
        ids = window.extend([Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)])
        window.slide(2)

        async def use(call: Call) -> None:
            assert (await call("plan"))["window"] == window.id
            assert (await call("look_back", query=ids[0]))["recalled"] == [ids[0]]
            await call("forget", id=ids[1])  # which was evicted
            await call("fork")  # left open: the end of the host closes it

        with_host(use, "--url", f"{server.url}/v1", "--window", window.id, OPENAI_API_KEY="secret")
        assert ids[0] in window.ids and ids[1] not in (*window.ids, *window.evicted)
        assert len(server.service.tenant_state("").windows) == 1
        refused = CliRunner().invoke(app, ["mcp", "--url", f"{server.url}/v1", "--window", window.id])
        assert refused.exit_code == 2 and "401" in refused.output and "OPENAI_API_KEY" in refused.output


def test_branches_are_few_and_close_with_their_tools() -> None:
    with FakeEngine() as engine, Window(engine, "hd") as window:
        window.append(Chunk.text("one"))
        tools = WindowTools(window)
        mcp_server(tools)
        branches = [tools.fork()["branch"] for _ in range(16)]
        with pytest.raises(ToolError, match="at most 16"):
            tools.fork()
        tools.drop(branches[0])
        held = tools._branches[branches[1]]
        tools.close()
        with pytest.raises(ReadOnlyWindow):
            held.append(Chunk.text("two"))
        window.append(Chunk.text("two"))


@pytest.mark.parametrize("args", [[], ["--demo", "--url", "http://localhost:1/v1"], ["--demo", "--window", "x"]])
def test_it_says_what_it_takes(args: list[str]) -> None:
    told = CliRunner().invoke(app, ["mcp", *args])
    assert told.exit_code == 2 and "mcp takes --url" in told.output


def full_window(engine: Chatty) -> Window:
    window = Window(engine, "hd", 200)
    window.extend([Chunk.text(f"t={i} " + "x" * 35) for i in range(5)])
    window.slide(reserve_tokens=96)
    return window


def test_a_question_fits_behind_every_look_back() -> None:
    with Chatty() as engine, full_window(engine) as window:
        tools = WindowTools(window)
        gone, here = window.evicted[0], window.ids[-1]
        assert tools.look_back(gone)["recalled"] == [gone]
        tools.ask("what?")
        window.append(Chunk.text("y" * 60))
        with pytest.raises(ToolError, match="BudgetExceeded"):
            tools.ask("what?")
        assert tools.look_back(here)["recalled"] == []
        assert here in window.ids, "what was asked for leaves last"
        tools.ask("what?")
        before = window.snapshot()
        with pytest.raises(ToolError, match="reserve less"):
            tools.look_back("", reserve_tokens=250)
        assert window.snapshot() == before


def test_a_branch_of_a_branch_is_adopted_by_it() -> None:
    with Chatty() as engine, full_window(engine) as window:
        tools = WindowTools(window)
        first = tools.fork()["branch"]
        second = tools.fork(window=first)["branch"]
        gone = window.evicted[0]
        tools.look_back(gone, window=second)
        assert tools.adopt(second)["window"] == first and gone not in window.ids
        window.append(Chunk.text("z"))
        with pytest.raises(ToolError, match="force=True"):
            tools.adopt(first)
        assert tools.adopt(first, force=True)["window"] == window.id and gone in window.ids
