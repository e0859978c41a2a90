"""Tenants: whose request it is, that nobody reaches another's windows, chunks or cached blocks, and the tenants file."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError, AuthenticationError
from PIL import Image

from adapters.server.calls import call, png, read_metrics
from adapters.server.serving import Server, serving
from ctxwin import Chunk
from ctxwin.window.idle import prefiller_of
from ctxwin_client import RemoteWindow, chunk_part, upload
from ctxwin_client.errors import NotAllowed, TooLarge, TooManyWindows, UnknownUpload, UnknownWindow
from ctxwin_server.app.authentication import Keys
from ctxwin_server.app.tenants import Tenant, load_tenants
from ctxwin_server.protocol.limits import Limits

ACME = Tenant(name="acme", keys=["key-a", "key-a2"], max_windows=2)
BOLT = Tenant(name="bolt", keys=["key-b"], max_bytes="300KB")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(tenants=[ACME, BOLT], api_keys=["key-own"]) as running:
        yield running


def chat(server: Server, key: str, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """What reaches the server's own route of a plain request."""
    asked = body if "input" in body else {"messages": [{"role": "user", "content": "hello"}], **body}
    status, answer = call(server, path, asked, authorization=f"Bearer {key}")
    if status != 200:
        raise AssertionError((status, answer))
    return server.passed.pop()  # type: ignore[no-any-return]


def test_without_a_key_nothing_is_served(server: Server) -> None:
    for key in ("", "wrong", "key-"):
        with pytest.raises(AuthenticationError):
            RemoteWindow(server.client(key or "none", max_retries=0), "h")
    for path in ("/v1/chat/completions", "/v1/chunks", "/invocations"):
        assert call(server, path, {"messages": []})[0] == 401
        assert call(server, path, {"messages": []}, authorization="Basic key-a")[0] == 401
    assert not server.passed
    assert read_metrics(server)['ctxwin_windows_open{tenant="acme"}'] == 0  # scrapers have no key


def test_another_tenants_windows_and_chunks_do_not_exist(server: Server) -> None:
    acme, bolt, own = (server.client(key, max_retries=0) for key in ("key-a", "key-b", "key-own"))
    with RemoteWindow(acme, "h", 500) as window:
        window.append(Chunk.text("a secret"))
        chunk = upload(acme, Chunk.text("a secret"))
        for other in (bolt, own):
            with pytest.raises(UnknownWindow):
                RemoteWindow.attach(other, window.id)
            with RemoteWindow(other, "h") as mine:
                with pytest.raises(UnknownUpload):
                    mine._post("append", chunk=chunk)
                with pytest.raises(UnknownWindow):
                    mine._post("adopt", id=window.id, force=True)
            with pytest.raises(APIStatusError) as found:
                asked: list[Any] = [{"role": "user", "content": [chunk_part(chunk), {"type": "text", "text": "?"}]}]
                other.chat.completions.create(model="tiny", messages=asked)
            assert found.value.status_code == 404
        again = RemoteWindow.attach(server.client("key-a2"), window.id)
        assert again.ids == window.ids  # the same tenant by its other key


def test_quotas(server: Server) -> None:
    acme, bolt = server.client("key-a", max_retries=0), server.client("key-b", max_retries=0)
    open_ones = [RemoteWindow(acme, f"h{i}") for i in range(3)]
    windows = server.service.tenant_state("acme").windows
    assert len(windows) == 2
    with windows.using(open_ones[1].id), windows.using(open_ones[2].id), pytest.raises(TooManyWindows):
        RemoteWindow(acme, "one more")
    noise = np.random.default_rng(1).integers(0, 255, (500, 500, 3), dtype=np.uint8)  # 750 KB, and does not compress
    with pytest.raises(TooLarge, match="store"):
        upload(bolt, Chunk.image(noise))
    assert upload(acme, Chunk.image(noise))
    for window in open_ones:
        window.close()


