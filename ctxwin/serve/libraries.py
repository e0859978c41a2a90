"""A tenant's libraries on a server: its own, and those of the server's store of references that it was granted."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxwin.errors import CtxwinError, StoreFull
from ctxwin.library.library import Hit, Library, granted, libraries
from ctxwin.library.records import Row
from ctxwin.serve.errors import NotAllowed, UnknownLibrary
from ctxwin.serve.limits import Limits

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.library.records import Passage
    from ctxwin.store.base import Store

Cut = Callable[[str, bytes, str, int], "list[Passage]"]
"""``(file's name, file, caption, most pixels)`` -> its passages; BadMedia."""
_IDLE_S, _POLL_S = 0.05, 0.02
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class Libraries:
    """Libraries of one tenant. Thread-safe.

    Args:
        references: the store that holds what tenants are granted; None: there is none.
        due: told of a library whose files should be prepared.
    """

    tenant: str
    engine: Engine
    references: Store | None
    limits: Limits
    cut: Cut
    due: Callable[[Engine, Library], None]
    _open: dict[tuple[bool, str], Library] = field(default_factory=dict, init=False, repr=False)

    def find(self, name: str) -> Library:
        """A library to read: the tenant's own, or one that it was granted. Raises UnknownLibrary, ValueError.

        What is not granted is not looked at: it takes as long as what is not there.
        """
        own = self._opened(self.engine.repo.store, name, own=True)
        if own.exists:
            return own
        if self.references is not None and name in granted(self.references, self.tenant):
            return self._opened(self.references, name, own=False)
        raise UnknownLibrary(f"library must be the tenant's own or a granted one, got {name[:100]!r}")

    def own(self, name: str) -> Library:
        """A library to change. Raises UnknownLibrary; NotAllowed for one that was granted, which is only read."""
        library = self.find(name)
        if not self._is_own(library):
            raise NotAllowed(f"library {name} is shared: only who runs the server changes it (`ctxwin library add`)")
        return library

    def described(self) -> list[dict[str, Any]]:
        """Every library that this tenant can read."""
        shown = [self.describe(self._opened(self.engine.repo.store, n, own=True)) for n in self._own_names()]
        names = {one["id"] for one in shown}
        for name in granted(self.references, self.tenant) if self.references else ():
            if name not in names:
                shown.append(self.describe(self._opened(self.references, name, own=False)))  # type: ignore[arg-type]
        return shown

    def describe(self, library: Library) -> dict[str, Any]:
        """A library as JSON, in the terms of OpenAI's vector stores where they fit."""
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
        """Makes a library of the tenant's own. Raises NameTaken; StoreFull where it may have no more."""
        library = self._opened(self.engine.repo.store, name, own=True)
        if not library.exists:
            self._check_room()
        library.create(ttl=ttl)
        return self.describe(library)

    def delete(self, name: str) -> None:
        """Deletes a library of the tenant's own. Raises UnknownLibrary, NotAllowed."""
        self.own(name).delete()
        self._open.pop((True, name), None)

    def add(self, name: str, file: str, raw: bytes, caption: str, ttl: float | None, *, replace: bool) -> Row:
        """Adds a file to a library of the tenant's own; the first one makes it. What is computed for it is due.

        Raises as `Library.add`; BadMedia where it cannot be cut within the server's limits.
        """
        library = self._opened(self.engine.repo.store, name, own=True)
        if not library.exists:
            if self.references is not None and name in granted(self.references, self.tenant):
                self.own(name)
            self._check_room()
        library.check_name(file, replace=replace)
        passages = self.cut(file, raw, caption, self.limits.max_pixels)
        library.add_passages(file, passages, len(raw), ttl=ttl, replace=replace)
        self.due(self.engine, library)
        return next(row for row in library.files() if row.name == file)

    def search(self, name: str, query: str, k: int) -> list[Hit]:
        """What a library finds for words."""
        return self.find(name).search(query, k)

    def _opened(self, store: Store, name: str, *, own: bool) -> Library:
        known = self._open.get((own, name))
        if known is None:
            limits = self.limits
            known = Library(
                store,
                name,
                max_bytes=limits.max_library_bytes,
                max_files=limits.max_library_files,
                max_passages=limits.max_chunks,
            )
            if not own or known.exists:  # names that nobody has are not remembered
                self._open[own, name] = known
        return known

    def _is_own(self, library: Library) -> bool:
        return library.store is self.engine.repo.store

    def _own_names(self) -> list[str]:
        return sorted(libraries(self.engine.repo.store))

    def _check_room(self) -> None:
        most = self.limits.max_libraries
        if len(self._own_names()) >= most:
            raise StoreFull(f"a tenant must have at most {most} libraries (--max-libraries); delete one, or raise it")


class Preparation:
    """One thread that prepares libraries while the engine has nothing else to do. What is due waits, each library once.

    A library is prepared version by version: one that was is not looked at again until it changes.
    """

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._waiting: OrderedDict[tuple[int, str, int], tuple[Engine, Library]] = OrderedDict()
        self._known: dict[tuple[int, str, int], int] = {}
        self._wake = threading.Condition()
        self._working = False
        self._thread: threading.Thread | None = None

    def due(self, engine: Engine, library: Library) -> None:
        """Prepares ``library`` for ``engine``'s model when there is time, if that is not done."""
        key, version = (id(engine), library.name, id(library.store)), library.view().version
        with self._wake:
            if self._known.get(key) == version:
                return
            self._waiting[key] = engine, library
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxwin-libraries", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def settled(self, timeout: float | None = None) -> bool:
        """Waits until nothing is due; False after ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._waiting and not self._working, timeout)

    def close(self) -> None:
        """Ends the thread; what is due is due again when a server reads it. Idempotent."""
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._working = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._waiting or self._closing.is_set(), 1.0)
                if self._closing.is_set():
                    return
                if not self._waiting:
                    continue
                key, (engine, library) = self._waiting.popitem(last=False)
                self._working = True
            try:
                version = self._prepare(engine, library)
            except CtxwinError as error:
                _log.warning("library %s was not prepared: %s", library.name, error)
                continue
            except Exception:
                _log.exception("library %s was not prepared", library.name)
                continue
            with self._wake:
                if version is not None:
                    self._known[key] = version

    def _prepare(self, engine: Engine, library: Library) -> int | None:
        """The version that is prepared in the end; None where the server ends before."""
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
