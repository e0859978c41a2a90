# mypy: disable-error-code="import-untyped,import-not-found,misc"
"""The load kernel for CPUs as LLVM IR: patch, rotation, rounding and the write of many layers in one pass.

The IR is of vectors as wide as the processor's registers and compiled for the processor at hand by llvmlite, which vLLM
brings along with numba; no compiler is needed and nothing is cached, for a layout takes a fraction of a second. Python's lock
is released during a call.

Arithmetic is float32, and each number is rounded once. Products of bfloat16 factors take the processor's own dot products,
where it has them: two products, which are exact, are added to a float32 sum.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir

Mode = Literal["copy", "turn", "product", "dense"]
MODES: tuple[Mode, ...] = ("copy", "turn", "product", "dense")
"""What a part's keys and values go through: nothing; keys turn; a patch's product, or its delta, is added as well."""
TILE = 16
"""Tokens that are written together; of one block, where a block's keys lie dimension by dimension."""
FIELDS = (
    *("mode", "tiles", "count", "k", "k_token", "k_head", "v", "v_token", "v_head"),
    *("left", "left_token", "right_k", "right_v", "right_row", "rank", "turn", "frame"),
    *("out_k", "out_v", "k_at", "v_at"),
)
"""A row of the table, one for each part and layer; int64. Addresses: ``tiles [count, 2]`` (first token, tokens), ``k`` and ``v``
of the first token and head, ``left [T, rank]``, ``right_k`` and ``right_v`` (columns of the first head; dense: of the first
token's delta), ``turn`` and ``frame`` ``[T, 2, half]`` (cosine and sine; of what stored keys and what a patch adds turn by),
``out_k`` and ``out_v``, and ``k_at`` and ``v_at [T]``, where each token is written from there. The others count numbers."""

_I64, _I32, _I16, _F32 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_FLAGS = ("contract",)
_TYPES = {"bfloat16": _I16, "float16": ir.HalfType(), "float32": _F32}


@dataclass(frozen=True)
class Layout:
    """What a kernel is compiled for.

    Attributes:
        heads, k_dim, v_dim: of what is served.
        half, interleaved: pairs of a key that turn, and whether they are neighbours.
        source_dtype, factor_dtype, dtype: of what is read, of factors, and of what is written.
        transposed: whether a block's keys lie dimension by dimension, its tokens side by side.
    """

    heads: int
    k_dim: int
    v_dim: int
    half: int
    interleaved: bool
    source_dtype: str
    factor_dtype: str
    dtype: str
    transposed: bool


def supports(dtype: str) -> bool:
    """Return True if the processor converts ``dtype`` itself; see `Layout`."""
    if dtype == "float16":
        return bool(_features().get("f16c")) or llvm.get_process_triple().startswith(("aarch64", "arm64"))
    return dtype in _TYPES


@lru_cache(maxsize=64)
def compile_layout(layout: Layout) -> Callable[[int, int, int, int, int], None]:
    """Return the kernel of a layout: ``(table, rows, k_head, v_head, k_step)``.

    ``table`` is the address of rows of `FIELDS`; the strides are those of what is written to, in numbers. Cost: a
    fraction of a second, once.
    """
    machine = _machine()
    module = llvm.parse_assembly(str(_Emitter(layout).module))
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(engine.get_function_address("load"))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features().flatten(), opt=3, jit=True, codemodel="jitdefault"
    )


@lru_cache(maxsize=1)
def _features() -> Any:
    return llvm.get_host_cpu_features()


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOAT = _Bfloat()


@dataclass(frozen=True)
class _Row:
    """The fields of a part and layer, and of the tokens of a group their numbers in the part."""

    fields: dict[str, Any]
    tokens: list[Any]


