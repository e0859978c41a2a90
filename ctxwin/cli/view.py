"""`ctxwin view`: a page that shows a recorded run's windows over time."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ctxwin.cli import stopping


def view(
    trace: Annotated[Path, Argument(metavar="RUN.jsonl", help="A trace, e.g. demo-output/run.jsonl.")],
    out: Annotated[Path | None, Option(help="The HTML file. Default: next to the trace, with its name.")] = None,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    serve: Annotated[bool, Option("--serve", help="Serve the page during the run until Ctrl-C; no file.")] = False,
    host: Annotated[str, Option(help="Address to serve at; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to serve at; 0 takes a free one.")] = 8765,
    last: Annotated[int, Option(min=1, help="Show at most this many operations, the newest.")] = 2000,
    as_json: Annotated[bool, Option("--json", help="Print the run's totals as JSON and nothing else.")] = False,
) -> None:
    """Show a window over time: who is in it, who left, who came back, and what every answer cost.

    Writes one self-contained HTML file; with --serve, a page that follows a run in progress.
    """
    from ctxwin.view import render, totals
    from ctxwin.view.totals import in_words
    from ctxwin.view.trace import read_trace

    if serve and (out is not None or as_json):
        raise ValueError("--serve writes no file and prints no totals; drop --out and --json, or drop --serve")
    if serve:
        _serve(trace, host, port, last, show)
        return
    numbers = totals(read_trace(trace))
    written = render(trace, out or trace.with_suffix(".html"), limit=last)
    typer.echo(json.dumps(numbers, indent=1) if as_json else f"{in_words(numbers)}\nwrote {written}")
    if show:
        _open(written.resolve().as_uri())


def _serve(trace: Path, host: str, port: int, last: int, show: bool) -> None:
    from ctxwin.view.server import ViewServer

    with ViewServer(trace, host, port, limit=last) as server:
        typer.echo(f"{server.url} shows {trace}; end with Ctrl-C")
        if not server.loopback:
            typer.echo(f"note: whoever can reach {host} can read this run", err=True)
        if show:
            _open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            stopping.accept()


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        typer.echo(f"no browser could be opened; open {url} yourself", err=True)
