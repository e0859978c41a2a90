"""``/v1/libraries``: files as OpenAI's ``/v1/files`` and vector stores have them, where their shapes fit."""

from functools import partial
from typing import Any

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import APIRouter, Response

from pydantic import Field

from ctxwin.errors import UnknownFile
from ctxwin.hashing import digest
from ctxwin.library.library import Hit
from ctxwin.library.records import Row, nfc
from ctxwin.validation import validate
from ctxwin_chats.bodies import Body, FormBody
from ctxwin_server.app.endpoints import LIBRARIES
from ctxwin_server.http.request_context import CurrentRequest, openapi_body
from ctxwin_server.http.responses import Route
from ctxwin_server.protocol.multipart import Form, read_form
from ctxwin_server.registry.operations import Hits

libraries = APIRouter(route_class=Route, tags=["libraries"])
_FILES = LIBRARIES + "/{library}/files"


class NewLibrary(Body):
    """``POST /v1/libraries``. ``expires_after``: default lifetime of its files, in seconds after their last use."""

    name: str
    expires_after: float | None = Field(default=None, gt=0, le=10**10)


class NewFile(FormBody):
    """The fields beside ``file``: ``expires_after`` in seconds after its last use; ``purpose`` is OpenAI's, changes nothing."""

    name: str = ""
    caption: str = Field(default="", max_length=10_000)
    expires_after: float | None = Field(default=None, gt=0, le=10**10)
    replace: bool = False
    purpose: str = ""


_FORM = NewFile.model_json_schema()
_FORM |= {"required": ["file"], "properties": {"file": {"type": "string", "format": "binary"}, **_FORM["properties"]}}
_FORM_CONTENT = {"multipart/form-data": {"schema": _FORM}}


class Search(Body):
    """``POST /v1/libraries/{library}/search``, as of OpenAI's vector stores."""

    query: str = Field(min_length=1, max_length=10_000)
    max_num_results: Hits = 10


@libraries.get(LIBRARIES)
async def list_libraries(context: CurrentRequest) -> Response:
    """List the libraries that this key can read."""
    return await context.respond(
        lambda: {"object": "list", "data": context.tenant_state.libraries.describe_all(), "has_more": False}
    )


@libraries.post(LIBRARIES, openapi_extra=openapi_body(NewLibrary.model_json_schema()))
async def create(context: CurrentRequest) -> Response:
    """Create an empty library; adding the first file creates one, too."""
    body: NewLibrary = await context.validate(NewLibrary.model_validate)

    def work() -> dict[str, Any]:
        description = context.tenant_state.libraries.create(body.name, body.expires_after)
        context.record("store", object="ctxwin.library", id=body.name)
        return description

    return await context.run_once(work)


@libraries.get(LIBRARIES + "/{library}")
async def describe(library: str, context: CurrentRequest) -> Response:
    """Describe a library."""
    libraries = context.tenant_state.libraries
    return await context.respond(lambda: libraries.describe(libraries.find(library)))


@libraries.delete(LIBRARIES + "/{library}")
async def delete(library: str, context: CurrentRequest) -> Response:
    """Delete a library and everything stored for it; windows keep placed chunks until they are evicted."""
    return await context.delete("ctxwin.library", library, context.tenant_state.libraries.delete)


@libraries.get(_FILES)
async def list_files(library: str, context: CurrentRequest) -> Response:
    """List the files of a library."""
    find = context.tenant_state.libraries.find
    return await context.respond(
        lambda: {"object": "list", "data": [*map(_file, find(library).files())], "has_more": False}
    )


@libraries.post(_FILES, openapi_extra={"requestBody": {"required": True, "content": _FORM_CONTENT}})
async def add_file(library: str, context: CurrentRequest) -> Response:
    """Add or replace a file. Its KV is computed when the engine is idle."""
    raw, kind = await context.request.body(), context.request.headers.get("content-type", "")
    form = await context.run_briefly(read_form, kind, context.service.limits, raw)
    name, data, fields = await context.run_briefly(_read_upload, form)

    def work() -> dict[str, Any]:
        row = context.tenant_state.libraries.add(
            library, name, data, fields.caption, fields.expires_after, replace=fields.replace
        )
        context.record("store", object="file", id=name, library=library, bytes=len(data))
        return _file(row)

    # A repeated form has another boundary.
    return await context.run_once(work, digest("form", name, fields.model_dump(), data).encode())


@libraries.get(_FILES + "/{file}")
async def describe_file(library: str, file: str, context: CurrentRequest) -> Response:
    """Describe a file."""

    def work() -> dict[str, Any]:
        rows = context.tenant_state.libraries.find(library).files()
        match = next((row for row in rows if row.name == nfc(file)), None)
        if match is None:
            raise UnknownFile(f"a file must be one of library {library}, got {file[:300]!r}; it may have expired")
        return _file(match)

    return await context.respond(work)


@libraries.delete(_FILES + "/{file}")
async def delete_file(library: str, file: str, context: CurrentRequest) -> Response:
    """Delete a file and everything stored for it; windows keep placed chunks until they are evicted."""

    def remove(file: str) -> None:
        context.tenant_state.libraries.find_own(library).remove(file)

    return await context.delete("file", file, remove, library=library)


@libraries.post(LIBRARIES + "/{library}/search", openapi_extra=openapi_body(Search.model_json_schema()))
async def search(library: str, context: CurrentRequest) -> Response:
    """Find passages for words, best first."""
    body: Search = await context.validate(Search.model_validate)
    find = partial(context.tenant_state.libraries.search, library, body.query, body.max_num_results)
    return await context.respond(lambda: {
        "object": "vector_store.search_results.page", "search_query": [body.query], "data": [_hit(hit) for hit in find()],
        "has_more": False, "next_page": None,
    })  # fmt: skip


def _read_upload(form: Form) -> tuple[str, bytes, NewFile]:
    fields: NewFile = validate(NewFile.model_validate, form.fields)
    if set(form.files) != {"file"}:
        raise ValueError(f"a multipart body must have one file named file, got {sorted(form.files)}")
    sent, data = form.files["file"]
    return fields.name or sent, data, fields


def _file(row: Row) -> dict[str, Any]:
    return {
        "object": "file", "id": row.name, "filename": row.name, "bytes": row.bytes, "created_at": int(row.added),
        "expires_at": None if row.expires is None else int(row.expires), "purpose": "user_data", "status": "processed",
        "passages": row.passages,
    }  # fmt: skip


def _hit(hit: Hit) -> dict[str, Any]:
    return {
        "file_id": hit.file, "filename": hit.file, "score": hit.score, "label": hit.passage.chunk.label,
        "content": [{"type": "text", "text": hit.passage.text}],
    }  # fmt: skip