def test_plain_requests_are_bound_to_their_tenants_cached_blocks(server: Server) -> None:
    assert chat(server, "key-a")["cache_salt"] == "salt-of-acme"
    assert chat(server, "key-b")["cache_salt"] == "salt-of-bolt"
    assert "cache_salt" not in chat(server, "key-own")
    given = [chat(server, key, cache_salt="salt-of-acme")["cache_salt"] for key in ("key-a", "key-b", "key-own")]
    assert len({*given, "salt-of-acme"}) == 4  # a salt that a client guesses leads nowhere
    assert chat(server, "key-a", cache_salt="x") == chat(server, "key-a2", cache_salt="x")
    picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": PART}, "uuid": "cat"}
    named = [
        chat(server, key, messages=[{"role": "user", "content": [picture]}])["messages"][0]["content"][0]["uuid"]
        for key in ("key-a", "key-b", "key-own")
    ]
    assert len({*named[:2], "cat"}) == 3 and named[2] == "cat"
    del picture["uuid"]
    same = [
        chat(server, key, messages=[{"role": "user", "content": [picture]}])["messages"] for key in ("key-a", "key-b")
    ]
    assert same[0][0]["content"][0]["uuid"] != same[1][0]["content"][0]["uuid"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [], "kv_transfer_params": {"ctxwin": "x"}}),
        ("/v1/chat/completions", {"messages": [], "vllm_xargs": {"kv_transfer_params": "x"}}),
        ("/v1/chat/completions", {"messages": [], "priority": -1}),
        ("/v1/chat/completions", {"messages": [], "priority": "-1"}),
        ("/v1/chat/completions", {"messages": [], "chat_template": "{{ messages }}"}),
        ("/v1/chat/completions", {"messages": [], "mm_processor_kwargs": {"min_pixels": 10**9}}),
        ("/v1/chat/completions", {"messages": [], "something_new": 1}),
        ("/v1/chat/completions", {"messages": [], "n": 129}),
        ("/v1/completions", {"prompt_embeds": "AAAA"}),
        ("/v1/completions", {"prompt": ["x"] * 129}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": "http://127.0.0.1"}]}),
        ("/v1/responses", {"input": "x", "background": True}),
        ("/v1/chat/completions/batch", {"messages": [[]]}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/chat/completions/render", {"messages": []}),
        ("/v1/unload_lora_adapter", {}),
        ("/sleep", {}),
        ("/start_profile", {}),
        ("/metrics", {}),
        ("/v1/windowsill", {}),
        ("/v1/responses", {"previous_response_id": "resp_1"}),
        ("/v1/load_lora_adapter", {}),
        ("/invocations", {}),
        ("/v1/anything/new", {}),
    ],
)
def test_what_cannot_be_kept_apart_is_not_served_to_tenants(server: Server, path: str, body: dict[str, Any]) -> None:
    status, answer = call(server, path, body, authorization="Bearer key-a")
    assert (status, answer["error"]["code"]) == (403, "not_allowed")
    assert not server.passed


def test_what_stands_elsewhere_is_named_to_tenants_as_to_everybody(server: Server) -> None:
    for key in ("key-a", "key-own"):
        status, answer = call(server, "/v1/vector_stores", {}, authorization=f"Bearer {key}")
        assert status == 404 and "POST /v1/libraries" in answer["error"]["message"]
    assert chat(server, "key-a", "/v1/messages", max_tokens=1, service_tier="auto")["service_tier"] == "auto"


def test_headers_that_steer_the_engine_do_not_reach_it_from_tenants(server: Server) -> None:
    """A priority in a header let one tenant in front of everybody."""
    steering = {
        "x_vllm_priority": "-1000", "x_data_parallel_rank": "3", "x_request_id": "another's", "x_session_id": "s",
        "content_encoding": "identity", "x_anything_new": "1",
    }  # fmt: skip
    for key, reached in (("key-a", False), ("key-own", True)):
        body = {"messages": []}
        assert call(server, "/v1/chat/completions", body, authorization=f"Bearer {key}", **steering)[0] == 200
        seen = server.heads.pop()
        assert all((name.replace("_", "-") in seen) is reached for name in steering)
        assert {"authorization", "content-type", "content-length", "host", "user-agent"} <= set(seen)
        server.passed.pop()