class _Emitter:
    """The module of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        wide = bool(_features().get("avx512f"))
        self.lanes, self.group = (16, 8) if wide else (8, 4)
        self.bfloats = wide and bool(_features().get("avx512bf16"))
        self.module = ir.Module("load")
        self.module.triple = llvm.get_process_triple()
        signature = ir.FunctionType(ir.VoidType(), [_I64] * 5)
        self.parts = [self._part(mode) for mode in MODES]
        entry = ir.Function(self.module, signature, "load")
        self.b = ir.IRBuilder(entry.append_basic_block())
        table, rows, *strides = entry.args
        with self._loop(rows) as row:
            fields = self.b.add(table, self.b.mul(row, _int(8 * len(FIELDS))))
            mode = self.b.load(self._pointer(fields, _I64))
            for number, part in enumerate(self.parts):
                with self.b.if_then(self.b.icmp_signed("==", mode, _int(number))):
                    self.b.call(part, [fields, *strides])
        self.b.ret_void()

    def _part(self, mode: Mode) -> Any:
        """Return the function that serves one part of one layer."""
        layout, group = self.layout, self.group
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64] * 4), mode)
        function.linkage = "internal"
        b = self.b = ir.IRBuilder(function.append_basic_block())
        table, k_head, v_head, k_step = function.args
        dtype = _TYPES[layout.dtype]
        scratch = b.ptrtoint(b.alloca(ir.ArrayType(dtype, TILE * layout.k_dim)), _I64)
        f = {name: b.load(self._pointer(b.add(table, _int(8 * i)), _I64)) for i, name in enumerate(FIELDS)}
        with self._loop(f["count"]) as tile:
            at = b.add(f["tiles"], b.mul(tile, _int(16)))
            first, count = b.load(self._pointer(at, _I64)), b.load(self._pointer(b.add(at, _int(8)), _I64))
            last = b.sub(count, _int(1))
            with self._loop(_int(layout.heads)) as head:
                target = self._step(f["out_k"], b.mul(head, k_head), layout.dtype)
                with self._loop(count, group) as begin:
                    numbers = [b.add(begin, _int(i)) for i in range(group)]
                    numbers = [b.select(b.icmp_signed("<", i, last), i, last) for i in numbers]
                    row = _Row(f, [b.add(first, i) for i in numbers])
                    if layout.transposed:
                        outs = [self._step(scratch, b.mul(i, _int(layout.k_dim)), layout.dtype) for i in numbers]
                    else:
                        outs = self._places(target, f["k_at"], row)
                    self._keys(mode, row, head, outs)
                    out_v = self._step(f["out_v"], b.mul(head, v_head), layout.dtype)
                    self._values(mode, row, head, self._places(out_v, f["v_at"], row))
                if layout.transposed:
                    at = b.load(self._pointer(b.add(f["k_at"], b.mul(first, _int(8))), _I64))
                    self._transpose(scratch, self._step(target, at, layout.dtype), k_step, count)
        b.ret_void()
        return function

    def _places(self, base: Any, at: Any, row: _Row) -> list[Any]:
        """Where the tokens of a group are written."""
        b = self.b
        offsets = [b.load(self._pointer(b.add(at, b.mul(i, _int(8))), _I64)) for i in row.tokens]
        return [self._step(base, offset, self.layout.dtype) for offset in offsets]

    def _keys(self, mode: Mode, row: _Row, head: Any, outs: list[Any]) -> None:
        b, layout = self.b, self.layout
        sources = self._sources(row, head, "k")
        right = self._right(mode, row, head, "right_k", layout.k_dim)
        half = layout.half
        if mode == "copy":
            self._pass(mode, row, sources, right, outs, 0, layout.k_dim)
            return
        lanes = math.gcd(half, self.lanes)
        with self._loop(_int(half), lanes) as pair:
            first = b.mul(pair, _int(2)) if layout.interleaved else pair
            columns = [first, b.add(first, _int(lanes if layout.interleaved else half))]
            additions = self._added(mode, row, right, columns, lanes)
            for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
                x, y = self._split([self._read(source, c, layout.source_dtype, lanes) for c in columns], lanes)
                kx, ky = self._turn(x, y, row.fields["turn"], row.tokens[i], pair, lanes)
                if additions:
                    dx, dy = self._split(additions[i], lanes)
                    dx, dy = self._turn(dx, dy, row.fields["frame"], row.tokens[i], pair, lanes)
                    kx, ky = b.fadd(kx, dx, flags=_FLAGS), b.fadd(ky, dy, flags=_FLAGS)
                for column, value in zip(columns, self._join(kx, ky, lanes), strict=True):
                    self._write(out, column, value, lanes)
        self._pass(mode, row, sources, right, outs, 2 * half, layout.k_dim)

    def _values(self, mode: Mode, row: _Row, head: Any, outs: list[Any]) -> None:
        sources = self._sources(row, head, "v")
        right = self._right(mode, row, head, "right_v", self.layout.v_dim)
        self._pass(mode, row, sources, right, outs, 0, self.layout.v_dim)

    def _pass(
        self, mode: Mode, row: _Row, sources: list[Any], right: Any, outs: list[Any], begin: int, end: int
    ) -> None:
        """Numbers that do not turn."""
        if begin == end:
            return
        b, layout = self.b, self.layout
        lanes = math.gcd(end - begin, self.lanes)
        many = 2 if (end - begin) % (2 * lanes) == 0 else 1
        with self._loop(_int(end - begin), lanes * many) as at:
            columns = [b.add(at, _int(begin + lanes * i)) for i in range(many)]
            additions = self._added(mode, row, right, columns, lanes)
            for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
                for c, column in enumerate(columns):
                    if not additions and layout.source_dtype == layout.dtype:
                        value = self._load(source, column, layout.source_dtype, lanes)
                        self._store(out, column, value, layout.dtype)
                        continue
                    value = self._read(source, column, layout.source_dtype, lanes)
                    if additions:
                        value = b.fadd(value, additions[i][c], flags=_FLAGS)
                    self._write(out, column, value, lanes)

    def _sources(self, row: _Row, head: Any, side: str) -> list[Any]:
        b, f = self.b, row.fields
        offsets = [b.add(b.mul(i, f[f"{side}_token"]), b.mul(head, f[f"{side}_head"])) for i in row.tokens]
        places = [self._step(f[side], offset, self.layout.source_dtype) for offset in offsets]
        # The next tile's numbers are fetched meanwhile; a hint at what lies behind a span does nothing.
        ahead, byte = (
            self._step(_int(0), b.mul(f[f"{side}_token"], _int(TILE)), self.layout.source_dtype),
            ir.IntType(8),
        )
        fetch = self._declare("llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(byte), _I32, _I32, _I32])
        size = (self.layout.k_dim if side == "k" else self.layout.v_dim) * _size(self.layout.source_dtype)
        for place, line in product(places, range(0, size, 64)):
            address = self._pointer(b.add(b.add(place, ahead), _int(line)), byte)
            b.call(fetch, [address, _i32(0), _i32(3), _i32(1)])
        return places

    def _right(self, mode: Mode, row: _Row, head: Any, name: str, dim: int) -> Any:
        if mode in ("copy", "turn"):
            return None
        return self._step(row.fields[name], self.b.mul(head, _int(dim)), self.layout.factor_dtype)

    def _added(self, mode: Mode, row: _Row, right: Any, columns: list[Any], lanes: int) -> list[list[Any]]:
        """What a patch adds to some columns of each token of a group; nothing where there is no patch."""
        b, f, factors = self.b, row.fields, self.layout.factor_dtype
        if mode == "dense":
            rows = [self._step(right, b.mul(i, f["right_row"]), factors) for i in row.tokens]
            return [[self._read(at, c, factors, lanes) for c in columns] for at in rows]
        if mode != "product":
            return []
        lefts = [self._step(f["left"], b.mul(i, f["left_token"]), factors) for i in row.tokens]
        zero = ir.Constant(ir.VectorType(_F32, lanes), [0.0] * lanes)
        sums = [zero] * (len(lefts) * len(columns))
        if self.bfloats and factors == "bfloat16" and lanes == 16:
            pairs = b.and_(f["rank"], _int(-2))
            sums = self._sum(sums, pairs, 2, lambda j, s: self._dot(s, lefts, right, f["right_row"], columns, j, True))
            odd = b.sub(f["rank"], pairs)
            sums = self._sum(
                sums, odd, 1, lambda _, s: self._dot(s, lefts, right, f["right_row"], columns, pairs, False)
            )
        else:
            sums = self._sum(sums, f["rank"], 1, lambda j, s: self._products(s, lefts, right, f, columns, j, lanes))
        return [sums[i : i + len(columns)] for i in range(0, len(sums), len(columns))]

    def _products(
        self, sums: list[Any], lefts: list[Any], right: Any, f: dict[str, Any], columns: list[Any], j: Any, lanes: int
    ) -> list[Any]:
        """Sums with one direction's products added."""
        b, factors = self.b, self.layout.factor_dtype
        rows = self._step(right, b.mul(j, f["right_row"]), factors)
        vectors = [self._read(rows, c, factors, lanes) for c in columns]
        new = []
        for i, left_row in enumerate(lefts):
            number = self._splat(b.extract_element(self._read(left_row, j, factors, 1), _i32(0)), lanes)
            for c, vector in enumerate(vectors):
                product = b.fmul(number, vector, flags=_FLAGS)
                new.append(b.fadd(sums[i * len(columns) + c], product, flags=_FLAGS))
        return new

    def _dot(
        self, sums: list[Any], lefts: list[Any], right: Any, row: Any, columns: list[Any], j: Any, both: bool
    ) -> list[Any]:
        """Sums with two directions' products added, or the last one's, by the processor's dot products."""
        b, lanes = self.b, 16
        wide, bfloats = ir.VectorType(_F32, lanes), ir.VectorType(_BFLOAT, 2 * lanes)
        dot = self._declare("llvm.x86.avx512bf16.dpbf16ps.512", wide, [wide, bfloats, bfloats])
        at = self._step(right, b.mul(j, row), "bfloat16")
        zip_ = ir.Constant(ir.VectorType(_I32, 2 * lanes), [i // 2 + i % 2 * lanes for i in range(2 * lanes)])
        vectors = []
        for c in columns:
            first = self._load(at, c, "bfloat16", lanes)
            zero = ir.Constant(ir.VectorType(_I16, lanes), [0] * lanes)
            second = self._load(self._step(at, row, "bfloat16"), c, "bfloat16", lanes) if both else zero
            vectors.append(b.bitcast(b.shuffle_vector(first, second, zip_), bfloats))
        new = []
        for i, left_row in enumerate(lefts):
            place = self._step(left_row, j, "bfloat16")
            number = b.load(self._pointer(place, _I32 if both else _I16), align=2)
            number = number if both else b.zext(number, _I32)
            pair = b.bitcast(self._splat(number, lanes), bfloats)
            new += [b.call(dot, [sums[i * len(columns) + c], pair, vector]) for c, vector in enumerate(vectors)]
        return new

    def _sum(self, sums: list[Any], count: Any, step: int, add: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Return sums that ``add`` has added to for each direction from 0 to ``count``, ``step`` at a time."""
        values = list(sums)
        with self._loop(count, step, values) as j:
            values[:] = add(j, list(values))
        return values

    def _turn(self, x: Any, y: Any, table: Any, token: Any, pair: Any, lanes: int) -> tuple[Any, Any]:
        b, half = self.b, self.layout.half
        at = self._step(table, b.add(b.mul(token, _int(2 * half)), pair), "float32")
        cos, sin = self._load(at, _int(0), "float32", lanes), self._load(at, _int(half), "float32", lanes)
        xc, yc = b.fmul(x, cos, flags=_FLAGS), b.fmul(y, cos, flags=_FLAGS)
        xs, ys = b.fmul(x, sin, flags=_FLAGS), b.fmul(y, sin, flags=_FLAGS)
        return b.fsub(xc, ys, flags=_FLAGS), b.fadd(yc, xs, flags=_FLAGS)

    def _split(self, pair: Sequence[Any], lanes: int) -> tuple[Any, Any]:
        """Return the first numbers of pairs, and the second ones, of two vectors as they lie in a key."""
        a, c = pair
        if not self.layout.interleaved:
            return a, c
        return tuple(self.b.shuffle_vector(a, c, _lanes(range(i, 2 * lanes, 2))) for i in (0, 1))

    def _join(self, x: Any, y: Any, lanes: int) -> tuple[Any, Any]:
        """Undo `_split`."""
        if not self.layout.interleaved:
            return x, y
        order = [i // 2 + i % 2 * lanes for i in range(2 * lanes)]
        return tuple(self.b.shuffle_vector(x, y, _lanes(part)) for part in (order[:lanes], order[lanes:]))

    def _transpose(self, scratch: Any, out: Any, k_step: Any, count: Any) -> None:
        """Write the rows of ``scratch`` so that a dimension's tokens lie side by side."""
        b, layout = self.b, self.layout
        with b.if_else(b.icmp_signed("==", count, _int(TILE))) as (whole, part):
            with whole:
                lanes = math.gcd(layout.k_dim, TILE)
                with self._loop(_int(layout.k_dim), lanes) as column:
                    rows = [
                        self._load(scratch, b.add(column, _int(i * layout.k_dim)), layout.dtype, lanes)
                        for i in range(TILE)
                    ]
                    if lanes < TILE:
                        order = _lanes([min(i, lanes - 1) for i in range(TILE)])
                        rows = [b.shuffle_vector(row, row, order) for row in rows]
                    zipped = [i // 2 + i % 2 * TILE for i in range(2 * TILE)]
                    low, high = _lanes(zipped[:TILE]), _lanes(zipped[TILE:])
                    for _ in range(TILE.bit_length() - 1):
                        pairs = zip(rows[: TILE // 2], rows[TILE // 2 :], strict=True)
                        rows = [b.shuffle_vector(x, y, side) for x, y in pairs for side in (low, high)]
                    for i in range(lanes):
                        place = b.mul(b.add(column, _int(i)), k_step)
                        self._store(out, place, rows[i], layout.dtype)
            with part, self._loop(_int(layout.k_dim)) as column, self._loop(count) as token:
                at = b.add(b.mul(token, _int(layout.k_dim)), column)
                number = self._load(scratch, at, layout.dtype, 1)
                self._store(out, b.add(b.mul(column, k_step), token), number, layout.dtype)

    def _read(self, base: Any, at: Any, dtype: str, lanes: int) -> Any:
        """Numbers as float32."""
        b, raw = self.b, self._load(base, at, dtype, lanes)
        if dtype == "bfloat16":
            wide = b.zext(raw, ir.VectorType(_I32, lanes))
            return b.bitcast(b.shl(wide, _all(16, lanes)), ir.VectorType(_F32, lanes))
        return b.fpext(raw, ir.VectorType(_F32, lanes)) if dtype == "float16" else raw

    def _write(self, base: Any, at: Any, value: Any, lanes: int) -> None:
        """Float32 numbers, rounded to nearest, ties to even."""
        b, dtype = self.b, self.layout.dtype
        if dtype == "bfloat16" and self.bfloats and lanes == 16:
            bfloats = ir.VectorType(_BFLOAT, lanes)
            convert = self._declare("llvm.x86.avx512bf16.cvtneps2bf16.512", bfloats, [value.type])
            value = b.bitcast(b.call(convert, [value]), ir.VectorType(_I16, lanes))
        elif dtype == "bfloat16":
            bits = b.bitcast(value, ir.VectorType(_I32, lanes))
            odd = b.and_(b.lshr(bits, _all(16, lanes)), _all(1, lanes))
            rounded = b.lshr(b.add(b.add(bits, _all(0x7FFF, lanes)), odd), _all(16, lanes))
            rounded = b.select(b.fcmp_unordered("uno", value, value), _all(0x7FC0, lanes), rounded)
            value = b.trunc(rounded, ir.VectorType(_I16, lanes))
        elif dtype == "float16":
            value = b.fptrunc(value, ir.VectorType(ir.HalfType(), lanes))
        self._store(base, at, value, dtype)

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return an instruction of the processor as a function."""
        signature = ir.FunctionType(result, arguments)
        return self.module.globals.get(name) or ir.Function(self.module, signature, name)

    def _load(self, base: Any, at: Any, dtype: str, lanes: int) -> Any:
        place = self._pointer(self._step(base, at, dtype), ir.VectorType(_TYPES[dtype], lanes))
        return self.b.load(place, align=_size(dtype))

    def _store(self, base: Any, at: Any, value: Any, dtype: str) -> None:
        place = self._pointer(self._step(base, at, dtype), value.type)
        self.b.store(value, place, align=_size(dtype))

    def _step(self, base: Any, count: Any, dtype: str) -> Any:
        return self.b.add(base, self.b.mul(count, _int(_size(dtype))))

    def _pointer(self, address: Any, kind: Any) -> Any:
        return self.b.inttoptr(address, ir.PointerType(kind))

    def _splat(self, number: Any, lanes: int) -> Any:
        b = self.b
        vector = b.insert_element(ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, _i32(0))
        return b.shuffle_vector(vector, vector, _lanes([0] * lanes))

    @contextmanager
    def _loop(self, end: Any, step: int = 1, values: list[Any] | None = None) -> Iterator[Any]:
        """Count from 0 up to ``end``; ``values`` are carried on: the body replaces them in the list."""
        values = [] if values is None else values
        b = self.b
        entry = b.block
        head, body, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(_I64)
        i.add_incoming(_int(0), entry)
        phis = [b.phi(value.type) for value in values]
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, entry)
        values[:] = phis
        b.cbranch(b.icmp_signed("<", i, end), body, after)
        b.position_at_end(body)
        yield i
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, b.block)
        values[:] = phis
        i.add_incoming(b.add(i, _int(step)), b.block)
        b.branch(head)
        b.position_at_end(after)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _i32(value: int) -> Any:
    return ir.Constant(_I32, value)


def _all(value: int, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(_I32, lanes), [value] * lanes)


def _lanes(order: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
