"""Stage outputs over HTTP: an ask returns references, and whoever owns them fetches the tensors for the next stage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin import Answer, Chunk, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.outputs import HIDDEN, load_output
from ctxwin.errors import EngineFailed, OutputGone, StoreFull
from ctxwin.store import Store
from ctxwin.tiny import checkpoint_dir, world
from ctxwin_client import LiveStream, RemoteWindow, fetch_output
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.protocol.limits import Limits

HEADER, QUESTION = "You watch a camera.", "which color"
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(world.make_stream(seed=9, n_frames=3))]
EXACT = Fidelity("exact")


def stage(store: Store) -> HFEngine:
    return HFEngine(checkpoint_dir(), store=store, outputs=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tenants = [Tenant(name=name, keys=[f"key-{name}"]) for name in ("acme", "bolt")]
    with serving(Limits(max_output_bytes=100_000), tenants=tenants, make=stage) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Answer]:
    """What an embedded engine gives, without reuse."""
    with HFEngine(checkpoint_dir(), outputs=True) as engine, Window(engine, HEADER, fidelity=EXACT) as window:
        window.extend(CHUNKS)
        yield window.ask(QUESTION, max_tokens=4)


def test_a_next_stage_fetches_what_an_embedded_engine_gives(server: Server, local: Answer) -> None:
    client = server.client("key-acme")
    assert local.outputs is not None
    with RemoteWindow(client, HEADER, fidelity=EXACT) as window:
        window.extend(CHUNKS)
        stream = window.stream(QUESTION, max_tokens=4, outputs=[HIDDEN])
        list(stream)
        answers = [
            window.ask(QUESTION, max_tokens=4, outputs=[HIDDEN]),
            stream.answer,
            asyncio.run(window.aask(QUESTION, max_tokens=4, outputs=[HIDDEN])),
        ]
    first = answers[0]
    assert first is not None and first.outputs is not None
    for answer in answers:
        assert answer is not None and answer.token_ids == local.token_ids
        assert answer.outputs == first.outputs, "the same bytes have the same digest"
    reference = first.outputs[HIDDEN]
    rows = fetch_output(client, reference)
    assert torch.equal(rows, local.outputs[HIDDEN]) and rows.dtype == local.outputs[HIDDEN].dtype
    assert reference["shape"] == list(rows.shape) and reference["dtype"] == str(rows.dtype).removeprefix("torch.")
    assert rows.numel() * rows.element_size() < reference["bytes"] < 100_000 and reference["expires_in"] == 300


def test_a_live_stream_returns_references(server: Server) -> None:
    client = server.client("key-acme")
    with RemoteWindow(client, HEADER, fidelity=EXACT) as window:
        window.extend(CHUNKS[:1])
        with LiveStream(client, window.id) as live:
            answer = live.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])
        asked = window.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])
    assert answer.outputs is not None and answer.outputs == asked.outputs


def test_only_its_owner_fetches_an_output(server: Server) -> None:
    client, other = server.client("key-acme"), server.client("key-bolt", max_retries=0)
    with RemoteWindow(client, HEADER, fidelity=EXACT) as window:
        window.append(CHUNKS[0])
        answer = window.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])
        assert answer.outputs is not None
        assert window.ask(QUESTION, max_tokens=2).outputs is None, "nobody asked for them"
        with pytest.raises(ValueError, match=r"outputs must be of hidden_states, got logits"):
            window.ask(QUESTION, max_tokens=2, remember=True, outputs=["logits"])
        assert len(window.ids) == 1, "a refused ask must leave the window as it was"
    reference = answer.outputs[HIDDEN]
    with pytest.raises(OutputGone, match="ask again"):
        fetch_output(other, reference)
    status, body = call(server, f"/v1{reference['path']}", authorization="Bearer key-bolt")
    assert status == 404 and body["error"]["code"] == "output_gone"
    with pytest.raises(EngineFailed, match="must have its digest"):
        load_output(b"others", reference)
    assert len(fetch_output(client, reference)) == reference["shape"][0]


def test_older_outputs_give_way_and_too_large_ones_are_refused(server: Server) -> None:
    client = server.client("key-bolt", max_retries=0)
    with RemoteWindow(client, HEADER, fidelity=EXACT) as window:
        references = []
        for chunk in CHUNKS:
            window.append(chunk)
            answer = window.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])
            assert answer.outputs is not None
            references.append(answer.outputs[HIDDEN])
        assert sum(reference["bytes"] for reference in references) > 100_000
        fetch_output(client, references[-1])
        with pytest.raises(OutputGone):
            fetch_output(client, references[0])
        window.extend(CHUNKS[1:] * 3)
        with pytest.raises(StoreFull, match="--max-output-bytes"):
            window.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])


def test_a_server_without_outputs_says_so() -> None:
    refused = pytest.raises(ValueError, match="open the engine with outputs=True")
    with serving() as running, RemoteWindow(running.client(max_retries=0), HEADER) as window, refused:
        window.ask(QUESTION, max_tokens=2, outputs=[HIDDEN])