@pytest.mark.parametrize("coding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/invocations", "/v1/chat/completions/batch"]
)
def test_log_probabilities_are_bounded_in_any_spelling(path: str, coding: str) -> None:
    with serving(Limits(max_upload_bytes=10_000)) as server:
        for name in ("top_logprobs", r"top\u005flogprobs", r"prompt_logprobs"):
            raw = f'{{"messages": [], "logprobs": true, "{name}": 1000}}'.encode(coding)
            status, answer = call(server, path, raw)
            assert (status, answer["error"]["code"]) == (400, "invalid_value")
        nested = json.dumps({"token_ids": [1], "sampling_params": {"logprobs": 1000}}).encode(coding)
        assert call(server, "/inference/v1/generate", nested)[0] == 400
        large = json.dumps({"messages": [], "top_logprobs": 1000, "x": " " * 10_000}).encode(coding)
        assert call(server, path, large)[0] == 413
        assert not server.passed


def test_metrics_are_by_tenant(server: Server) -> None:
    with RemoteWindow(server.client("key-b"), "h", prefill="idle") as window:
        window.append(Chunk.text("x"))
        assert prefiller_of(server.engines["bolt"]).drain(120)
        window.ask("what?", 1)
        found = read_metrics(server)
        assert found['ctxwin_prefilled_tokens_total{result="used",tenant="bolt"}'] == window.tokens
    assert found['ctxwin_asks_total{tenant="bolt"}'] == 1
    assert found['ctxwin_windows_open{tenant="bolt"}'] == 1
    assert found.get('ctxwin_asks_total{tenant="acme"}', 0) == 0


