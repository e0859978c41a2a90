"""``ctxwin fleet``: replicas of ``ctxwin serve`` on Ray Serve, behind a router that knows their windows and chunks."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ctxwin_server.app.settings import Settings
from ctxwin_server.command import CONTEXT, with_settings


@with_settings
def fleet(
    ctx: typer.Context,
    model: Annotated[str, Argument(metavar="MODEL", help="A local folder, a Hub name, or tiny (the bundled model).")],
    *,
    replicas: Annotated[str, Option(metavar="N|MIN-MAX", help="How many, or from how many to how many.")] = "2",
    port: Annotated[int, Option(min=0, max=65535, help="Where the fleet listens.")] = 8000,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    gpus: Annotated[float, Option(min=0, help="GPUs of each replica.")] = 0,
    cpus: Annotated[float, Option(min=0, help="CPUs of each replica.")] = 1,
    name: Annotated[str, Option(help="The fleet's, which no other may have on one registry.")] = "",
    address: Annotated[str, Option(help="A Ray cluster, auto say; default: one of this machine.")] = "",
    **settings: Any,
) -> None:
    """Serve MODEL with a fleet: as many servers, each with windows, whose windows outlive every one of them.

    Takes what `ctxwin serve` takes beside an address of its own. Needs a shared store, --store tiered:memory:,redis://HOST:PORT/DB,
    or --registry redis://HOST:PORT/DB. For `serve run` and YAML see the guide "Many machines".
    """
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", replicas)
    if match is None:
        raise ValueError(f"--replicas must be a number, or MIN-MAX, got {replicas!r}")
    from ctxwin_ray.application import FleetArguments
    from ctxwin_ray.run import run

    changed = {name: settings[name] for name, _, default, *_ in Settings.options() if settings[name] != default}
    count = int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
    arguments = FleetArguments(
        model=model, vllm=ctx.args, settings=changed, replicas=count, gpus=gpus, cpus=cpus, name=name
    )
    run(arguments, host, port, address)


def add_commands(app: typer.Typer) -> None:
    """Add ``fleet`` to the command line of ctxwin."""
    app.command("fleet", context_settings=CONTEXT)(fleet)
