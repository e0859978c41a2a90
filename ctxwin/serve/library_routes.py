"""``/v1/libraries``: files as OpenAI's ``/v1/files`` and vector stores have them, where their shapes fit."""

from __future__ import annotations

from functools import partial
from typing import Any

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import APIRouter, Response
    from fastapi.responses import JSONResponse

from pydantic import Field

from ctxwin.errors import UnknownFile
from ctxwin.hashing import digest
from ctxwin.library.library import Hit
from ctxwin.library.records import Row
from ctxwin.serve.call import Called, body_of
from ctxwin.serve.endpoints import LIBRARIES
from ctxwin.serve.forms import Form, read_form
from ctxwin.serve.operations import Hits
from ctxwin.serve.responses import Route
from ctxwin.serve.specs import Body, checked

libraries = APIRouter(route_class=Route, tags=["libraries"])
_FILES = LIBRARIES + "/{library}/files"
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "name": {"type": "string"},
        "caption": {"type": "string"},
        "expires_after": {"type": "number", "description": "seconds after its last use"},
        "replace": {"type": "boolean"},
        "purpose": {"type": "string"},
    },
}


class NewLibrary(Body):
    """``POST /v1/libraries``. ``expires_after``: seconds after its last use at which a file expires that says nothing itself."""

    name: str
    expires_after: float | None = Field(default=None, gt=0, le=10**10)


class NewFile(Body):
    """The fields beside ``file``; ``purpose`` is OpenAI's and changes nothing."""

    name: str = ""
    caption: str = Field(default="", max_length=10_000)
    expires_after: float | None = Field(default=None, gt=0, le=10**10)
    replace: bool = False
    purpose: str = ""


class Search(Body):
    """``POST /v1/libraries/{library}/search``, as of OpenAI's vector stores."""

    query: str = Field(min_length=1, max_length=10_000)
    max_num_results: Hits = 10


@libraries.get(LIBRARIES)
async def list_libraries(call: Called) -> Response:
    """Lists the libraries that this key can read."""
    return await call.run(lambda: {"object": "list", "data": call.space.libraries.described(), "has_more": False})


@libraries.post(LIBRARIES, openapi_extra=body_of(NewLibrary.model_json_schema()))
async def create(call: Called) -> Response:
    """Makes an empty library; the first file makes one, too."""
    body: NewLibrary = await call.checked(NewLibrary.model_validate)

    def work() -> dict[str, Any]:
        made = call.space.libraries.create(body.name, body.expires_after)
        call.record("store", object="ctxwin.library", id=body.name)
        return made

    return await call.once(work)


@libraries.get(LIBRARIES + "/{library}")
async def describe(library: str, call: Called) -> Response:
    """Describes a library."""
    return await call.run(lambda: call.space.libraries.describe(call.space.libraries.find(library)))


@libraries.delete(LIBRARIES + "/{library}")
async def delete(library: str, call: Called) -> Response:
    """Deletes a library; windows keep what they have placed."""
    return await call.deleted("ctxwin.library", library, call.space.libraries.delete)


@libraries.get(_FILES)
async def list_files(library: str, call: Called) -> Response:
    """Lists the files of a library."""

    def work() -> dict[str, Any]:
        rows = call.space.libraries.find(library).files()
        return {"object": "list", "data": [_file(row) for row in rows], "has_more": False}

    return await call.run(work)


@libraries.post(
    _FILES, openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
)
async def add_file(library: str, call: Called) -> Response:
    """Adds a file, or replaces one. Its KV is computed when the engine has time."""
    raw, kind = await call.request.body(), call.request.headers.get("content-type", "")
    form = await call.service.run_briefly(call.space.tenant, read_form, kind, call.service.limits, raw)
    name, data, fields = await call.service.run_briefly(call.space.tenant, _named, form)

    def work() -> dict[str, Any]:
        row = call.space.libraries.add(
            library, name, data, fields.caption, fields.expires_after, replace=fields.replace
        )
        call.record("store", object="file", id=name, library=library, bytes=len(data))
        return _file(row)

    # Whoever sends a form again draws another boundary for it.
    return await call.once(work, digest("form", name, fields.model_dump(), data).encode())


@libraries.get(_FILES + "/{file}")
async def describe_file(library: str, file: str, call: Called) -> Response:
    """Describes a file."""

    def work() -> dict[str, Any]:
        rows = call.space.libraries.find(library).files()
        found = next((row for row in rows if row.name == file), None)
        if found is None:
            raise UnknownFile(f"a file must be one of library {library}, got {file[:300]!r}; it may have expired")
        return _file(found)

    return await call.run(work)


@libraries.delete(_FILES + "/{file}")
async def delete_file(library: str, file: str, call: Called) -> Response:
    """Takes a file out; windows that have opened the library keep it."""

    def work() -> None:
        call.space.libraries.own(library).remove(file)

    await call.service.run(call.space.tenant, work)
    call.record("delete", object="file", id=file, library=library)
    return JSONResponse({"object": "file", "id": file, "deleted": True})


@libraries.post(LIBRARIES + "/{library}/search", openapi_extra=body_of(Search.model_json_schema()))
async def search(library: str, call: Called) -> Response:
    """Finds passages for words, best first."""
    body: Search = await call.checked(Search.model_validate)
    find = partial(call.space.libraries.search, library, body.query, body.max_num_results)
    return await call.run(
        lambda: {
            "object": "vector_store.search_results.page",
            "search_query": [body.query],
            "data": [_hit(hit) for hit in find()],
            "has_more": False,
            "next_page": None,
        }
    )


def _named(form: Form) -> tuple[str, bytes, NewFile]:
    fields: NewFile = checked(NewFile.model_validate, form.fields)
    if set(form.files) != {"file"}:
        raise ValueError(f"a multipart body must have one file named file, got {sorted(form.files)}")
    sent, data = form.files["file"]
    return fields.name or sent, data, fields


def _file(row: Row) -> dict[str, Any]:
    return {
        "object": "file",
        "id": row.name,
        "filename": row.name,
        "bytes": row.bytes,
        "created_at": int(row.added),
        "expires_at": None if row.expires is None else int(row.expires),
        "purpose": "user_data",
        "status": "processed",
        "passages": row.passages,
    }


def _hit(hit: Hit) -> dict[str, Any]:
    return {
        "file_id": hit.file,
        "filename": hit.file,
        "score": hit.score,
        "label": hit.passage.chunk.label,
        "content": [{"type": "text", "text": hit.passage.text}],
    }
