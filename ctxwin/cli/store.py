"""`ctxwin store`: what a store holds, and how to maintain it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from ctxwin.store.base import Store

_KINDS = {"span", "patch", "orbit", "embed", "source"}

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
    with closing(open_existing(url, tenant)) as store:
        listed = list(islice(_keys(store, kind), limit + 1))
    keys, more = listed[:limit], len(listed) > limit
    show(as_json, {"keys": keys, "more": more}, *keys)
    if more and not as_json:
        typer.echo(f"more than {limit} keys; raise --limit to see them", err=True)


@app.command("stats")
def stats(url: Url, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Count items and bytes, by kind."""
    with closing(open_existing(url, tenant)) as store:
        kinds = sorted(Counter(key.partition("/")[0] for key in store.list()).items())
        statistics = store.stats()
    rows = [("items", statistics.items), ("bytes", statistics.bytes), *((f"  {kind}", count) for kind, count in kinds)]
    show(as_json, {**asdict(statistics), "kinds": dict(kinds)}, *(f"{name:<10}{count:>16,}" for name, count in rows))


@app.command("gc")
def gc(
    url: Url,
    min_age: Annotated[float, Option(min=0, help="Seconds; younger files may belong to a put in progress.")] = 600.0,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Remove expired items, and files that nothing refers to."""
    with closing(open_existing(url, tenant)) as store:
        collect = getattr(store, "gc", None)
        if collect is None:
            raise ValueError(f"gc needs a store on disk, got {url!r}; name its folder as disk:PATH")
        files, size = collect(min_age)
    show(as_json, {"files": files, "bytes": size}, f"removed {files:,} files, {size:,} bytes")


@app.command("verify")
def verify(url: Url, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Read and check every item of a store; corrupt ones are deleted, unless it is read only. Exit code 1 where not all are good.

    Items that were sealed with another store key than the environment's CTXWIN_STORE_KEY cannot be checked, and stay.
    """
    with closing(open_existing(url, tenant)) as store:
        good, corrupt = store.verify()
        foreign = store.stats().foreign
        stay = any(getattr(tier, "read_only", False) for tier in getattr(store, "tiers", (store,)))
    after = "they stay: the folder is read only" if stay else "deleted; they are computed again when needed"
    lines = [f"{good:,} good, {corrupt:,} corrupt" + (f" ({after})" if corrupt else "")]
    if foreign:
        hint = "they stay; set CTXWIN_STORE_KEY to the key they were sealed with, or use the ctxwin that wrote them"
        lines.append(f"{foreign:,} of another store key or version could not be checked ({hint})")
    show(as_json, {"good": good, "corrupt": corrupt, "foreign": foreign}, *lines)
    if corrupt or foreign:
        raise typer.Exit(1)


@app.command("export")
def export(
    url: Url,
    path: Annotated[Path, Argument(help="File to write.")],
    kind: Annotated[str, Option(help="Only keys of one kind: span, patch, orbit, embed, source.")] = "",
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Write items to one file, for `import` into another store."""
    from ctxwin.store.archive import write_archive

    with closing(open_existing(url, tenant)) as store:
        count, size = write_archive(path, store, _keys(store, kind))
    show(as_json, {"items": count, "bytes": size}, f"wrote {count:,} items, {size:,} bytes, to {path}")


@app.command("import")
def import_(
    url: Url,
    path: Annotated[Path, Argument(help="File that export wrote.", exists=True, dir_okay=False)],
    tenant: Tenant = "",
    sealed_with: Annotated[
        str, Option(metavar="VARIABLE", help="Environment variable with the key that the file was sealed with.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Store the items of a file; what the store has already stays. Exit code 1 where it refuses some. Not for a library's export.

    Every item is verified before the first is stored. Where CTXWIN_STORE_KEY is set, a file that was not exported under
    that key is refused as a whole; --sealed-with names another one.
    """
    from ctxwin.store import archive_secret
    from ctxwin.store.archive import read_archive

    if sealed_with and not os.environ.get(sealed_with):
        raise ValueError(f"--sealed-with must name an environment variable that holds a key, got {sealed_with!r}")
    secret = archive_secret(os.environ[sealed_with]) if sealed_with else None
    stored = present = refused = 0
    with closing(open_existing(url, tenant, create=True)) as store:
        for key, blob in read_archive(path, store, secret, of_library=False):
            if store.contains(key):
                present += 1
            elif store.put(key, blob):
                stored += 1
            else:
                refused += 1
    line = f"stored {stored:,} items, {present:,} were there"
    line += f", {refused:,} were refused: the store is full or read only" if refused else ""
    show(as_json, {"stored": stored, "there": present, "refused": refused}, line)
    if refused:
        raise typer.Exit(1)


def _keys(store: Store, kind: str) -> Iterator[str]:
    """Return the keys of a kind, of all kinds if it is empty; ValueError for a kind that no store has and this one neither."""
    if kind and kind not in _KINDS and not any(True for _ in store.list(f"{kind}/")):
        kinds = ", ".join(sorted(_KINDS | {key.partition("/")[0] for key in store.list()}))
        raise ValueError(f"--kind must be one of {kinds}, got {kind!r}")
    return store.list(f"{kind}/" if kind else "")


def show(as_json: bool, value: dict[str, Any], *lines: str) -> None:
    for line in [json.dumps(value, indent=1)] if as_json else lines:
        typer.echo(line)


def open_existing(url: str, tenant: str, *, create: bool = False) -> Store:
    """Open an existing store; reading must not create one, writing may."""
    from ctxwin.hashing import digest
    from ctxwin.store import check_address, open_store, tiers_of

    if not re.match("[a-z0-9]+:", url):
        url = f"disk:{url}"
    if url.startswith("memory:"):
        raise ValueError(f"a store in memory ends with its process, so there is nothing to look into; got {url!r}")
    check_address(url)
    others = False
    for part in () if create else filter(lambda part: part.startswith("disk:"), tiers_of(url)):
        folder = Path(part.removeprefix("disk:")).expanduser()
        if not folder.is_dir():
            raise ValueError(f"a store must be an existing folder, got {str(folder)!r}")
        if not (folder / digest("tenant", tenant)).is_dir():
            whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
            raise ValueError(f"{str(folder)!r} holds no store {whose}; name the tenant it was opened with (--tenant)")
        others |= not tenant and sum(child.is_dir() for child in folder.iterdir()) > 1
    store = open_store(url, tenant=tenant)
    if others and not any(True for _ in store.list()):  # a server with tenants has one of nobody's, too
        typer.echo("this store is empty; other tenants' stores are here: name one with --tenant", err=True)
    return store
