"""Images that arrive again are not decoded again, and stay what vLLM makes of them."""

from __future__ import annotations

import asyncio
import base64
import io
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

decoded_images = pytest.importorskip("ctxwin_vllm.decoded_images", reason="vLLM is not installed", exc_type=ImportError)

from vllm.multimodal.media import MediaConnector  # noqa: E402
from vllm.multimodal.media.image import ImageMediaIO  # noqa: E402


def url(seed: int, size: int = 40, mode: str = "RGB", form: str = "PNG") -> str:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (size, size, len(mode)), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise, mode).save(file, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls that decode an image, from an empty cache on, with room for three of `url`."""
    monkeypatch.setattr(decoded_images, "_decoded", decoded_images.LRUCache(3 * 12_000))
    with mock.patch.object(ImageMediaIO, "load_bytes", autospec=True, side_effect=ImageMediaIO.load_bytes) as calls:
        yield calls


def fetch(
    address: str, mode: str | None = "RGB", connector: type = decoded_images.DecodedImages, **options: Any
) -> Any:
    return asyncio.run(connector(media_io_kwargs={"image": options}).fetch_image_async(address, image_mode=mode))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_what_arrives_again_is_what_vllm_decodes(decoded: Any, mode: str, form: str) -> None:
    address = url(1, mode="RGB" if mode == "L" else mode, form=form)
    want = fetch(address, connector=MediaConnector)
    first, again = fetch(address), fetch(address)
    assert decoded.call_count == 2
    for got in (first, again):
        assert (np.asarray(got.media) == np.asarray(want.media)).all() and got.media.mode == want.media.mode
        assert (got.original_bytes, got.io_config) == (want.original_bytes, want.io_config)


def test_another_way_to_decode_is_another_image(decoded: Any) -> None:
    address = url(2, mode="RGBA")
    white, black = (fetch(address, rgba_background_color=[shade] * 3) for shade in (255, 0))
    kept = fetch(address, None)
    assert decoded.call_count == 3 and kept.media.mode == "RGBA"
    assert (np.asarray(white.media) != np.asarray(black.media)).any()


def test_the_least_recently_used_makes_room(decoded: Any) -> None:
    for seed in (1, 2, 1, 3, 4, 1):
        fetch(url(seed))
    assert decoded.call_count == 4
    fetch(url(2))
    assert decoded.call_count == 5
    fetch(url(9, size=300))
    fetch(url(9, size=300))  # larger than all there is room for
    assert decoded.call_count == 7


@pytest.mark.parametrize(
    "address", ["data:image/png;base64,AAAA", "data:image/png;base64,?", "data:image/png", "ftp://a/b"]
)
def test_what_is_no_image_is_refused_each_time_as_by_vllm(decoded: Any, address: str) -> None:
    said = []
    for connector in (MediaConnector, decoded_images.DecodedImages, decoded_images.DecodedImages):
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            fetch(address, connector=connector)
        said.append(str(refused.value).partition(" at 0x")[0])
    assert len(set(said)) == 1


def test_an_address_that_gives_no_picture_is_an_error_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    local = partial(decoded_images.DecodedImages, allowed_local_media_path=str(tmp_path))
    for address, connector in (
        ("http://127.0.0.1:9/a.png", local),  # nobody listens there
        ("http://no.such.host.invalid/a.png", local),
        (f"file://{tmp_path}/nothing.png", local),
        (f"file://{tmp_path}/text.png", local),
        (f"file://{tmp_path}/.", local),
        ("file:///etc/hostname", decoded_images.DecodedImages),
        ("data:,not-base64", decoded_images.DecodedImages),
    ):
        with pytest.raises(ValueError, match=r"must be|cannot identify|Only base64"):
            fetch(address, connector=connector)  # type: ignore[arg-type]
    (tmp_path / "good.png").write_bytes(base64.b64decode(url(1).partition(",")[2]))
    assert fetch(f"file://{tmp_path}/good.png", connector=local).media.size == (40, 40)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "http"])
def test_a_connector_that_the_operator_chose_stays(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(decoded_images.VARIABLE, raising=False)
    if given:
        monkeypatch.setenv(decoded_images.VARIABLE, given)
    decoded_images.use()
    assert decoded_images.os.environ[decoded_images.VARIABLE] == (given or "ctxwin")
