"""`RemoteLibrary`: files on a server that its windows retrieve from."""

import re
from pathlib import Path
from urllib.parse import quote

from openai import OpenAI
from openai.types import FileObject, VectorStoreSearchResponse

from ctxwin_client import transport

Source = str | Path | bytes  # a path, or a file's content


class RemoteLibrary:
    """A library on a server started with ``ctxwin serve``: one of the key's tenant, or one that was shared with it.

    Args:
        client: an official client, as for `RemoteWindow`.
        name: letters, digits, ``_``, ``.`` and ``-``. The first file creates the library.

    Every method is one request; files and hits are the official client's own types.
    """

    def __init__(self, client: OpenAI, name: str) -> None:
        if not re.fullmatch(r"[\w.-]*", name):
            raise ValueError(f"a library's name must be letters, digits, '_', '.' and '-', got {name!r}")
        self._client, self.name, self._path = client, name, f"/libraries/{quote(name)}"

    def create(self, *, ttl: float | None = None) -> None:
        """Create an empty library; its files expire ``ttl`` seconds after their last use. Raises NameTaken."""
        transport.post(self._client, "/libraries", {"name": self.name, "expires_after": ttl})

    def add(
        self, source: Source, name: str = "", *, caption: str = "", ttl: float | None = None, replace: bool = False
    ) -> FileObject:
        """Add a file, as `ctxwin.Library.add`. The server computes its KV when idle.

        Raises NameTaken, BadMedia; NotAllowed for a library that is shared; TooLarge; StoreFull.
        """
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        name = name or ("" if isinstance(source, bytes) else Path(source).name)
        expiry = {} if ttl is None else {"expires_after": str(ttl)}
        fields = {"name": name, "caption": caption, "replace": str(replace).lower(), **expiry}
        files = {"file": (name or "file", data, "application/octet-stream")}
        return FileObject.model_validate(transport.post(self._client, f"{self._path}/files", fields, files))

    def remove(self, name: str) -> None:
        """Remove a file. Raises UnknownFile."""
        transport.delete(self._client, f"{self._path}/files/{quote(name, safe='')}")

    def files(self) -> list[FileObject]:
        """Return the files of the library."""
        return [FileObject.model_validate(file) for file in transport.get(self._client, f"{self._path}/files")["data"]]

    def search(self, query: str, k: int = 4) -> list[VectorStoreSearchResponse]:
        """Return the ``k`` best passages for ``query``, best first."""
        hits = transport.post(self._client, f"{self._path}/search", {"query": query, "max_num_results": k})["data"]
        return [VectorStoreSearchResponse.model_validate({"attributes": None, **hit}) for hit in hits]

    def delete(self) -> None:
        """Delete the library with all its files; windows keep the chunks they have placed."""
        transport.delete(self._client, self._path)

    def __repr__(self) -> str:
        return f"<RemoteLibrary {self.name} at {self._client.base_url}>"