def test_the_tenants_file(tmp_path: Path) -> None:
    toml = tmp_path / "tenants.toml"
    entries = [{"name": "acme", "keys": ["k1", "k2"], "max_bytes": "2GB"}, {"name": "b", "keys": ["k3"]}]
    rows = ["[[tenant]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in entry.items()) for entry in entries]
    toml.write_text("\r\n".join(rows), encoding="utf-8-sig")  # as editors on Windows write it
    plain = tmp_path / "tenants.json"
    plain.write_text(json.dumps({"tenant": entries}))
    assert load_tenants(toml) == load_tenants(plain)
    keys = Keys.of(["own"], load_tenants(toml))
    found = [keys.tenant(f"Bearer {key}") for key in ("k1", "k2", "k3", "own", "k4", "")]
    assert found == ["acme", "acme", "b", "", None, None]
    assert Keys.of([], []).tenant(None) == "" and keys.tenant(None) is None
    for text, said in (
        ("name = 1", "tenant"),
        ('[[tenant]]\nname = "a"\nkeys = []', "keys must be a list"),
        ('[[tenant]]\nname = "a"\nkeys = "sk-secret"', "keys must be a list"),
        ('[[tenant]]\nname = "a"\nkeys = ["sk-secret "]', "without spaces"),
        ('[[tenant]]\nname = "a"\nkeys = ["sk-secret", 1]', "keys must be a list"),
        ('[[tenant]]\nname = "a"\nkey = "sk-secret"', "there is no such field"),
        ('[tenant]\nname = "a"\nkeys = ["sk-secret"]', r"\[\[tenant\]\]"),
        ('[[tenants]]\nname = "a"\nkeys = ["sk-secret"]', "tenants must be left out"),
        ('tenant = ["sk-secret"]', "tenant"),
        ('[[tenant]]\nname = "a"\nkeys = ["k"]\n[[tenant]]\nname = "b"\nkeys = ["k"]', "key"),
        ('[[tenant]]\nname = "a"\nkeys = ["k"]\nmax_bytes = "lots"', "size"),
        ('[[tenant]]\nname = "a"\nkeys = ["k"]\nquota = 1', "quota"),
        ("[[", "TOML"),
    ):
        toml.write_text(text)
        with pytest.raises(ValueError, match=said) as refused:
            load_tenants(toml)
        assert str(toml) in str(refused.value) and "sk-secret" not in str(refused.value)
    toml.write_bytes('[[tenant]]\nname = "café"\nkeys = ["k"]'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tenants\.toml' must be TOML .* in UTF-8"):
        load_tenants(toml)
    (deep := tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        load_tenants(deep)
    with pytest.raises(ValueError, match="api-key"):
        Keys.of(["k3"], load_tenants(plain))


def test_plain_requests_may_not_ask_for_a_whole_vocabulary(server: Server) -> None:
    """vLLM's own default, for everybody: it is started without one, for windows."""
    for name, wanted in (
        ("top_logprobs", 21), ("top_logprobs", -1), ("prompt_logprobs", 10**400), ("logprobs", 1e9),
        ("top_logprobs", "21"), ("prompt_logprobs", " 1_000 "), ("logprob_token_ids", list(range(21))),
    ):  # fmt: skip
        for key in ("key-a", "key-own"):
            body = {"messages": [], name: wanted}
            status, answer = call(server, "/v1/chat/completions", body, authorization=f"Bearer {key}")
            assert (status, answer["error"]["code"]) == (400, "invalid_value") and name in answer["error"]["message"]
    assert not server.passed
    for key in ("key-a", "key-own"):
        assert chat(server, key, logprobs=True, top_logprobs=20)["logprobs"] is True
    with serving(Limits(max_logprobs=1)) as small, serving(Limits(max_logprobs=-1)) as large:
        body = {"messages": [], "logprobs": True, "top_logprobs": 2}
        assert [call(one, "/v1/chat/completions", body)[0] for one in (small, large)] == [400, 200]
        assert large.passed == [body] and chat(small, "", logprobs=True, top_logprobs=1)["top_logprobs"] == 1


PART = "data:image/png;base64," + base64.b64encode(png(np.zeros((2, 2, 3), np.uint8))).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PART}},
        {"type": "image_url", "image_url": {"url": "DATA" + PART[4:]}},
        {"image_url": PART},
        {"type": "input_image", "image_url": PART},
        {"type": "video_url", "video_url": {"url": PART}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image_url", "image_url": None, "uuid": "cat"},
    ],
)
@pytest.mark.parametrize(
    ("path", "where"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")]
)
def test_media_have_names_of_their_tenants(server: Server, path: str, where: str, part: dict[str, Any]) -> None:
    turn = {where: [{"role": "user", "content": [part]}]}
    own, *others = (
        chat(server, key, path, **turn)[where][0]["content"][0] for key in ("key-own", "key-a", "key-b", "key-a2")
    )
    assert own == part and others[0] == others[2]
    assert len({name["uuid"] for name in others} | {"cat"}) == 3
    assert all({**other, "uuid": part.get("uuid")} == {**part, "uuid": part.get("uuid")} for other in others)


def test_what_is_no_medium_stays_as_it_is(server: Server) -> None:
    for part in (
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "1", "name": "find", "input": {"uuid": "of a call", "image_url": PART}},
    ):
        turn = [{"role": "user", "content": [part]}]
        assert chat(server, "key-a", "/v1/messages", messages=turn)["messages"] == turn


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "large", "no picture"])
def test_pictures_in_plain_requests_of_tenants_are_bounded_like_uploads(kind: str) -> None:
    """The server behind decodes whatever it is given: 151 bytes of TIFF took 858 MB."""
    image = Image.new("RGB", (200, 200) if kind == "large" else (2, 2))
    image.save(made := io.BytesIO(), "PNG" if kind in ("large", "no picture") else kind)
    data = "AAAA" if kind == "no picture" else base64.b64encode(made.getvalue()).decode()
    wanted = (413, "too_large") if kind == "large" else (400, "bad_media")
    with serving(Limits(max_pixels=10_000), tenants=[ACME]) as server:
        for path, where, part in (
            ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": f"DATA:;base64,{data}"}}),
            ("/v1/responses", "input", {"type": "input_image", "image_url": f"data:;base64,{data}"}),
            ("/v1/messages", "messages", {"type": "image", "source": {"type": "base64", "data": data}}),
            ("/v1/messages", "messages", {"type": "image", "source": {"type": "url", "url": f"data:;base64,{data}"}}),
        ):
            body = {where: [{"role": "user", "content": [part]}]}
            status, answer = call(server, path, body, authorization="Bearer key-a")
            assert (status, answer["error"]["code"]) == wanted, (path, answer)
        assert not server.passed


