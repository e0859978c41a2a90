# mypy: disable-error-code="import-untyped,import-not-found,misc"
"""The load kernel for CPUs as LLVM IR: patch, rotation, rounding and the write of many layers in one pass.

The IR is of vectors as wide as the processor's registers and compiled for the processor at hand by llvmlite, which vLLM
brings along with numba; no compiler is needed and nothing is cached, for a layout takes a fraction of a second. Python's lock
is released during a call.

Arithmetic is float32, and each number is rounded once. Products of bfloat16 factors take the processor's own dot products,
where it has them: two products, which are exact, are added to a float32 sum. A processor that multiplies matrices (AMX) adds
32 products of 16 tokens and 16 columns at once.

What bounds a load is memory, and of a patch's product arithmetic. So tokens are read in the order in which they are stored,
which processors fetch ahead, and large loads are written past the cache, where a line need not be read before it is written.
A product takes many tokens of one head instead, so that the factor's columns stay in the nearest cache, and fetches the next
ones itself.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir

from ctxwin.kv.kernels.vectors import (
    BFLOAT,
    F32,
    I16,
    I32,
    I64,
    LINE,
    TYPES,
    VectorBuilder,
    alternate,
    integer,
    size_of,
)

Side = Literal["k", "v"]
SIDES: tuple[Side, ...] = ("k", "v")
Mode = Literal["copy", "turn", "product", "dense"]
MODES: tuple[Mode, ...] = ("copy", "turn", "product", "dense")
"""What a part's keys and values go through: nothing; keys turn; a patch's product, or its delta, is added as well."""
FIELDS = (
    *("tiles", "count", "k", "k_token", "k_head", "v", "v_token", "v_head", "turn", "frame"),
    *("out_k", "out_v", "k_at", "v_at"),
    *("mode", "left", "left_token", "left_rows", "right_k", "right_v", "right_row", "rank"),
)
"""A row of the table, one for some tiles of a part and layer; int64. Addresses: ``tiles [count, 2]`` (first token, tokens), ``k``
and ``v`` of the first token and head, ``turn`` and ``frame`` ``[T, 2, half]`` (cosine and sine; of what stored keys and what
a patch adds turn by), ``out_k`` and ``out_v``, ``k_at`` and ``v_at [T]``, where each token is written from there,
``left [left_rows, rank]`` (an even count of numbers from row to row), ``right_k`` and ``right_v`` (columns of the first head;
dense: of the first token's delta). The others count numbers. A product's rank is at least 1."""
_SQUARE = 16  # dimensions, and numbers of 32 bits, that are transposed at once
_FLAGS = ("contract",)
_BYTE = ir.IntType(8)
_ROWS = 16  # of a matrix register, each of a line
_FACTORS, _TAIL = (
    (4, 5),
    (6, 7),
)  # registers of the left and right factor, and of the last directions; the first four hold sums


@dataclass(frozen=True)
class KernelShape:
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


def tile_of(dtype: str) -> int:
    """Return how many tokens are served at once: where keys are written dimension by dimension, those of a cache line."""
    return LINE // size_of(dtype)


def supports(dtype: str) -> bool:
    """Return True if the processor converts ``dtype`` itself; see `KernelShape`."""
    if dtype == "float16":
        return bool(_features().get("f16c")) or llvm.get_process_triple().startswith(("aarch64", "arm64"))
    return dtype in TYPES


@lru_cache(maxsize=64)
def compile_layout(layout: KernelShape) -> Callable[..., None]:
    """Return the kernel of a layout: ``(table, rows, k_head, v_head, k_step, past, panel)``.

    ``table`` is the address of rows of `FIELDS`; the strides are those of what is written to, in numbers. ``past`` is 1 to
    write past the cache, which everything must lie at lines of. ``panel`` is the address of a line
    and more, in which a right factor of one direction more than the rows' most is packed, 4 bytes a number.
    Cost: a fraction of a second, once.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    target, cpu = llvm.Target.from_triple(llvm.get_process_triple()), llvm.get_host_cpu_name()
    machine = target.create_target_machine(cpu, _features().flatten(), opt=3, jit=True, codemodel="jitdefault")
    module = llvm.parse_assembly(str(_Emitter(layout).module))
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(engine.get_function_address("load"))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function


@lru_cache(maxsize=1)
def _features() -> Any:
    return llvm.get_host_cpu_features()


@dataclass(frozen=True)
class _Token:
    """A token's number in its part, and the addresses of its stored head and of where that is written."""

    number: Any
    source: Any
    out: Any


@dataclass(frozen=True)
class _Columns:
    """Vectors of a head that are served at once.

    Attributes:
        at: how many of the head's numbers came before.
        starts: where each vector begins.
        lanes: numbers of a vector.
        pairs: numbers of the pairs that a turning vector begins with: the first halves of ``starts``, then the second ones,
            belong to them.
    """

    at: Any
    starts: list[Any]
    lanes: int
    pairs: Sequence[Any] = ()


class _Emitter(VectorBuilder):
    """The module of a layout."""

    def __init__(self, layout: KernelShape) -> None:
        super().__init__(_features())
        self.layout, self.tile = layout, tile_of(layout.dtype)
        self.lanes = self.sums = 16 if self.wide else 8
        # Two directions at once; of all columns alike, as they are packed.
        numbers = math.gcd(layout.half, layout.k_dim, layout.v_dim)
        self.dots = self.bfloats and layout.factor_dtype == "bfloat16" and numbers % self.lanes == 0
        self.matrices = self.matrices and self.dots
        self.row = -(-layout.k_dim // LINE) * LINE  # of the scratch, whole lines
        transpose = self._transpose() if layout.transposed else None
        parts = [self._part(mode, transpose) for mode in MODES]
        b, (table, rows, *rest) = self.function("load", 7, "external")
        with self.loop(rows) as row:
            fields = b.add(table, b.mul(row, integer(8 * len(FIELDS))))
            mode = self.word(fields, integer(FIELDS.index("mode")))
            for number, part in enumerate(parts):
                with b.if_then(b.icmp_signed("==", mode, integer(number))):
                    b.call(part, [fields, *rest])
        b.fence("seq_cst")  # stores past the cache are in no order of their own
        b.ret_void()

    def _part(self, mode: Mode, transpose: Any) -> Any:
        """Return the function that serves some tiles of one part and layer."""
        b, (table, k_head, v_head, k_step, past, self.panel) = self.function(mode, 6)
        self.past = b.icmp_signed("!=", past, integer(0))
        self.f = {name: self.word(table, integer(i)) for i, name in enumerate(FIELDS)}
        self.f |= {"k_out": k_head, "v_out": v_head}
        if transpose is not None:
            self.scratch = self.allocate(self.layout.heads * self.tile * self.row * size_of(self.layout.dtype))
        if mode == "product":
            self._pack()
            if self.matrices:
                self._configure()
        with self.loop(b.mul(self.f["count"], integer(2)), 2) as tile:
            first, count = self.word(self.f["tiles"], tile), self.word(self.f["tiles"], b.add(tile, integer(1)))
            for side in SIDES:
                if mode == "product":
                    with self._heads() as head:
                        self._serve(mode, side, head, first, integer(0), count)
                else:
                    with self.loop(count) as i, self._heads() as head:
                        self._serve(mode, side, head, first, i, integer(1))
                if self._in_columns(side):
                    with self._heads() as head:
                        rows = self._scratch_row(head, integer(0))
                        b.call(transpose, [rows, self._out("k", first, head), k_step, count, past])
        if mode == "product" and self.matrices:
            self._matrix("tilerelease")
        b.ret_void()
        return b.function

    def _heads(self) -> Any:
        return self.loop(integer(self.layout.heads))

    def _in_columns(self, side: Side) -> bool:
        return side == "k" and self.layout.transposed

    def _dim(self, side: Side) -> int:
        return self.layout.k_dim if side == "k" else self.layout.v_dim

    def _serve(self, mode: Mode, side: Side, head: Any, first: Any, begin: Any, count: Any) -> None:
        """Write a head's numbers of a tile's tokens from ``begin`` on, to the scratch where they are transposed from there."""
        turning = 2 * self.layout.half if side == "k" and mode != "copy" else 0
        if turning:
            with self._pairs() as columns, self._tokens(mode, side, head, first, begin, count, columns) as tokens:
                self._turn(mode, head, tokens, columns)
        if turning < self._dim(side):
            plain = mode in ("copy", "turn") and self.layout.source_dtype == self.layout.dtype
            lanes = LINE // size_of(self.layout.dtype) if plain else self.lanes
            with (
                self._rest(side, turning, lanes) as columns,
                self._tokens(mode, side, head, first, begin, count, columns) as tokens,
            ):
                self._pass(mode, side, head, tokens, columns)

    @contextmanager
    def _pairs(self) -> Iterator[_Columns]:
        """Count through the pairs that turn."""
        b, half = self.b, self.layout.half
        lanes = math.gcd(half, self.lanes)
        many = 2 if not self.layout.interleaved and half % (2 * lanes) == 0 else 1
        with self.loop(integer(half), lanes * many) as begin:
            at, pairs = b.mul(begin, integer(2)), [b.add(begin, integer(lanes * i)) for i in range(many)]
            firsts, away = ([at], lanes) if self.layout.interleaved else (pairs, half)
            yield _Columns(at, firsts + [b.add(x, integer(away)) for x in firsts], lanes, pairs)

    @contextmanager
    def _rest(self, side: Side, begin: int, lanes: int) -> Iterator[_Columns]:
        """Count through the dimensions from ``begin`` on."""
        length = self._dim(side) - begin
        lanes = math.gcd(length, lanes)
        many = next(many for many in (4, 2, 1) if length % (many * lanes) == 0)
        with self.loop(integer(length), lanes * many) as at:
            starts = [self.b.add(at, integer(begin + lanes * i)) for i in range(many)]
            yield _Columns(starts[0], starts, lanes)

    @contextmanager
    def _tokens(
        self, mode: Mode, side: Side, head: Any, first: Any, begin: Any, count: Any, columns: _Columns
    ) -> Iterator[list[_Token]]:
        """Count through tokens as `_several` does, rows of a matrix register behind the product of all of them."""
        if mode != "product" or not self.matrices:
            with self._several(mode, side, head, first, begin, count, columns) as tokens:
                yield tokens
            return
        with self.loop(count, _ROWS) as at:
            self._multiply(side, head, self.b.add(first, at), columns)
            few = self._least(self.b.sub(count, at), integer(_ROWS))
            with self._several(mode, side, head, first, at, few, columns) as tokens:
                yield tokens

    @contextmanager
    def _several(
        self, mode: Mode, side: Side, head: Any, first: Any, begin: Any, count: Any, columns: _Columns
    ) -> Iterator[list[_Token]]:
        """Count through tokens, as many at once as a product's sums have registers for; the last one again at the end."""
        b, layout, row = self.b, self.layout, self.f[f"{side}_token"]
        many = self.sums // len(columns.starts) if mode == "product" else 1
        last = b.sub(count, integer(1))
        with self.loop(count, many) as at:
            tokens = []
            for i in range(many):
                number = b.add(at, integer(i))
                number = b.add(begin, b.select(b.icmp_signed("<", number, last), number, last) if i else at)
                token = b.add(first, number)
                offset = b.add(b.mul(token, row), b.mul(head, self.f[f"{side}_head"]))
                source = self.address(self.f[side], offset, layout.source_dtype)
                ahead = b.add(columns.at, b.mul(row, integer(self.tile)))  # the same columns of the next tile
                size = len(columns.starts) * columns.lanes * size_of(layout.source_dtype)
                self.prefetch(self.address(source, ahead, layout.source_dtype), size)
                out = self._scratch_row(head, number) if self._in_columns(side) else self._out(side, token, head)
                tokens.append(_Token(token, source, out))
            yield tokens

    def _scratch_row(self, head: Any, number: Any) -> Any:
        """Address of a head of a tile's token in the scratch."""
        row = self.b.add(self.b.mul(head, integer(self.tile)), number)
        return self.address(self.scratch, self.b.mul(row, integer(self.row)), self.layout.dtype)

    def _out(self, side: Side, token: Any, head: Any) -> Any:
        """Address that a token's head is written to."""
        offset = self.b.add(self.word(self.f[f"{side}_at"], token), self.b.mul(head, self.f[f"{side}_out"]))
        return self.address(self.f[f"out_{side}"], offset, self.layout.dtype)

    def _turn(self, mode: Mode, head: Any, tokens: list[_Token], columns: _Columns) -> None:
        """Numbers that turn, with what is added to them, which turns to the frame of stored keys first."""
        layout, many, lines = self.layout, len(columns.pairs), []
        added = self._added(mode, "k", head, tokens, columns)
        for i, token in enumerate(tokens):
            stored = [self.read(token.source, at, layout.source_dtype, columns.lanes) for at in columns.starts]
            numbers = self._split(stored)
            if added:
                numbers = self._rotate(self._split(added[i]), "frame", token, columns, numbers)
            turned = self._rotate(numbers, "turn", token, columns)
            if layout.interleaved:
                lines += self._lines(token, columns.at, turned, alternate(columns.lanes))
            else:
                lines += self._lines(token, columns.starts[0], turned[:many])
                lines += self._lines(token, columns.starts[many], turned[many:])
        self._write("k", lines)

    def _pass(self, mode: Mode, side: Side, head: Any, tokens: list[_Token], columns: _Columns) -> None:
        """Numbers that do not turn; to the bit where nothing is added and the dtype is served."""
        layout, lines = self.layout, []
        added = self._added(mode, side, head, tokens, columns)
        raw = not added and layout.source_dtype == layout.dtype
        for i, token in enumerate(tokens):
            read = self.load if raw else self.read
            numbers = [read(token.source, at, layout.source_dtype, columns.lanes) for at in columns.starts]
            if raw:
                lines += [(token.out, at, value) for at, value in zip(columns.starts, numbers, strict=True)]
            else:
                lines += self._lines(token, columns.at, self._sum(numbers, added[i] if added else ()))
        self._write(side, lines)

    def _sum(self, numbers: Sequence[Any], added: Sequence[Any]) -> Sequence[Any]:
        return [self.b.fadd(x, dx, flags=_FLAGS) for x, dx in zip(numbers, added, strict=True)] if added else numbers

    def _lines(
        self, token: _Token, at: Any, values: Sequence[Any], order: Sequence[int] = ()
    ) -> list[tuple[Any, Any, Any]]:
        """Where neighbouring vectors of float32 numbers are written, rounded; two as one where that makes a line or an
        ``order`` of their numbers is given."""
        dtype = self.layout.dtype
        if len(values) > 1 and (order or size_of(dtype) == 2):
            rounded = [self.round_both(x, y, dtype) for x, y in zip(values[::2], values[1::2], strict=True)]
            rounded = [self.shuffle(line, line, order) for line in rounded] if order else rounded
        else:
            rounded = [self.round(value, dtype) for value in values]
        step = rounded[0].type.count
        return [(token.out, self.b.add(at, integer(step * i)), value) for i, value in enumerate(rounded)]

    def _write(self, side: Side, lines: Sequence[tuple[Any, Any, Any]]) -> None:
        aligned = self._dim(side) * size_of(self.layout.dtype) % LINE == 0 and not self._in_columns(side)
        self.store_all(lines, self.layout.dtype, aligned)

    def _rotate(
        self, numbers: Sequence[Any], table: str, token: _Token, columns: _Columns, totals: Sequence[Any] = ()
    ) -> list[Any]:
        """The first numbers of pairs, then the second ones, turned by a token's angles and added to ``totals``."""
        b, half, many = self.b, self.layout.half, len(columns.pairs)
        turned: list[Any] = [None] * (2 * many)
        for i, pair in enumerate(columns.pairs):
            at = self.address(self.f[table], b.add(b.mul(token.number, integer(2 * half)), pair), "float32")
            cos, sin = (self.load(at, integer(i), "float32", columns.lanes) for i in (0, half))
            for one, two, into, change in ((i, i + many, i, b.fsub), (i + many, i, i + many, b.fadd)):
                total = b.fmul(numbers[one], cos, flags=_FLAGS)
                total = b.fadd(totals[into], total, flags=_FLAGS) if totals else total
                turned[into] = change(total, b.fmul(numbers[two], sin, flags=_FLAGS), flags=_FLAGS)
        return turned

    def _split(self, vectors: Sequence[Any]) -> list[Any]:
        """The first numbers of pairs, then the second ones, of vectors as they lie in a key."""
        if not self.layout.interleaved:
            return list(vectors)
        x, y = vectors
        return [self.shuffle(x, y, range(i, 2 * x.type.count, 2)) for i in (0, 1)]

    def _added(self, mode: Mode, side: Side, head: Any, tokens: list[_Token], columns: _Columns) -> list[list[Any]]:
        """What a patch adds to each token's vectors; nothing where there is no patch."""
        b, f, factors, lanes = self.b, self.f, self.layout.factor_dtype, columns.lanes
        if mode == "dense":
            base = self._right(side, head)
            rows = [self.address(base, b.mul(token.number, f["right_row"]), factors) for token in tokens]
            return [[self.read(row, at, factors, lanes) for at in columns.starts] for row in rows]
        if mode != "product":
            return []
        if self.matrices:
            at = [b.mul(b.sub(token.number, self.row_0), integer(lanes)) for token in tokens]
            sides = [b.add(self.products, integer(i * _ROWS * LINE)) for i in range(len(columns.starts))]
            return [[self.load(side, row, "float32", lanes) for side in sides] for row in at]
        lefts = [self.address(f["left"], b.mul(token.number, f["left_token"]), factors) for token in tokens]
        many, wide, panel = len(columns.starts), ir.VectorType(F32, lanes), self._panel(side, head, columns)
        kind = ir.VectorType(BFLOAT, 2 * lanes) if self.dots else wide

        def add(j: Any, alone: bool, sums: list[Any]) -> list[Any]:
            vectors = [b.load(self._packed(panel, j, i, columns, kind), align=4) for i in range(many)]
            numbers = [self._factor(left, j, lanes, alone) for left in lefts]
            products = [(number, vector) for number in numbers for vector in vectors]
            return [self._add_product(total, *both) for total, both in zip(sums, products, strict=True)]

        zero = ir.Constant(wide, [0.0] * lanes)
        sums = self._directions([zero] * (len(lefts) * many), add)
        return [sums[i : i + many] for i in range(0, len(sums), many)]

    def _configure(self) -> None:
        """Give the matrix registers their shapes: rows of all tokens where there are fewer, and the last directions' rest.

        Each part of a product takes at least one direction for the last ones, so that no register is empty.
        """
        b, f = self.b, self.f
        self.products = self.allocate(4 * _ROWS * LINE)
        self.rows = self._least(f["left_rows"], integer(_ROWS))
        self.whole = b.and_(b.sub(f["rank"], integer(1)), integer(-2 * _ROWS))
        pairs = b.ashr(b.add(b.sub(f["rank"], self.whole), integer(1)), integer(1))
        shapes = self.allocate(LINE)
        b.store(ir.Constant(ir.VectorType(I64, 8), [1, *[0] * 7]), self.pointer(shapes, ir.VectorType(I64, 8)), align=8)
        tokens, line = self.rows, integer(LINE)
        left, right = (tokens, line), (integer(_ROWS), line)
        tail = (tokens, b.mul(pairs, integer(4))), (pairs, line)
        for i, (rows, size) in enumerate([left] * 4 + [left, right, *tail]):
            b.store(b.trunc(size, I16), self.pointer(b.add(shapes, integer(16 + 2 * i)), I16), align=2)
            b.store(b.trunc(rows, _BYTE), self.pointer(b.add(shapes, integer(48 + i)), _BYTE), align=1)
        self._matrix("ldtilecfg", self.pointer(shapes, _BYTE))

    def _multiply(self, side: Side, head: Any, first: Any, columns: _Columns) -> None:
        """Put what a patch adds to some columns of the tokens from ``first`` on into ``products [vectors, 16, 16]``."""
        b, f, many = self.b, self.f, len(columns.starts)
        self.row_0 = self._least(first, b.sub(f["left_rows"], self.rows))  # earlier ones again at the end
        size = integer(size_of(self.layout.factor_dtype))
        left_step, right_step = b.mul(f["left_token"], size), integer(LINE * many)
        left = b.add(f["left"], b.mul(self.row_0, left_step))
        panel = self._panel(side, head, columns)

        def add(j: Any, registers: tuple[int, int]) -> None:
            self._matrix("tileloadd64", registers[0], self.pointer(b.add(left, b.mul(j, size)), _BYTE), left_step)
            row = b.add(panel, b.mul(b.ashr(j, integer(1)), right_step))
            for i in range(many):
                at = self.pointer(b.add(row, integer(LINE * i)), _BYTE)
                self._matrix("tileloadd64", registers[1], at, right_step)
                self._matrix("tdpbf16ps", i, *registers)

        for i in range(many):
            self._matrix("tilezero", i)
        with self.loop(self.whole, 2 * _ROWS) as j:
            add(j, _FACTORS)
        add(self.whole, _TAIL)
        for i in range(many):
            at = self.pointer(b.add(self.products, integer(i * _ROWS * LINE)), _BYTE)
            self._matrix("tilestored64", i, at, integer(LINE))

    def _matrix(self, name: str, *operands: Any) -> None:
        """Emit an instruction on matrix registers, which are named by number."""
        values = [ir.Constant(_BYTE, operand) if isinstance(operand, int) else operand for operand in operands]
        kinds = [value.type for value in values]
        self.b.call(self.declare(f"llvm.x86.{name}", ir.VoidType(), kinds), values)

    def _least(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def _factor(self, left: Any, j: Any, lanes: int, alone: bool) -> Any:
        """A token's factor of direction ``j``, or of two directions, in all lanes."""
        b, factors = self.b, self.layout.factor_dtype
        if not self.dots:
            return self.splat(b.extract_element(self.read(left, j, factors, 1), ir.Constant(I32, 0)), lanes)
        pair = b.load(self.pointer(self.address(left, j, factors), I16 if alone else I32), align=2)
        pair = b.zext(pair, I32) if alone else pair
        return b.bitcast(self.splat(pair, lanes), ir.VectorType(BFLOAT, 2 * lanes))

    def _add_product(self, total: Any, number: Any, vector: Any) -> Any:
        if not self.dots:
            return self.b.fadd(total, self.b.fmul(number, vector, flags=_FLAGS), flags=_FLAGS)
        dot = self.declare("llvm.x86.avx512bf16.dpbf16ps.512", total.type, [total.type, vector.type, vector.type])
        return self.b.call(dot, [total, number, vector])

    def _directions(self, values: list[Any], body: Callable[[Any, bool, list[Any]], list[Any]]) -> list[Any]:
        """Emit ``body`` for the directions of a product, for dot products two at once and an odd last one alone; return what
        becomes of ``values``."""
        b, rank = self.b, self.f["rank"]
        step = 2 if self.dots else 1
        whole = b.and_(rank, integer(-step))
        with self.loop(whole, step, values) as j:
            values[:] = body(j, False, list(values))
        if self.dots:
            with self.loop(b.sub(rank, whole), 1, values):
                values[:] = body(whole, True, list(values))
        return values

    def _pack(self) -> None:
        """Put the right factor's directions side by side for each of its columns, in the order in which products read them.

        As stored, rows of all columns lie one behind the other, and those that are a power of two apart share a few lines
        of the cache; dot products take two directions number by number.
        """
        for side in SIDES:
            turning = 2 * self.layout.half if side == "k" else 0
            with self._heads() as head:
                if turning:
                    with self._pairs() as columns:
                        self._pack_columns(side, head, columns)
                if turning < self._dim(side):
                    with self._rest(side, turning, self.lanes) as columns:
                        self._pack_columns(side, head, columns)

    def _pack_columns(self, side: Side, head: Any, columns: _Columns) -> None:
        b, factors, step, lanes = self.b, self.layout.factor_dtype, self.f["right_row"], columns.lanes
        base, panel = self._right(side, head), self._panel(side, head, columns)

        def pack(j: Any, alone: bool, _: list[Any]) -> list[Any]:
            row = self.address(base, b.mul(j, step), factors)
            for i, at in enumerate(columns.starts):
                if self.dots:
                    zero = ir.Constant(ir.VectorType(I16, lanes), [0] * lanes)
                    second = zero if alone else self.load(self.address(row, step, factors), at, factors, lanes)
                    vector = self.shuffle(self.load(row, at, factors, lanes), second, alternate(lanes))
                else:
                    vector = self.read(row, at, factors, lanes)
                b.store(vector, self._packed(panel, j, i, columns, vector.type), align=4)
            return []

        self._directions([], pack)

    def _right(self, side: Side, head: Any) -> Any:
        """Address of a head's first column of a right factor, or of a delta."""
        columns = self.b.mul(head, integer(self._dim(side)))
        return self.address(self.f[f"right_{side}"], columns, self.layout.factor_dtype)

    def _panel(self, side: Side, head: Any, columns: _Columns) -> Any:
        """Address of what is packed of some columns."""
        b, before = self.b, 0 if side == "k" else self.layout.heads * self.layout.k_dim
        column = b.add(b.add(b.mul(head, integer(self._dim(side))), columns.at), integer(before))
        rank = b.and_(b.add(self.f["rank"], integer(1)), integer(-2))
        return b.add(self.panel, b.mul(b.mul(column, rank), integer(2 if self.dots else 4)))

    def _packed(self, panel: Any, j: Any, i: int, columns: _Columns, kind: Any) -> Any:
        """Pointer to a vector of direction ``j``, or of two: four bytes for each lane."""
        b = self.b
        number = b.add(b.mul(b.ashr(j, integer(1)) if self.dots else j, integer(len(columns.starts))), integer(i))
        return self.pointer(b.add(panel, b.mul(number, integer(4 * columns.lanes))), kind)

    def _transpose(self) -> Any:
        """Return the function that writes a tile's rows so that a dimension's tokens lie side by side."""
        dtype, dim = self.layout.dtype, self.layout.k_dim
        b, (scratch, out, k_step, count, past) = self.function("transpose", 5)
        b.function.attributes.add("noinline")
        self.past = b.icmp_signed("!=", past, integer(0))
        with b.if_else(b.icmp_signed("==", count, integer(self.tile))) as (whole, part):
            with whole, self.loop(integer(dim), math.gcd(dim, _SQUARE)) as first:
                columns = enumerate(self._square(scratch, first))
                places = [(out, b.mul(b.add(first, integer(i)), k_step), column) for i, column in columns]
                self.store_all(places, dtype, True)
            with part, self.loop(count) as token, self.loop(integer(dim)) as at:
                number = self.load(scratch, b.add(b.mul(token, integer(self.row)), at), dtype, 1)
                self.store(out, b.add(b.mul(at, k_step), token), number, dtype)
        b.ret_void()
        return b.function

    def _square(self, scratch: Any, first: Any) -> list[Any]:
        """The columns of a tile's rows from dimension ``first`` on; pairs of 16-bit tokens move as numbers of 32 bits."""
        b, dtype = self.b, self.layout.dtype
        lanes, order = math.gcd(self.layout.k_dim, _SQUARE), alternate(_SQUARE)
        rows = [self.load(scratch, b.add(first, integer(i * self.row)), dtype, lanes) for i in range(self.tile)]
        if lanes < _SQUARE:
            rows = [self.shuffle(row, row, [min(i, lanes - 1) for i in range(_SQUARE)]) for row in rows]
        if self.tile > _SQUARE:
            rows = [self.shuffle(x, y, order) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        rows = [b.bitcast(row, ir.VectorType(I32, _SQUARE)) for row in rows]
        for _ in range(_SQUARE.bit_length() - 1):
            pairs = zip(rows[: _SQUARE // 2], rows[_SQUARE // 2 :], strict=True)
            rows = [self.shuffle(x, y, half) for x, y in pairs for half in (order[:_SQUARE], order[_SQUARE:])]
        return rows[:lanes]
