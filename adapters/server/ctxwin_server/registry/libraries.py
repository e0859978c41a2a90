"""A tenant's libraries on a server: its own, and those in the server's store of references that it was granted."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxwin.errors import CtxwinError, StoreFull
from ctxwin.library.library import Hit, Library, granted_libraries, libraries
from ctxwin.library.records import Row
from ctxwin.library.traces import collect, library_id, traced_libraries
from ctxwin_client.errors import NotAllowed, UnknownLibrary
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.uploads import check_reachable

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.library.records import Passage
    from ctxwin.store.base import Store

SplitFile = Callable[[str, bytes, str, int], "list[Passage]"]
"""``(file's name, file, caption, most pixels)`` -> its passages; BadMedia."""
_IDLE_S, _POLL_S = 0.05, 0.02
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class Libraries:
    """Libraries of one tenant. Thread-safe.

    Args:
        references: store of the libraries that tenants are granted; None if there is none.
        due: called with a library whose files should be prepared.
    """

    tenant: str
    engine: Engine
    references: Store | None
    limits: Limits
    split: SplitFile
    due: Callable[[Engine, Library], None]
    _open: dict[tuple[bool, str], Library] = field(default_factory=dict, init=False, repr=False)

    def find(self, name: str) -> Library:
        """Return a library to read: the tenant's own, or a granted one. Raises UnknownLibrary, ValueError.

        A library that is not granted is not read, so its lookup takes as long as that of a missing one.
        """
        tenant_library = self._open_library(name)
        if tenant_library.exists:
            return tenant_library
        if name in self._granted_names():
            return self._open_library(name, self.references)
        raise UnknownLibrary(f"library must be the tenant's own or a granted one, got {name[:100]!r}")

    def find_own(self, name: str) -> Library:
        """Return a library of the tenant's own, to change it. Raises UnknownLibrary; NotAllowed for a granted one."""
        library = self.find(name)
        if not self._is_own(library):
            raise NotAllowed(f"library {name} is shared: only who runs the server changes it (`ctxwin library add`)")
        return library

    def describe_all(self) -> list[dict[str, Any]]:
        """Describe every library that this tenant can read."""
        own = self._own_names()
        shared = (self._open_library(name, self.references) for name in self._granted_names() if name not in own)
        return [self.describe(library) for library in (*map(self._open_library, own), *shared)]

    def describe(self, library: Library) -> dict[str, Any]:
        """Describe a library as JSON, with the field names of OpenAI's vector stores where they fit."""
        view = library.view()
        return {
            "object": "ctxwin.library",
            "id": library.name,
            "name": library.name,
            "own": self._is_own(library),
            "version": view.version,
            "usage_bytes": sum(row.bytes for row in view.rows),
            "file_counts": {"total": len(view.rows)},
            "expires_after": library.expires_after,
        }

    def create(self, name: str, ttl: float | None) -> dict[str, Any]:
        """Create a library of the tenant's own. Raises NameTaken; StoreFull at the limit of libraries."""
        library = self._open_library(name)
        if not library.exists:
            self._check_room()
        library.create(ttl=ttl)
        return self.describe(library)

    def delete(self, name: str) -> None:
        """Delete a library of the tenant's own. Raises UnknownLibrary, NotAllowed."""
        self.find_own(name).delete()
        self._open.pop((True, name), None)

    def add(self, name: str, file: str, raw: bytes, caption: str, ttl: float | None, *, replace: bool) -> Row:
        """Add a file to a library of the tenant's own, created with its first file, and schedule its preparation.

        Raises as `Library.add`; BadMedia if it cannot be split within the server's limits.
        """
        library = self._open_library(name)
        if not library.exists:
            if name in self._granted_names():
                self.find_own(name)
            self._check_room()
        library.check_name(file, replace=replace)
        passages = self.split(file, raw, caption, self.limits.max_pixels)
        try:
            added = library.add_passages(file, passages, len(raw), ttl=ttl, replace=replace)
        except StoreFull:
            check_reachable(self.engine.repo.store, "files")
            raise
        self.due(self.engine, library)
        return next(row for row in library.files() if row.name == added.name)

    def search(self, name: str, query: str, k: int) -> list[Hit]:
        """Search a library for words; best matches first."""
        return self.find(name).search(query, k)

    def sweep(self) -> None:
        """Remove expired files, and what this tenant's store still holds of removed or no longer readable ones."""
        repo, own, shared = self.engine.repo, self._own_names(), self._granted_names()
        for name in own:
            self._open_library(name).sweep(self.engine)
        for name in shared:
            self._open_library(name, self.references).sweep(self.engine)
        for library in traced_libraries(repo.store) - {library_id(name) for name in (*own, *shared)}:
            collect(repo, library, set())

    def _open_library(self, name: str, references: Store | None = None) -> Library:
        """Open a library of the tenant's own, or one of ``references``."""
        is_own = references is None
        library = self._open.get((is_own, name))
        if library is None:
            limits, store = self.limits, references or self.engine.repo.store
            size, files, passages = limits.max_library_bytes, limits.max_library_files, limits.max_chunks
            library = Library(store, name, max_bytes=size, max_files=files, max_passages=passages)
            if not is_own or library.exists:  # names that do not exist are not cached
                self._open[is_own, name] = library
        return library

    def _is_own(self, library: Library) -> bool:
        return library.store is self.engine.repo.store

    def _granted_names(self) -> Sequence[str]:
        return () if self.references is None else granted_libraries(self.references, self.tenant)

    def _own_names(self) -> list[str]:
        names = sorted(libraries(self.engine.repo.store))
        if not names:
            check_reachable(self.engine.repo.store, "files")
        return names

    def _check_room(self) -> None:
        limit = self.limits.max_libraries
        if len(self._own_names()) >= limit:
            raise StoreFull(f"a tenant must have at most {limit} libraries (--max-libraries); delete one, or raise it")


class Preparation:
    """One thread that prepares libraries while the engine is idle. Each library is queued once.

    A library is prepared once per version.
    """

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._waiting: OrderedDict[tuple[int, str, int], tuple[Engine, Library]] = OrderedDict()
        self._known: dict[tuple[int, str, int], int] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def due(self, engine: Engine, library: Library) -> None:
        """Queue ``library`` to be prepared for ``engine``'s model, unless its version already is."""
        key, version = (id(engine), library.name, id(library.store)), library.view().version
        with self._wake:
            if self._known.get(key) == version:
                return
            self._waiting[key] = engine, library
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxwin-libraries", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread, once ``closing`` is set; queued libraries are queued again when a server reads them. Idempotent."""
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing.is_set())
                if self._closing.is_set():
                    return
                key, (engine, library) = self._waiting.popitem(last=False)
            try:
                version = self._prepare(engine, library)
            except CtxwinError as error:
                _log.warning("library %s was not prepared: %s", library.name, error)
            except Exception:
                _log.exception("library %s was not prepared", library.name)
            else:
                with self._wake:
                    if version is not None:
                        self._known[key] = version

    def _prepare(self, engine: Engine, library: Library) -> int | None:
        """Prepare a library and return its version; None if the server shuts down first."""
        version = library.view().version
        while not self._closing.is_set():
            if engine.idle_s < _IDLE_S:
                time.sleep(_POLL_S)
                continue
            gave_way = False

            def stopped() -> bool:
                nonlocal gave_way
                gave_way = gave_way or engine.busy or self._closing.is_set()
                return gave_way

            library.prepare(engine, stopped)
            if not gave_way:
                return version
        return None