URL = "https://example.org/cat.png"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}, "uuid": "cat"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"image_url": " " + URL},
        {"type": "input_image", "image_url": URL},
        {"type": "input_file", "file_url": URL},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "tool_result", "content": [{"type": "document", "source": {"type": "url", "url": URL}}]},
        {"type": "image_embeds", "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": "AAAA"}},
        {"image_embeds": "AAAA"},
    ],
)
def test_nothing_is_fetched_for_tenants_and_no_embeddings_are_taken(server: Server, part: dict[str, Any]) -> None:
    for path, where in (("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")):
        body = {where: [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
        status, answer = call(server, path, body, authorization="Bearer key-a")
        assert (status, answer["error"]["code"]) == (403, "not_allowed"), answer
        assert chat(server, "key-own", path, **body) == body
    assert not server.passed


def test_a_server_that_fetches_for_tenants_gives_what_it_fetched_a_name_of_its_own() -> None:
    with serving(tenants=[ACME, BOLT], fetches_media=True) as server:
        part = {"type": "image_url", "image_url": {"url": URL}}
        turn = [{"role": "user", "content": [part]}]
        made = [chat(server, key, messages=turn)["messages"][0]["content"][0] for key in ("key-a", "key-a", "key-b")]
    assert all({**one, "uuid": 0} == {**part, "uuid": 0} for one in made)
    assert len({one["uuid"] for one in made}) == 3


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_picture_without_a_name_is_another_file_for_each_tenant(server: Server, kind: str) -> None:
    """``/v1/messages`` takes no names: vLLM's key is the file, which shows the same picture."""
    noise = np.random.default_rng(1).integers(0, 255, (31, 47, 3), dtype=np.uint8)
    Image.fromarray(noise).save(made := io.BytesIO(), kind)
    data = base64.b64encode(made.getvalue()).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind.lower()}", "data": data}}
    linked = {"type": "image", "source": {"type": "url", "url": f"data:image/{kind.lower()};base64,{data}"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [picture]}
    turn = [{"role": "user", "content": [picture, linked, result]}]
    files: dict[str, list[bytes]] = {}
    for key in ("key-own", "key-a", "key-a2", "key-b"):
        parts = chat(server, key, "/v1/messages", messages=turn)["messages"][0]["content"]
        sources = [parts[0]["source"]["data"], parts[1]["source"]["url"], parts[2]["content"][0]["source"]["data"]]
        files[key] = [base64.b64decode(source.rpartition(",")[2], validate=True) for source in sources]
        assert sources[1].startswith(f"data:image/{kind.lower()};base64,") and len(set(files[key])) == 1
        with Image.open(io.BytesIO(files[key][0])) as shown, Image.open(made) as drawn:
            assert np.array_equal(shown.convert("RGB"), drawn.convert("RGB"))
    assert files["key-own"][0] == made.getvalue() and files["key-a"] == files["key-a2"]
    assert len({names[0] for names in files.values()}) == 3


def test_metrics_show_tenants_by_name_and_nothing_else_of_theirs(server: Server) -> None:
    client = server.client("key-b")
    with RemoteWindow(client, "a secret system prompt") as window:
        chunk = upload(client, Chunk.text("a secret chunk"))
        placed = window.append(Chunk.text("a secret text"))
        window.ask("a secret query?", 1)
        key = {"authorization": "Bearer key-b"}
        assert call(server, "/v1/windows/5ec7e7", **key)[0] == call(server, "/v1/chunks/5ec7e7", **key)[0] == 404
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            shown = answer.read().decode()
    for secret in ("secret", "5ec7e7", "key-", window.id, chunk, placed):
        assert secret not in shown
    labels = set(re.findall(r'(\w+)="([^"]*)"', shown))
    assert {value for name, value in labels if name == "tenant"} == {"acme", "bolt", ""}
    assert {name for name, _ in labels} <= {"tenant", "lane", "op", "tier", "strategy", "result", "code", "le"}


def test_refusals_reach_the_client_as_ours(server: Server) -> None:
    from ctxwin_client.transport import post

    with pytest.raises(NotAllowed):
        post(server.client("key-a", max_retries=0), "/load_lora_adapter", {})
