"""Multipart bodies, within a server's limits."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ctxwin.extras import optional_imports

with optional_imports():
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import FormParser, parse_options_header

from ctxwin_client.errors import TooLarge
from ctxwin_server.protocol.limits import Limits

_MOST_FIELDS = 64


@dataclass
class Form:
    """A multipart body: fields, and files as (name, bytes), by the name of their part."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)


def read_form(kind: str, limits: Limits, raw: bytes) -> Form:
    """Parse the form in ``raw``, whose content type is ``kind``. Raises TooLarge; ValueError if it is malformed."""
    form = Form()
    parts: Counter[str] = Counter()  # counted even under one name

    def on_file(part: Any) -> None:
        parts["files"] += 1
        if parts["files"] > limits.max_frames + 1:
            raise TooLarge(f"a multipart body must have at most {limits.max_frames + 1} files (--max-frames), got more")
        part.file_object.seek(0)
        form.files[part.field_name.decode()] = (part.file_name or b"").decode(), part.file_object.read()

    def on_field(part: Any) -> None:
        parts["fields"] += 1
        if parts["fields"] > _MOST_FIELDS:
            raise TooLarge(f"a multipart body must have at most {_MOST_FIELDS} fields, got more")
        form.fields[part.field_name.decode()] = (part.value or b"").decode()

    try:
        boundary = parse_options_header(kind)[1].get(b"boundary")
        in_memory = {"MAX_MEMORY_FILE_SIZE": limits.max_upload_bytes + 1}
        parser = FormParser("multipart/form-data", on_field, on_file, boundary=boundary, config=in_memory)
        for begin in range(0, len(raw), 1 << 20):
            parser.write(raw[begin : begin + (1 << 20)])
        parser.finalize()
    except FormParserError as error:
        raise ValueError(f"the multipart body is malformed: {error}") from None
    return form
