"""Bodies are bounded before they are parsed and tokenised."""

from __future__ import annotations

import errno
import http.client
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.server.calls import call, wait_for
from adapters.server.serving import Server, serving
from ctxwin_client.errors import TooLarge, TooManyRequests
from ctxwin_server.app import accounts, plain_requests
from ctxwin_server.app.accounts import BodyBytes, Malformed, decode_json, encode_body, parse_json
from ctxwin_server.protocol import multipart
from ctxwin_server.protocol.limits import Limits


def test_a_body_that_is_nested_without_end_is_refused(server: Server) -> None:
    body = b"[" * 100_000 + b"]" * 100_000
    assert call(server, "/v1/windows", body)[0] == 413
    named = b'{"messages": [{"content": [{"type": "ctxwin_chunk"}]}], "x": %s}' % body
    status, answer = call(server, "/v1/chat/completions", named)
    assert (status, answer["error"]["code"]) == (413, "too_large")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON, st.booleans())
def test_json_is_read_as_the_standard_library_does(data: Any, ascii_only: bool) -> None:
    raw = json.dumps(data, ensure_ascii=ascii_only).encode()
    assert repr(decode_json(raw)) == repr(json.loads(raw))
    assert repr(json.loads(encode_body(json.loads(raw)))) == repr(json.loads(raw))


@given(st.binary() | st.text(alphabet='[]{}",:0123456789.eE+-\\u dNaInfity\n').map(str.encode))
@example(b'"\\ud800"')
@example(b"1e999")
@example("[1]".encode("utf-16"))
@example(b"1" * 5000)
def test_what_is_no_json_is_refused_as_the_standard_library_does(raw: bytes) -> None:
    try:
        want = json.loads(raw)
    except ValueError as error:
        with pytest.raises(type(error)):
            decode_json(raw)
    else:
        assert repr(decode_json(raw)) == repr(want)


def test_numbers_and_text_that_msgspec_cannot_write_are_written() -> None:
    for data in ({"seed": 10**40}, ["\ud800"]):
        assert json.loads(encode_body(data)) == data


