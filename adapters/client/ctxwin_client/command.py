"""``ctxwin mcp``: a window's edits as tools of an agent host, by the Model Context Protocol."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ctxwin.cli.commands import quiet

if TYPE_CHECKING:
    from ctxwin.window.window import Window
    from ctxwin_client import RemoteWindow

_FRAMES, _BUDGET = 8, 700  # of the demo: some of the frames have left the window


def mcp(
    url: Annotated[str, Option(help="A ctxwin server, e.g. http://localhost:8000/v1; its key is OPENAI_API_KEY.")] = "",
    window: Annotated[str, Option(metavar="ID", help="A window that is open there; default: a new one.")] = "",
    system_prompt: Annotated[str, Option(help="Of a new window.")] = "",
    demo: Annotated[bool, Option("--demo", help="A window of the bundled model in this process, with frames.")] = False,
) -> None:
    """Serve the tools plan, look_back, forget, fork, adopt, drop and ask over a window, on standard input and output.

    An agent host starts this command. A window that was open stays open afterwards; a new one is closed at the end.
    """
    if bool(url) == demo or (window and (demo or system_prompt)):
        raise ValueError("mcp takes --url, with --window or --system-prompt beside it, or --demo; give one of the two")
    quiet()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts end their servers so; the window is to be closed
    from ctxwin_client.mcp import WindowTools, mcp_server

    with ExitStack() as stack:
        at = _demo(stack) if demo else _remote(stack, url, window, system_prompt)
        tools = stack.enter_context(closing(WindowTools(at)))
        typer.echo(f"window {at.id}: {len(at.ids)} chunks placed, {len(at.evicted)} evicted", err=True)
        mcp_server(tools).run()


def _remote(stack: ExitStack, url: str, window: str, system_prompt: str) -> RemoteWindow:
    from openai import APIError, OpenAI

    from ctxwin_client import RemoteWindow

    # An argument could be read by everybody on the machine.
    client = stack.enter_context(OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY"))
    try:
        if window:
            return RemoteWindow.attach(client, window)
        return stack.enter_context(RemoteWindow(client, system_prompt))
    except APIError as error:
        raise ValueError(f"--url must be a ctxwin server that takes OPENAI_API_KEY, got {url}: {error}") from error


def _demo(stack: ExitStack) -> Window:
    from ctxwin import Chunk, Window, open_engine
    from ctxwin.tiny.world import make_stream, render

    window = stack.enter_context(Window(stack.enter_context(open_engine("tiny:hf")), "You watch a camera.", _BUDGET))
    for second, frame in enumerate(make_stream(0, _FRAMES)):
        window.append(Chunk.image(render(frame), text=f"t={second} s"))
    window.slide(reserve_tokens=_BUDGET // 4)
    return window


def add_commands(app: typer.Typer) -> None:
    """Add ``mcp`` to the command line of ctxwin."""
    app.command("mcp")(mcp)
