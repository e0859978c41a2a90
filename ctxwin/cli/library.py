"""`ctxwin library`: files that windows draw from, in a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ctxwin.cli.store import AsJson, Tenant, Url, open_existing, show
from ctxwin.errors import NameTaken
from ctxwin.progress import progress

if TYPE_CHECKING:
    from ctxwin.library import Library

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keep files that windows draw from, in a store.")

Name = Annotated[str, Argument(metavar="LIBRARY", help="Name of the library.")]
Replace = Annotated[bool, Option("--replace", help="Replace files of the same names; open windows keep the old.")]


@app.command("ls")
def ls(
    url: Url,
    name: Annotated[str, Argument(metavar="[LIBRARY]", help="Its files; without, the libraries.")] = "",
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """List libraries, or the files of one."""
    if not name:
        from ctxwin.library.library import libraries

        with closing(open_existing(url, tenant)) as store:
            names = sorted(libraries(store))
        show(as_json, {"libraries": names}, *names)
        return
    with _library(url, name, tenant) as library:
        rows = [row.model_dump(exclude={"key"}) for row in library.files()]
    lines = [f"{r['name']:<40} {r['passages']:>6,} passages {r['bytes']:>14,} bytes" for r in rows]
    for i, row in enumerate(rows):
        if row["expires"] is not None:
            lines[i] += f", expires in {max(0.0, row['expires'] - time.time()):,.0f} s"
    show(as_json, {"library": name, "files": rows}, *lines)


@app.command("add")
def add(
    url: Url,
    name: Name,
    files: Annotated[list[Path], Argument(help="Pictures, PDFs, texts, videos.")],
    caption: Annotated[str, Option(help="Words that they are found by, beside their own.")] = "",
    ttl: Annotated[float | None, Option(min=1, help="Seconds after its last use at which a file expires.")] = None,
    replace: Replace = False,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Add files; the library is made with the first. What was added before an error stays."""
    bar = progress("adding", len(files)) if len(files) > 1 else nullcontext(lambda more: None)
    with _library(url, name, tenant, create=True, files=files) as library, bar as advance:
        added: list[dict[str, Any]] = []
        for path in files:
            try:
                entry = library.add(path, caption=caption, ttl=ttl, replace=replace)
            except NameTaken as error:
                already = f"{len(added)} of {len(files)} were added; --replace goes on after an interrupt"
                raise NameTaken(f"{error} ({already})") from None
            added.append({"name": entry.name, "passages": len(entry.passages), "bytes": entry.bytes})
            advance(1)
    show(as_json, {"library": name, "added": added}, *(f"{a['name']}: {a['passages']:,} passages" for a in added))


@app.command("rm")
def rm(
    url: Url,
    name: Name,
    files: Annotated[list[str] | None, Argument(help="Names of files; without, --all.")] = None,
    everything: Annotated[bool, Option("--all", help="Remove the library itself.")] = False,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Remove files, or the whole library; windows keep what they placed."""
    if bool(files) == everything:
        raise ValueError("rm must be told either files or --all")
    with _library(url, name, tenant) as library:
        for file in files or ():
            library.remove(file)
        if everything:
            library.delete()
    show(as_json, {"library": name, "removed": files or "all"}, "removed")


@app.command("grant")
def grant(
    url: Url,
    name: Name,
    reader: Annotated[str, Argument(metavar="TENANT", help="Who may read it.")],
    revoke: Annotated[bool, Option("--revoke", help="Who may read it no more.")] = False,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Let a tenant read a library that lies in a store of its own."""
    with _library(url, name, tenant) as library:
        if not revoke:
            library.grant(reader)
        elif not library.revoke(reader):
            raise ValueError(f"TENANT must be one that may read {name}, got {reader!r}, which had no grant")
    show(as_json, {"library": name, "tenant": reader, "granted": not revoke}, "revoked" if revoke else "granted")


@app.command("export")
def export(
    url: Url,
    name: Name,
    path: Annotated[Path, Argument(help="File to write.")],
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Write the files of a library to one file, for `import` elsewhere."""
    with _library(url, name, tenant) as library:
        count, size = library.export(path)
    show(as_json, {"records": count, "bytes": size}, f"wrote {count:,} records, {size:,} bytes, to {path}")


@app.command("import")
def import_(
    url: Url,
    name: Name,
    path: Annotated[Path, Argument(help="File that export wrote.", exists=True, dir_okay=False)],
    replace: Replace = False,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Add the files of an export, all or none."""
    with _library(url, name, tenant, create=True) as library:
        names = library.load(path, replace=replace)
    show(as_json, {"library": name, "added": names}, *names)


@contextmanager
def _library(
    url: str, name: str, tenant: str, *, create: bool = False, files: Sequence[Path] = ()
) -> Iterator[Library]:
    """Open a library; ValueError for one that the store does not have, unless ``create``, and for names that are refused."""
    from ctxwin.library.library import Library, libraries
    from ctxwin.store.memory import MemoryStore

    for file in (Path("file"), *files):  # before a folder is made
        Library(MemoryStore(), name).check_name(file.name, replace=True)
    with closing(open_existing(url, tenant, create=create)) as store:
        library = Library(store, name)
        if not (create or library.exists):
            names = ", ".join(sorted(libraries(store))) or "none"
            raise ValueError(f"a library must be one of the store's ({names}), got {name!r}")
        yield library
