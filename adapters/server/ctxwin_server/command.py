"""``ctxwin serve``: vLLM's OpenAI server with windows beside its own endpoints."""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ctxwin.cli.stopping import INTERRUPTED
from ctxwin_server.app.settings import Settings

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Unknown arguments are passed to vLLM."""
_JSON = '{"asctime": "%(asctime)s", "levelname": "%(levelname)s", "name": "%(name)s", "message": "%(message)s"}'
_log = logging.getLogger("ctxwin.serve")


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with an option for each field of `Settings`."""
    of_command = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p for p in of_command if p.kind is not p.VAR_KEYWORD]
    for name, kind, default, text, metavar in Settings.options():
        flags = [f"--{name.replace('_', '-')}"] if kind is bool else []
        option = Annotated[kind, Option(*flags, help=text, metavar=metavar)]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@with_settings
def serve(
    ctx: typer.Context,
    model: Annotated[str, Argument(metavar="MODEL", help="A local folder, a Hub name, or tiny (the bundled model).")],
    *,
    restarts: Annotated[
        int, Option(min=0, help="How often in a row to start again after vLLM died or the server was killed.")
    ] = 5,
    vllm_help: Annotated[str, Option(metavar="all|GROUP|ARGUMENT", help="Show vLLM's own arguments, and exit.")] = "",
    **settings: Any,
) -> None:
    """Serve MODEL with vLLM's OpenAI endpoints, and windows and chunks beside them.

    Takes every argument of `vllm serve` (--port, --host, --api-key, --max-model-len, --dtype, ...) as it is, except
    those that ctxwin sets itself. Chunks: /v1/chunks; windows: /v1/windows; chats may name chunks by id; metrics: /metrics.
    """
    from ctxwin.opening import require_vllm

    require_vllm()
    if vllm_help:
        from ctxwin_server.vllm.arguments import print_help

        print_help(vllm_help)
        return
    chosen = Settings(**settings)
    chosen.service()  # says what is wrong before vLLM, which takes seconds to import
    from ctxwin.engines.torchvision_repair import require_fit

    require_fit()
    from ctxwin_server.process.supervisor import DIED, JOURNAL, EngineDied, supervise

    if JOURNAL not in os.environ:
        is_json = re.search(r"--logging[-_]config(\.formatter[ =]|[ =]\S*\bformatter\W+)json\b", " ".join(ctx.args))
        logging.basicConfig(format=_JSON if is_json else "%(levelname)s %(asctime)s %(message)s", level="INFO")
        _log.info("starting vLLM with %s: its log follows, ending in 'Application startup complete.'", model)
        status = supervise([sys.executable, "-m", "ctxwin", *sys.argv[1:]], restarts)
        if status == INTERRUPTED:
            _log.info("stopped; windows are kept where --store is durable")
        raise typer.Exit(status)
    from ctxwin.process_exit import leave
    from ctxwin_server.vllm.server import run

    try:
        run(model, ctx.args, chosen)
    except EngineDied as error:
        typer.echo(f"error: {error}", err=True)
        leave(DIED)
    leave(0)


def add_commands(app: typer.Typer) -> None:
    """Add ``serve`` to the command line of ctxwin."""
    app.command("serve", context_settings=CONTEXT)(serve)
