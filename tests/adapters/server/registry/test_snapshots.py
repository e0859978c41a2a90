"""Snapshots that come from clients: taken where they are true, refused where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adapters.server.calls import call, open_window
from adapters.server.serving import Server
from ctxwin import Chunk


@pytest.fixture(scope="module")
def snapshot(server: Server) -> str:
    window = open_window(server, budget=500)
    call(server, f"/v1/windows/{window}/append", {"chunk": {"type": "text", "text": "hello there"}})
    return json.dumps(call(server, f"/v1/windows/{window}/snapshot")[1])


@pytest.mark.parametrize(
    "lie",
    [
        lambda s: s["placed"][0].update(tokens=-100),  # room for more than the budget
        lambda s: s["placed"][0].update(advance=-50),  # positions below 0 reach the engine
        lambda s: s["placed"][0].update(advance=10**7),
        lambda s: s.update(system_prompt_advance=-(10**6)),
        lambda s: s.update(system_prompt_tokens=-(10**6)),
        lambda s: s.update(placed=s["placed"] * 2),
        lambda s: s["placed"][0].update(chunk_id="0" * 64),
        lambda s: s.update(budget=-5),
        lambda s: s.update(budget=6),
        lambda s: s.update(arrivals=-3),
        lambda s: s["placed"][0]["chunk"].update(parts=[{"kind": "tokens", "ids": [10**8]}]),
    ],
)
def test_a_snapshot_that_lies_is_refused(server: Server, snapshot: str, lie: Callable[[Any], None]) -> None:
    data = json.loads(snapshot)
    lie(data)
    status, answer = call(server, "/v1/windows", {"snapshot": data})
    assert (status, answer.get("error", {}).get("code")) == (400, "invalid_value"), answer


def medium(**change: Any) -> dict[str, Any]:
    return {"kind": "media", "media": "video", "content": "0" * 64, "shape": [2, 8, 8], "fps": 1.0, **change}


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([medium(shape=[100_000, 1, 1])], 413),  # counting their tokens took 17 s
        ([medium(shape=[1, 10**6, 10**6])], 413),
        ([medium(shape=[2, 8, 0])], 400),
        ([medium(shape=[-2, 8, 8])], 400),
        ([medium(fps=1e-6)], 400),
        ([medium(fps=1e300)], 400),
        ([{"kind": "text", "text": "word " * 100_000}], 413),
        ([{"kind": "tokens", "ids": [1] * 100_000}], 413),
    ],
)
@pytest.mark.parametrize("where", ["placed", "evicted"])
def test_what_a_snapshot_claims_is_bounded_before_it_is_encoded(
    server: Server, snapshot: str, monkeypatch: pytest.MonkeyPatch, parts: list[Any], status: int, where: str
) -> None:
    data = json.loads(snapshot)
    forged = json.loads(json.dumps(data["placed"][0]))
    forged["chunk"]["parts"] = parts
    forged |= {"id": "forged", "chunk_id": Chunk.model_validate(forged["chunk"]).id}
    data[where] = [forged]
    monkeypatch.setattr(server.engines[""], "encode", lambda _: pytest.fail("it was encoded"))
    got, answer = call(server, "/v1/windows", {"snapshot": data})
    assert got == status, answer


def test_a_snapshot_of_too_many_chunks_is_refused(server: Server, snapshot: str) -> None:
    data = json.loads(snapshot)
    data["evicted"] = [{**data["placed"][0], "id": f"e{i}"} for i in range(4100)]
    status, answer = call(server, "/v1/windows", {"snapshot": data})
    assert (status, answer["error"]["code"]) == (422, "budget_exceeded") and "--max-chunks" in answer["error"][
        "message"
    ]


def test_planted_windows_are_checked_like_clients_snapshots(server: Server, snapshot: str, tmp_path: Path) -> None:
    """Whoever can write to the store has no more power over a window than whoever may open one."""
    repo = server.engines[""].repo
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    liar, reader, true = (json.loads(snapshot) for _ in range(3))
    liar["placed"][0].update(advance=-50)
    reader["placed"][0]["chunk"]["parts"] = [
        medium(source=str(tmp_path / "secret.png"), media="image", shape=[1, 8, 8])
    ]
    for name, state in {"a1": liar, "a2": reader, "a3": true, "a4": [], "a5": true}.items():
        if isinstance(state, dict):
            state = {**state, "window": name if name != "a5" else "other"}
        record = {"state": state, "mac": "0", "answers": {"0": ["0", "a lie"]}}
        assert repo.store.commit(f"window/{name}", json.dumps(record).encode(), 1)
    assert [call(server, f"/v1/windows/a{i}")[0] for i in range(1, 6)] == [404, 404, 200, 404, 404]


def test_planted_uploads_are_unknown(server: Server, snapshot: str) -> None:
    repo = server.engines[""].repo
    chunk = Chunk.text("another one").model_dump(mode="json")
    for i, record in enumerate((chunk, [], {"parts": 1}, "x")):
        assert repo.put_json(f"upload/{i:064x}", record, bound=False)
        assert call(server, f"/v1/chunks/{i:064x}")[0] == 404
    assert call(server, f"/v1/chunks/{0:064x}", method="DELETE")[0] == 404


def test_a_snapshot_that_does_not_is_taken(server: Server, snapshot: str) -> None:
    status, answer = call(server, "/v1/windows", {"snapshot": json.loads(snapshot)})
    assert (status, answer["tokens"]) == (200, json.loads(snapshot)["system_prompt_tokens"] + 4)


def test_a_snapshot_that_names_more_antecedents_than_values_are_taken_is_refused(server: Server) -> None:
    """A few bytes must not become a list of thousands of ids, a thousand times over."""
    window = open_window(server, budget=500)
    call(server, f"/v1/windows/{window}/extend", {"chunks": [{"type": "text", "text": f"{i}"} for i in range(3)]})
    call(server, f"/v1/windows/{window}/ask", {"query": "?", "max_tokens": 1})
    state = call(server, f"/v1/windows/{window}/snapshot")[1]
    assert call(server, "/v1/windows", {"snapshot": {**state, "window": ""}})[0] == 200
    ids, placed, orders = [f"{i}" for i in range(5000)], state["placed"][-1], state.pop("orders")
    steps = [4, 4] * 100_000
    for antecedents, named in [
        ([0, 0, 4000, 0], {"orders": [[ids, []]]}),
        ([0, 0, 5, len(steps)], {"orders": [[ids, steps]]}),
    ]:
        many = [{**placed, "id": f"p{i}", "kv": {**placed["kv"], "antecedents": antecedents}} for i in range(100)]
        status, answer = call(server, "/v1/windows", {"snapshot": {**state, **named, "placed": many}})
        assert status == 413 and "antecedents" in answer["error"]["message"]
    few = {**placed, "kv": {**placed["kv"], "antecedents": [0, 0, 5, 2]}}
    assert (
        call(server, "/v1/windows", {"snapshot": {**state, "orders": [[ids, [4, 4]]], "placed": [few], "window": ""}})[
            0
        ]
        == 200
    )
    assert call(server, "/v1/windows", {"snapshot": {**state, "orders": orders, "window": ""}})[0] == 200
