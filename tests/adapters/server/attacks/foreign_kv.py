"""Attacks on what others are served: KV, names of media, records in the store."""

from __future__ import annotations

import contextlib
import os
import random
import time

from adapters.server.attacks.content import long_text, png, text
from adapters.server.attacks.victim import REFUSED, Client, Victim, refused
from ctxwin.engines.encoding.checkpoint import open_checkpoint
from ctxwin.hashing import digest
from ctxwin.tiny import checkpoint_dir, world


def attack_02_forged_snapshots(at: Victim) -> None:
    """KV of another place under the provenance of an exact one, in the tenant of those who are to be served it.

    The true provenance is learnt in another tenant, where nobody has reason to object.
    """
    mallory, lab = at.user("mallory"), at.user("laboratory")
    wrong, tried = [], 3
    for _ in range(tried):
        seed = random.getrandbits(40)
        shown, hidden, later = long_text(seed), long_text(seed, backwards=True), long_text(seed + 1)
        exact = {"fidelity": {"mode": "exact"}}
        windows = [(lab, lab.window(chunks=[shown, later], **exact))]
        windows.append((mallory, mallory.window(chunks=[hidden, later], **exact)))
        states = []
        for who, window in windows:
            assert who.ask(window, "why?")[0] == 200
            states.append(who.call(f"/v1/windows/{window}/snapshot")[1])
        forged, foreign = states
        first, second = forged["placed"]
        first["kv"] = None
        first["seen"] = False
        second["kv"] = {
            **foreign["placed"][1]["kv"], "provenance": second["kv"]["provenance"], "antecedents": [first["id"]]
        }  # fmt: skip
        forged["window"] = "0" * 12
        forged["fidelity"]["mode"] = "patched"
        status, made = mallory.call("/v1/windows", {"snapshot": forged})
        if status == 200:
            mallory.ask(made["id"], "why?")
            windows.append((mallory, made["id"]))
        else:
            refused(status, made)
        truth = lab.ask(windows[0][1], "what stood there?", 1, logprobs=5)[1]["first_token_logprobs"]
        windows.append((mallory, mallory.window(chunks=[shown, later], **exact)))
        status, served = mallory.ask(windows[-1][1], "what stood there?", 1, logprobs=5)
        assert status == 200, served
        mine = served["first_token_logprobs"]
        gaps = [abs(float(p) - float(mine[i])) if i in mine else 9.0 for i, p in truth.items()]
        if max(gaps) > 1e-3:
            wrong.append(max(gaps))
        for who, window in windows:
            who.close(window)
    assert not wrong, f"{len(wrong)} of {tried} exact windows are off by up to {max(wrong):.3g} nats"


def named_picture(mallory: Client, victim: Client, tenant: str) -> float:
    """Sends another picture under the names that might follow from content, then asks a window that shows the true one.

    Returns:
        By how many nats the window's answer is off a plain chat's about the same picture, which has no name.
    """
    seed = random.getrandbits(30)
    shown, other = (png(world.render(world.make_stream(seed=seed + i, n_frames=1)[0])) for i in (0, 1))
    question, prompt = f"what is at the top left of {seed}?", f"You watch camera {seed}."
    window = victim.window(prompt, fidelity={"mode": "exact"}, chunks=[{"type": "image", "image": shown}])
    state = victim.call(f"/v1/windows/{window}/snapshot")[1]
    part = next(part for part in state["placed"][0]["chunk"]["parts"] if part["kind"] == "media")
    identity = open_checkpoint(checkpoint_dir()).identity("float32", "vllm")
    assert digest("vllm", identity) == state["engine"], "the attack must know the model as its attacker would"
    key = digest("embed", identity, part["content"], list(part["shape"]), "image", None)
    for name in (key, digest("tenant", tenant, key)):
        forged = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}, "uuid": name}]
        for path in ("/v1/chat/completions", "/invocations"):
            message = {"role": "user", "content": [*forged, text("what is it?")]}
            status, answer = mallory.call(path, {"model": "tiny", "max_tokens": 1, "messages": [message]})
            assert status in (200, *REFUSED), answer
    status, asked = victim.ask(window, question, 1, logprobs=5)
    assert status == 200, asked
    victim.close(window)
    url = f"data:image/png;base64,{shown}"
    messages = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text(question)]},
    ]
    body = {
        "model": "tiny",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "messages": messages,
    }
    status, told = victim.call("/v1/chat/completions", body)
    assert status == 200, told
    best = [token["logprob"] for token in told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    mine = sorted(map(float, asked["first_token_logprobs"].values()), reverse=True)
    return max(abs(one - two) for one, two in zip(mine, sorted(best, reverse=True), strict=False))


def attack_03_names_of_media(at: Victim) -> None:
    """Another picture under the name that a window's picture might have inside vLLM."""
    mallory = at.user("mallory")
    assert named_picture(mallory, mallory, "mallory") < 1e-3


def open_03_names_of_media(at: Victim) -> None:
    """As with tenants; the second time by somebody who has no key."""
    owner = at.user("owner")
    assert (gap := named_picture(owner, owner, "")) < 1e-3, f"a window's answer is off by {gap:.3g} nats"
    assert (gap := named_picture(at.user(""), owner, "")) < 1e-3, f"without a key, off by {gap:.3g} nats"


def attack_13_store_is_damaged(at: Victim) -> None:
    """Whoever can write to the store's folder turns bits, cuts files and puts pipes in their place, and harms no answer."""
    if not at.store.is_dir():
        return
    chance = random.Random()
    blobs = [f for f in at.store.rglob("*") if f.is_file() and f.stat().st_size > 64 and ".db" not in f.name]
    for blob in chance.sample(blobs, min(4, len(blobs))):
        with contextlib.suppress(OSError):
            raw = bytearray(blob.read_bytes())
            how = chance.randrange(3)
            if how == 0:
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                blob.write_bytes(raw)
            elif how == 1:
                blob.write_bytes(raw[: len(raw) // 2])
            else:
                blob.unlink()
                os.mkfifo(blob)
    time.sleep(1)