WORDS = "word " * 1_600_000  # 8 MB


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/windows", {"system_prompt": WORDS}),
        ("/v1/chunks", {"type": "text", "text": WORDS}),
        ("/v1/windows/{}/append", {"chunk": {"type": "text", "text": WORDS}}),
        ("/v1/windows/{}/extend", {"chunks": [{"type": "text", "text": WORDS[:20_000]}] * 400}),
        ("/v1/windows/{}/fork", {"system_prompt": WORDS}),
        ("/v1/windows/{}/ask", {"query": WORDS}),
        ("/v1/windows/{}/look_back", {"query": WORDS}),
        ("/v1/windows/{}/remember", {"query": "?", "answer": WORDS}),
    ],
)
def test_text_is_refused_before_it_is_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Tokenising 8 MB holds a lock that all tenants share for half a minute, and what was tokenised stays cached."""
    window = call(server, "/v1/windows", {"system_prompt": "h"})[1]["id"]
    engine, before = server.engines[""], list(server.engines[""].store.list())
    for name in ("encode", "encode_system_prompt", "encode_query", "encode_exchange", "text_ids"):
        monkeypatch.setattr(engine, name, lambda *_: pytest.fail("it was tokenised"))
    status, answer = call(server, path.format(window), body)
    assert (status, answer["error"]["code"]) == (413, "too_large"), answer
    assert "--max-text" in answer["error"]["message"]
    assert list(engine.store.list()) == before


def test_text_that_a_window_may_hold_is_taken() -> None:
    with serving(Limits(max_text=100)) as server:
        assert call(server, "/v1/windows", {"system_prompt": "x" * 100})[0] == 200
        assert call(server, "/v1/windows", {"system_prompt": "x" * 101})[0] == 413
        assert call(server, "/v1/windows", {"system_prompt": "x" * 60, "budget": 500})[0] == 200


@pytest.mark.parametrize("shape", [b"[],", b"{},", b"1,", b'"",', b'{"a":1},'])
def test_a_wide_body_is_refused_before_it_is_parsed(
    server: Server, monkeypatch: pytest.MonkeyPatch, shape: bytes
) -> None:
    """Parsing 16 MB of ``[],`` holds Python's lock, and with it the event loop, for seconds."""
    monkeypatch.setattr(accounts, "json", SimpleNamespace(loads=lambda _: pytest.fail("it was parsed")))
    body = b"[" + shape * ((16 << 20) // len(shape)) + b"1]"
    for path in ("/v1/windows", "/v1/chunks", "/v1/chat/completions", "/v1/completions"):
        status, answer = call(server, path, body)
        assert (status, answer["error"]["code"]) == (413, "too_large")
        assert "--max-json-values" in answer["error"]["message"]


@pytest.mark.parametrize(("text", "threads"), [("x" * 200_000, False), ("x" * 300_000, True), (", " * 3000, True)])
def test_only_bodies_that_take_long_are_parsed_off_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, text: str, threads: bool
) -> None:
    names = list[str]()

    def parse(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return parse_json(*args)

    monkeypatch.setattr(plain_requests, "parse_json", parse)
    call(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert [name.startswith("ctxwin-brief") for name in names] == [threads]


def test_names_count_beside_values() -> None:
    """Parsing an object takes ten times as long as a list of as many numbers."""
    limits = Limits(max_json_values=1000)
    assert len(parse_json(limits, b"[" + b"1," * 900 + b"1]")) == 901
    with pytest.raises(TooLarge, match="--max-json-values"):
        parse_json(limits, b"{" + b",".join(b'"%d": 1' % i for i in range(900)) + b"}")


def test_a_body_of_fewer_bytes_than_values_are_allowed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()
    monkeypatch.setattr(accounts.np, "count_nonzero", lambda marks: counted.append(len(marks)) or 1)
    assert parse_json(Limits(max_json_values=9), b"[1,2,3,4]") == [1, 2, 3, 4]
    assert not counted
    assert parse_json(Limits(max_json_values=9), b"[1,2,3,45]") == [1, 2, 3, 45]
    assert counted == [10] * 4


FORM = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


def test_forms_are_bounded_and_parsed_off_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parser = set(), multipart.FormParser

    def made(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return parser(*args, **options)

    monkeypatch.setattr(multipart, "FormParser", made)
    url = f"{server.url}/v1/chunks"

    def sent(*parts: bytes) -> tuple[int, str]:
        body = b"".join(parts) + b"--b--\r\n"
        answer = httpx.post(url, content=body, headers={"content-type": "multipart/form-data; boundary=b"})
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    assert sent(FORM % (b"chunk", b"", b'{"type": "text", "text": "x"}'))[0] == 201
    assert sent(*(FORM % (b"f%d" % i, b"", b"x") for i in range(65))) == (413, "too_large")
    assert sent(*(FORM % (b"f%d" % i, b'; filename="f"', b"x") for i in range(300))) == (413, "too_large")
    assert sent(*[FORM % (b"file", b'; filename="f"', b"x")] * 300) == (413, "too_large")
    assert sent(*[FORM % (b"text", b"", b"x")] * 65) == (413, "too_large")
    assert sent(FORM % (b"other", b'; filename="f"', b"x")) == (400, "invalid_value")
    assert sent(FORM % (b"chunk", b"", b"\xff")) == (400, "invalid_value")
    assert sent(b"--c\r\n") == (400, "invalid_value")
    assert threads and all(name.startswith("ctxwin-brief") for name in threads)


def test_bodies_that_are_held_at_once_are_bounded() -> None:
    held = BodyBytes(total=100, each=60)
    held.take("a", 60)
    for tenant, size in (("a", 1), ("b", 41)):
        with pytest.raises(TooManyRequests, match="max_body_bytes"):
            held.take(tenant, size)
    held.take("b", 40)
    held.give_back("a", 60)
    held.take("a", 30)
    with serving(Limits(max_upload_bytes=1000, max_body_bytes=1500)) as server:
        host = server.url.removeprefix("http://")
        slow = http.client.HTTPConnection(host)
        slow.putrequest("POST", "/v1/chunks")
        slow.putheader("content-length", "1000")
        slow.endheaders(b" " * 900)
        wait_for(lambda: server.service.body_bytes._held.total() == 900)
        status, answer = call(server, "/v1/chunks", b" " * 900)
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        slow.close()
        wait_for(lambda: not server.service.body_bytes._held)
        assert call(server, "/v1/chunks", {"type": "text", "text": "x"})[0] == 201


def test_a_window_has_so_many_chunks_and_no_more() -> None:
    with serving(Limits(max_chunks=3)) as server:
        window = call(server, "/v1/windows", {"system_prompt": "h"})[1]["id"]
        one = {"type": "text", "text": "x"}
        path = f"/v1/windows/{window}"
        assert call(server, f"{path}/extend", {"chunks": [one] * 4})[0] == 422
        placed = call(server, f"{path}/extend", {"chunks": [one] * 3})[1]["placements"]
        assert call(server, f"{path}/evict", {"id": placed[0]})[0] == 200
        status, answer = call(server, f"{path}/append", {"chunk": one})
        assert (status, answer["error"]["code"]) == (422, "budget_exceeded")
        assert "--max-chunks" in answer["error"]["message"]
        assert call(server, f"{path}/ask", {"query": "?", "max_tokens": 1, "remember": True})[0] == 422
        assert call(server, f"{path}/ask", {"query": "?", "max_tokens": 1})[0] == 200
        assert call(server, f"{path}/evict", {"id": placed[1], "forget": True})[0] == 200
        assert call(server, f"{path}/append", {"chunk": one})[0] == 200


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("ask", {"query": "?", "temperature": 2.5}),
        ("ask", {"query": "?", "max_tokens": 10**400}),
        ("ask", {"query": "?", "logprobs": 10**30}),
        ("remember", {"query": "?", "answer": [-1]}),
        ("remember", {"query": "?", "answer": [2**31 - 1]}),
        ("prepare_orbit", {"ids": [], "orders": 50_000}),
        ("slide", {"count": 10**30}),
        ("insert", {"index": -(10**30), "chunk": {"type": "text", "text": "x"}}),
        ("append", {"chunk": {"type": "text", "text": "x", "priority": 10**30}}),
        ("append", {"chunk": {"type": "text", "text": "\ud800"}}),
    ],
)
def test_numbers_out_of_range_are_the_clients_error(server: Server, operation: str, body: dict[str, Any]) -> None:
    window = call(server, "/v1/windows", {"system_prompt": "h"})[1]["id"]
    status, answer = call(server, f"/v1/windows/{window}/{operation}", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_value"), answer


@pytest.mark.parametrize("budget", [10**400, -1, "1" * 400, "1e400"])
def test_a_budget_of_bytes_out_of_range_is_the_clients_error(server: Server, budget: int | str) -> None:
    status, answer = call(server, "/v1/windows", {"budget_bytes": budget})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer


def test_a_full_disk_is_no_slip_of_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/secret")

    monkeypatch.setattr(server.engines[""], "encode", full)
    status, answer = call(server, "/v1/chunks", {"type": "text", "text": "x"})
    assert (status, answer["error"]["code"]) == (507, "store_full")
    assert "secret" not in answer["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
@pytest.mark.parametrize("body", ['{"a": %s}', '{"a": {"b": [1, %s]}}', "[%s]", '{"temperature": %s}', '{"seed": %s}'])
def test_numbers_that_are_none_are_refused(body: str, number: str) -> None:
    """Python reads and writes them, no JSON has them, and answers that repeat them cannot be written."""
    with pytest.raises(Malformed, match="finite"):
        parse_json(Limits(), (body % number).encode())
    assert parse_json(Limits(), (body % "1e300").encode())


@pytest.mark.parametrize("nearest, number", [(-(2**63), -(2**63) - 1), (2**64 - 1, 2**64)])
def test_integers_out_of_range_are_refused_by_their_bounds(nearest: int, number: int) -> None:
    for name, body in (("n", '{"n": %d}'), ("seed", '{"a": {"seed": %d}}'), ("a number", '{"seed": [%d]}')):
        with pytest.raises(Malformed, match=rf"{name} must be from -2\*\*63 to 2\*\*64 - 1, got"):
            parse_json(Limits(), (body % number).encode())
        assert parse_json(Limits(), (body % nearest).encode())
    assert parse_json(Limits(), b'{"seed": %d}' % number) == {"seed": number}  # vLLM refuses it by its own bounds
