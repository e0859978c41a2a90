"""Blobs come back bit for bit, and nothing that was touched comes back at all."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec
from ctxwin.store.codec import decode_bytes, decode_tensors, encode_bytes, encode_tensors

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Arbitrary bits of any dtype, NaN payloads included."""
    dtype = getattr(torch, draw(st.sampled_from(codec.DTYPES)))
    shape = draw(SHAPES)
    count = 1
    for n in shape:
        count *= n
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(b & 1 for b in raw)
    if not count:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), tensors(), max_size=4), st.dictionaries(st.text(), JSON, max_size=4))
def test_tensors_round_trip(given_tensors: dict[str, torch.Tensor], meta: dict[str, object]) -> None:
    blob = encode_tensors(given_tensors, meta)
    assert blob == encode_tensors(dict(reversed(given_tensors.items())), meta)
    pieces = codec.tensor_pieces({name: tensor.contiguous() for name, tensor in given_tensors.items()}, meta)
    assert b"".join(pieces) == encode_tensors(given_tensors, meta, checked=False)
    got, got_meta = decode_tensors(blob)
    assert got_meta == meta
    assert got.keys() == given_tensors.keys()
    for name, tensor in given_tensors.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[name]) == bits(tensor)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.dictionaries(st.text(), JSON, max_size=3))
def test_bytes_round_trip(payload: bytes, meta: dict[str, object]) -> None:
    assert decode_bytes(encode_bytes(payload, meta)) == (payload, meta)


BLOB = encode_tensors({"k": torch.arange(40.0).bfloat16(), "v": torch.arange(7)}, {"token_ids": [1, 2, 3]})


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(BLOB) * 8 - 1))
def test_every_bit_is_checked(bit: int) -> None:
    touched = bytearray(BLOB)
    touched[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StoreCorrupt):
        decode_tensors(bytes(touched))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(BLOB) - 1), st.binary(min_size=1, max_size=40))
def test_every_byte_counts(length: int, more: bytes) -> None:
    for blob in (BLOB[:length], BLOB + more, BLOB[:length] + more):
        if blob != BLOB:
            with pytest.raises(StoreCorrupt):
                decode_tensors(blob)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_corrupt(garbage: bytes) -> None:
    for blob in (garbage, codec.MAGIC + garbage):
        with pytest.raises(StoreCorrupt):
            decode_tensors(blob)
        with pytest.raises(StoreCorrupt):
            decode_bytes(blob)


