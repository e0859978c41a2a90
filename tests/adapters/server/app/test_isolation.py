"""Plain requests are bound to their tenant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxwin_client.errors import NotAllowed
from ctxwin_server.app.isolation import bind, check_scores, most_scores
from ctxwin_server.protocol.limits import Allowance, Limits

FREE = Allowance(Limits())


def no_video(raw: bytes) -> tuple[int, int]:
    raise AssertionError("no video is sent")


def test_names_of_requests_and_media_are_a_tenants_own() -> None:
    """vLLM keeps responses by the request id that a client may choose, and media by their uuid, for all tenants."""

    def bound(tenant: str, name: Any) -> tuple[Any, Any]:
        image = {"type": "image_url", "image_url": {"url": "http://host/cat.png"}, "uuid": name}
        body = {"request_id": name, "messages": [{"role": "user", "content": [image]}]}
        made = json.loads(bind("/v1/chat/completions", body, tenant, "salt", FREE, fetch=True, video_size=no_video))
        return made["request_id"], made["messages"][0]["content"][0]["uuid"]

    for name in ("resp_1", "", 5, ["x"]):
        one, other = bound("acme", name), bound("bolt", name)
        assert not {*one} & {*other} and one == bound("acme", name)
    assert bound("", "resp_1") == ("resp_1", "resp_1")


def test_a_tenant_without_a_salt_gets_no_shared_blocks() -> None:
    with pytest.raises(NotAllowed):
        bind("/v1/chat/completions", {"messages": []}, "acme", "", FREE, video_size=no_video)
    assert json.loads(bind("/v1/chat/completions", {"messages": []}, "", "", FREE, video_size=no_video)) == {
        "messages": []
    }


def test_all_scores_may_be_asked_for_where_the_limit_holds_them() -> None:
    """As vLLM reads -1: the size of the vocabulary."""
    asked = {"prompt_logprobs": -1}
    check_scores(asked, most_scores(500, vocabulary=500))
    check_scores(asked, most_scores(-1, vocabulary=500))
    with pytest.raises(ValueError, match=r"prompt_logprobs must be in 0\.\.499, got -1"):
        check_scores(asked, most_scores(499, vocabulary=500))
