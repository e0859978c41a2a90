"""`ctxwin store`: what a store holds, and how to maintain it."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from ctxwin.store.base import Store

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Inspect and maintain a KV store.")

Url = Annotated[str, Argument(metavar="STORE", help="'disk:PATH', PATH alone, or 'tiered:memory:,disk:PATH'.")]
Tenant = Annotated[str, Option(help="Tenant whose part of the store to open.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command("ls")
def ls(
    url: Url,
    kind: Annotated[str, Option(help="List only keys of one kind: span, patch, orbit, embed, source.")] = "",
    limit: Annotated[int, Option(min=1, help="Most keys to list.")] = 1000,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """List keys."""
    with closing(_open(url, tenant)) as store:
        found = list(islice(store.list(f"{kind}/" if kind else ""), limit + 1))
    keys, more = found[:limit], len(found) > limit
    _show(as_json, {"keys": keys, "more": more}, *keys)
    if more and not as_json:
        typer.echo(f"more than {limit} keys; raise --limit to see them", err=True)


@app.command("stats")
def stats(url: Url, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Count items and bytes, by kind."""
    with closing(_open(url, tenant)) as store:
        kinds = sorted(Counter(key.partition("/")[0] for key in store.list()).items())
        held = store.stats()
    rows = [("items", held.items), ("bytes", held.bytes), *((f"  {kind}", count) for kind, count in kinds)]
    _show(as_json, {**asdict(held), "kinds": dict(kinds)}, *(f"{name:<10}{count:>16,}" for name, count in rows))


@app.command("gc")
def gc(
    url: Url,
    min_age: Annotated[float, Option(min=0, help="Seconds; younger files may belong to a put in progress.")] = 600.0,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Remove expired items, and files that nothing refers to."""
    with closing(_open(url, tenant)) as store:
        collect = getattr(store, "gc", None)
        if collect is None:
            raise ValueError(f"gc needs a store on disk, got {url!r}; name its folder as disk:PATH")
        files, size = collect(min_age)
    _show(as_json, {"files": files, "bytes": size}, f"removed {files:,} files, {size:,} bytes")


@app.command("verify")
def verify(url: Url, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Read and check every item; corrupt ones are deleted. Exit code 1 where not all are good.

    Items that were sealed with another store key than the environment's CTXWIN_STORE_KEY cannot be checked, and stay.
    """
    with closing(_open(url, tenant)) as store:
        good, corrupt = store.verify()
        foreign = store.stats().foreign
    lines = [
        f"{good:,} good, {corrupt:,} corrupt{' (deleted; they are computed again when needed)' if corrupt else ''}"
    ]
    if foreign:
        hint = "they stay; set CTXWIN_STORE_KEY to the key that they were sealed with"
        lines.append(f"{foreign:,} of another store key could not be checked ({hint})")
    _show(as_json, {"good": good, "corrupt": corrupt, "foreign": foreign}, *lines)
    if corrupt or foreign:
        raise typer.Exit(1)


def _show(as_json: bool, value: dict[str, Any], *lines: str) -> None:
    for line in [json.dumps(value, indent=1)] if as_json else lines:
        typer.echo(line)


def _open(url: str, tenant: str) -> Store:
    """An existing store; looking into one must not create it."""
    from ctxwin.hashing import digest
    from ctxwin.store import open_store

    kind, colon, _ = url.partition(":")
    if not colon or kind not in ("disk", "tiered", "memory", "redis", "rediss"):
        url = f"disk:{url}"
    if url.startswith("memory:"):
        raise ValueError(f"a store in memory ends with its process, so there is nothing to look into; got {url!r}")
    for part in url.removeprefix("tiered:").split(",") if url.startswith("tiered:") else [url]:
        if not part.startswith("disk:"):
            continue
        folder = Path(part.removeprefix("disk:")).expanduser()
        if not folder.is_dir():
            raise ValueError(f"a store must be an existing folder, got {str(folder)!r}")
        if not (folder / digest("tenant", tenant)).is_dir():
            whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
            raise ValueError(f"{str(folder)!r} holds no store {whose}; name the tenant it was opened with (--tenant)")
    return open_store(url, tenant=tenant)