def sealed(kind: int, header: object, body: bytes = b"", version: int = codec.VERSION) -> bytes:
    """A blob with a right checksum around anything, made without the codec's own writer."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = codec.PREFIX.pack(codec.MAGIC, version, kind, len(text), len(body), codec.SUM_BYTES) + text
    raw = head + bytes(-len(head) % 64) + body
    return raw + hashlib.sha256(raw).digest()


def entry(**changes: object) -> dict[str, object]:
    return {"meta": {}, "tensors": [{"name": "a", "dtype": "int64", "shape": [2], "offset": 0, **changes}]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json", b"[]", b"\xff\xfe", b"[" * 100_000, {}, {"meta": {}}, {"tensors": []}, {"meta": [], "tensors": []},
        {"meta": {}, "tensors": ["a"]}, {"meta": {}, "tensors": [{}]}, entry(dtype="object"), entry(dtype="Tensor"),
        entry(dtype=["int64"]), entry(shape=[-2]), entry(shape=[2, 2]), entry(shape=[1]), entry(shape=["2"]),
        entry(shape=[True, 2]), entry(shape=[1 << 60, 1 << 60]), entry(shape=[1 << 47, 1 << 47, 0]), entry(shape=None),
        entry(shape=[1] * 100), entry(offset=1 << 62), entry(offset=-64), entry(offset=64), entry(offset=1.0),
        entry(name=7), entry(extra=1),
        {"meta": {}, "tensors": [*entry()["tensors"], *entry(offset=64)["tensors"]]},  # type: ignore[misc]
    ],
    ids=str,
)  # fmt: skip
def test_a_right_checksum_is_not_enough(header: object) -> None:
    with pytest.raises(StoreCorrupt):
        decode_tensors(sealed(codec.TENSORS, header, bytes(16)))


def test_the_sealed_helper_is_readable() -> None:
    got, _ = decode_tensors(sealed(codec.TENSORS, entry(), bytes(16)))
    assert got["a"].tolist() == [0, 0]


def test_absurd_lengths_are_refused_before_anything_is_allocated() -> None:
    for header_bytes, body_bytes in ((2**32 - 1, 0), (0, 2**64 - 1), (2**32 - 1, 2**64 - 1)):
        head = codec.PREFIX.pack(codec.MAGIC, codec.VERSION, codec.TENSORS, header_bytes, body_bytes, 32)
        with pytest.raises(StoreCorrupt):
            decode_tensors(head + bytes(200))


def test_kinds_and_versions_are_not_mixed() -> None:
    with pytest.raises(StoreCorrupt, match="kind"):
        decode_tensors(encode_bytes(b"x", {}), checked=False)
    with pytest.raises(StoreCorrupt, match="kind"):
        decode_bytes(encode_tensors({}, checked=False))
    with pytest.raises(StoreCorrupt, match="version"):
        decode_tensors(sealed(codec.TENSORS, {"meta": {}, "tensors": []}, version=1))


def test_tensors_are_aligned_views_of_the_blob() -> None:
    blob = encode_tensors({"a": torch.ones(3), "b": torch.ones(5, dtype=torch.int8), "c": torch.ones(2)})
    start = torch.frombuffer(bytearray(1), dtype=torch.uint8)
    got, _ = decode_tensors(blob)
    offsets = [got[n].data_ptr() - got["a"].data_ptr() for n in "abc"]
    assert offsets == [0, 64, 128]
    assert got["a"].untyped_storage().data_ptr() != start.untyped_storage().data_ptr()
    whole = torch.frombuffer(blob, dtype=torch.uint8)
    inside = got["a"].data_ptr() - whole.data_ptr()
    assert 0 < inside < len(blob)
    assert inside % 64 == 0


def test_views_keep_the_blob_alive() -> None:
    got = decode_tensors(encode_tensors({"a": torch.arange(50_000)}))[0]["a"]
    junk = [bytes(400_000) for _ in range(20)]
    assert torch.equal(got, torch.arange(50_000))
    del junk


def test_decoding_never_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures: list[BaseException] = []

        def work() -> None:
            try:
                decode_tensors(BLOB)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()], ids=["complex", "sparse"]
)
def test_refuses_what_has_no_raw_form(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="must be dense"):
        encode_tensors({"a": tensor})


def test_meta_must_be_plain_json() -> None:
    with pytest.raises(TypeError):
        encode_bytes(b"", {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        encode_bytes(b"", {"a": float("nan")})


def test_a_blob_without_a_checksum_is_no_blob_with_one() -> None:
    bare = encode_tensors({"a": torch.ones(2)}, checked=False)
    assert len(bare) + 32 == len(encode_tensors({"a": torch.ones(2)}))
    assert decode_tensors(bare, checked=False)[0]["a"].tolist() == [1, 1]
    with pytest.raises(StoreCorrupt, match="with a checksum"):
        decode_tensors(bare)
    with pytest.raises(StoreCorrupt, match="without a checksum"):
        decode_tensors(encode_tensors({}), checked=False)


SECRET = b"sixteen bytes or more"
SEALS = {"plain": codec.Seal(), "keyed": codec.Seal(SECRET)}


def record(seal: codec.Seal, key: str, value: bytes) -> bytes:
    head, code = seal.close(key, value)
    return head + value + code


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SEALS)), st.binary(max_size=90))
def test_a_record_comes_back(name: str, value: bytes) -> None:
    assert SEALS[name].open("span/a", record(SEALS[name], "span/a", value)) == value


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SEALS)), st.data())
def test_every_bit_of_a_record_is_checked(name: str, data: st.DataObject) -> None:
    whole = record(SEALS[name], "span/a", b"value" * 20)
    touched = bytearray(whole)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    touched[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StoreCorrupt):
        SEALS[name].open("span/a", bytes(touched))


def test_a_record_opens_under_its_own_key_and_secret_only() -> None:
    others = [*SEALS.values(), codec.Seal(b"another secret of a store")]
    for seal in SEALS.values():
        whole = record(seal, "span/a", b"value")
        with pytest.raises(StoreCorrupt, match="another key"):
            seal.open("span/b", whole)
        for other in others:
            if other is not seal:
                with pytest.raises(StoreCorrupt):
                    other.open("span/a", whole)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        codec.Seal(b"short")
