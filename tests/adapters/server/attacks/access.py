"""Attacks on what is not theirs to ask for: routes without a key, scores, URLs, arguments of templates."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

from adapters.server.attacks.content import text
from adapters.server.attacks.victim import Client, Victim, refused


def open_04_without_a_key(at: Victim) -> None:
    """Everything but health and metrics."""
    stranger = at.user("")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for path in (
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/v1/completions",
        "/v1/windows",
        "/v1/chunks",
        "/v1/models",
    ):
        status, answer = stranger.call(path, None if path == "/v1/models" else body)
        assert status == 401, (path, status, str(answer)[:100])


def attack_14_scores_in_any_spelling(at: Victim) -> None:
    """A whole vocabulary of log-probabilities for each token, asked for in ways that a filter may overlook."""
    ask_for_all_scores(at.user("mallory"))


def ask_for_all_scores(mallory: Client) -> None:
    plain = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for body in (
        json.dumps({**plain, "logprobs": 100_000}).encode(),
        json.dumps({**plain, "logprobs": 100_000}).replace("logprobs", "logprob\\u0073").encode(),
        json.dumps({**plain, "logprobs": -1}).encode("utf-16"),
        json.dumps({**plain, "prompt_logprobs": -1}).encode("utf-32-be"),
        json.dumps({**plain, "logprobs": "100000"}).encode(),
        json.dumps({**plain, "logprob_token_ids": list(range(50_000))}).encode(),
    ):
        refused(*mallory.call("/v1/completions", body))
    for path in ("/v1/chat/completions/batch", "/invocations", "/inference/v1/generate"):
        message = {"role": "user", "content": "x"}
        body = {"model": "tiny", "messages": [message], "max_tokens": 1, "logprobs": True, "top_logprobs": 50_000}
        refused(*mallory.call(path, body))


def open_14_scores_in_any_spelling(at: Victim) -> None:
    """As with tenants."""
    ask_for_all_scores(at.user("owner"))


def attack_18_nothing_is_fetched(at: Victim) -> None:
    """Pictures by URL: of this machine's own network, and one that two tenants would find in one cache."""
    mallory, heard = at.user("mallory"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    heard.append(connection)
                    connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            for given in (url, url.replace("http", "HTTP"), "file:///etc/passwd"):
                refused(*mallory.chat([{"type": "image_url", "image_url": {"url": given}}, text("?")]))
            window = mallory.window()
            chunk = {"type": "image", "image": url}
            refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": chunk}))
            mallory.close(window)
        finally:
            done.set()
            thread.join()
    assert not heard, "the server fetched a URL that a tenant named"


def attack_23_template_arguments(at: Victim) -> None:
    """Arguments of the tokenizer that pad to any length, as the report of them spelled it and as it did not."""
    mallory = at.user("mallory")
    for arguments in (
        {"tokenize": True, "padding": "max_length", "max_length": 20_000_000},
        {"padding": "max_length", "max_length": 10**8, "truncation": False},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**7}},
        {"enable_thinking": 10**18},
        {"documents": [{"title": "a" * 9, "text": 10**12}]},
        {"chat_template": "{{ 'x' * 10 ** 9 }}"},
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": arguments}
            refused(*mallory.call(path, body))
