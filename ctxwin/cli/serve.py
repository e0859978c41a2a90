"""``ctxwin serve``: vLLM's OpenAI server with windows beside its own endpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ctxwin.cli.commands import checked_mode

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Arguments that are not ours are vLLM's."""


def serve(
    ctx: typer.Context,
    model: Annotated[str, Argument(metavar="MODEL", help="A local folder, a Hub name, or tiny (the bundled model).")],
    store: Annotated[str, Option(help="KV and uploads: memory:, disk:PATH, redis://..., tiered:...")] = "memory:",
    store_bytes: Annotated[str, Option(help="Limit of each tenant's store, e.g. 50GB.")] = "",
    tenants: Annotated[Path | None, Option(metavar="FILE", help="TOML or JSON: API keys, tenants, quotas.")] = None,
    fidelity: Annotated[str, Option(help="Default fidelity: auto, exact, patched or blind.")] = "auto",
    windows: Annotated[str, Option(metavar="auto|off", help="Windows behind plain chats that say nothing.")] = "off",
    context_policy: Annotated[
        Path | None, Option(metavar="FILE", help="TOML: what such chats lose when they say nothing of it.")
    ] = None,
    max_windows: Annotated[int, Option(min=1, help="Most open windows per tenant.")] = 256,
    max_windows_total: Annotated[int, Option(min=1, help="Most open windows of all tenants.")] = 1024,
    window_ttl: Annotated[float, Option(min=0.1, help="Seconds until an idle window is put aside.")] = 3600.0,
    max_upload_bytes: Annotated[str, Option(help="Largest body of a request.")] = "64MiB",
    max_json_values: Annotated[int, Option(min=1, help="Most values and names of one JSON body.")] = 300_000,
    max_pixels: Annotated[int, Option(min=1, help="Most pixels of one request's media, decoded.")] = 64 << 20,
    max_frames: Annotated[int, Option(min=1, help="Most pictures and frames of one request.")] = 256,
    max_text: Annotated[int, Option(min=0, help="Most characters in a request; 0: 16 per token of context.")] = 0,
    max_chunks: Annotated[int, Option(min=1, help="Most chunks of a window, placed and evicted.")] = 4096,
    max_concurrency: Annotated[int, Option(min=1, help="Most requests of windows, and tenants' chats, at once.")] = 64,
    max_waiting: Annotated[int, Option(min=1, help="Most requests per tenant that wait for their turn.")] = 1024,
    private_metrics: Annotated[bool, Option("--private-metrics", help="/metrics needs a key as well.")] = False,
    restarts: Annotated[int, Option(min=0, help="How often in a row to start again after vLLM died.")] = 5,
    vllm_help: Annotated[str, Option(metavar="all|GROUP|ARGUMENT", help="Show vLLM's own arguments, and exit.")] = "",
) -> None:
    """Serve MODEL with vLLM's OpenAI endpoints, and windows and chunks beside them.

    Takes every argument of `vllm serve` (--port, --host, --api-key, --max-model-len, --dtype, ...) as it is, except
    those that ctxwin sets itself. Chunks: /v1/chunks; windows: /v1/windows; chats may name chunks by id; metrics: /metrics.
    """
    from ctxwin.engines.open import require_vllm
    from ctxwin.fidelity import Fidelity
    from ctxwin.serve.limits import Limits
    from ctxwin.store import parse_bytes

    require_vllm()
    mode = checked_mode("--fidelity", fidelity)
    if windows not in ("auto", "off"):
        raise ValueError(f"--windows must be auto or off, got {windows!r}")
    if vllm_help:
        from ctxwin.serve.vllm.arguments import print_help

        print_help(vllm_help)
        return
    limits = Limits(
        max_upload_bytes=parse_bytes(max_upload_bytes),
        max_text=max_text or None,
        max_json_values=max_json_values,
        max_pixels=max_pixels,
        max_frames=max_frames,
        max_chunks=max_chunks,
        max_windows=max_windows,
        max_windows_total=max_windows_total,
        window_ttl_s=window_ttl,
        threads=max_concurrency,
        max_waiting=max_waiting,
        fidelity=Fidelity(mode),
    )
    from ctxwin.engines import repair_install

    repair_install.require()
    from ctxwin.serve.context_management import Policy
    from ctxwin.serve.supervisor import DIED, JOURNAL, EngineDied, supervise
    from ctxwin.serve.tenants import load_tenants
    from ctxwin.serve.vllm.arguments import check_port
    from ctxwin.serve.vllm.server import Options, run

    check_port(ctx.args)  # importing vLLM takes seconds, loading a model minutes
    policy = Policy.read(context_policy) if context_policy else None
    known = load_tenants(tenants) if tenants else []
    if restarts and JOURNAL not in os.environ:
        raise typer.Exit(supervise([sys.executable, "-m", "ctxwin", *sys.argv[1:]], restarts))
    try:
        run(model, ctx.args, Options(store, store_bytes or None, known, private_metrics, windows, policy, limits))
    except EngineDied as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(DIED) from error
