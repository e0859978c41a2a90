# mypy: disable-error-code="import-untyped,import-not-found,misc"
"""A builder of LLVM IR on vectors: numbers in memory are read as float32, and rounded once.

Addresses are 64-bit integers, and what is counted from them are numbers of a dtype.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

LINE = 64
"""Bytes of a cache line."""
I64, I32, I16, F32 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
TYPES = {"bfloat16": I16, "float16": ir.HalfType(), "float32": F32}


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _Bfloat()


class VectorBuilder:
    """Builds the functions of a module, one after the other.

    Args:
        features: the processor's, by LLVM's names.

    Attributes:
        wide: whether a register is as wide as a cache line.
        bfloats: whether the processor computes with bfloat16.
        matrices: whether it multiplies matrices of bfloat16 (AMX), and this process may use the registers for them.
        b: llvmlite's builder of the current function.
        past: whether that function is told to write past the cache.
    """

    b: Any
    past: Any

    def __init__(self, features: dict[str, bool]) -> None:
        self.wide = bool(features.get("avx512f"))
        self.bfloats = self.wide and bool(features.get("avx512bf16"))
        self.matrices = self.bfloats and bool(features.get("amx-bf16")) and _use_matrix_registers()
        self.module = ir.Module("load")
        self.module.triple = llvm.get_process_triple()

    def function(self, name: str, arguments: int, linkage: str = "internal") -> tuple[Any, Any]:
        """Begin a function of integers; return its builder and its arguments."""
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        function.linkage = linkage
        self.b = ir.IRBuilder(function.append_basic_block())
        return self.b, function.args

    def declare(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Return an instruction of the processor as a function."""
        signature = ir.FunctionType(result, arguments)
        return self.module.globals.get(name) or ir.Function(self.module, signature, name)

    def allocate(self, size: int) -> Any:
        """Return the address of some bytes of the stack, at the begin of a cache line."""
        room = self.b.alloca(ir.IntType(8), integer(size))
        room.align = LINE
        return self.b.ptrtoint(room, I64)

    def address(self, base: Any, count: Any, dtype: str) -> Any:
        """Return the address of a number behind ``base``."""
        return self.b.add(base, self.b.mul(count, integer(size_of(dtype))))

    def pointer(self, address: Any, kind: Any) -> Any:
        """Return an address as a pointer."""
        return self.b.inttoptr(address, ir.PointerType(kind))

    def word(self, base: Any, at: Any) -> Any:
        """Load an integer of an array of them."""
        return self.b.load(self.pointer(self.b.add(base, self.b.mul(at, integer(8))), I64))

    def load(self, base: Any, at: Any, dtype: str, lanes: int) -> Any:
        """Load numbers as they are stored."""
        place = self.pointer(self.address(base, at, dtype), ir.VectorType(TYPES[dtype], lanes))
        return self.b.load(place, align=size_of(dtype))

    def read(self, base: Any, at: Any, dtype: str, lanes: int) -> Any:
        """Load numbers as float32."""
        b, raw = self.b, self.load(base, at, dtype, lanes)
        if dtype == "bfloat16":
            wide = b.zext(raw, ir.VectorType(I32, lanes))
            return b.bitcast(b.shl(wide, _all(16, lanes)), ir.VectorType(F32, lanes))
        return b.fpext(raw, ir.VectorType(F32, lanes)) if dtype == "float16" else raw

    def store(self, base: Any, at: Any, value: Any, dtype: str, past: bool = False) -> None:
        """Store numbers; ``past`` the cache only whole lines of it, at the begin of one."""
        b, address = self.b, self.address(base, at, dtype)
        if not past:
            b.store(value, self.pointer(address, value.type), align=size_of(dtype))
            return
        # LLVM has no such store of bfloat16 and would silently make it an ordinary one.
        line = ir.VectorType(F32, LINE // 4)
        signature = ir.FunctionType(ir.VoidType(), [I64, line])
        b.asm(signature, "vmovntps $1, ($0)", "r,v", [address, b.bitcast(value, line)], side_effect=True)

    def store_all(self, places: Sequence[tuple[Any, Any, Any]], dtype: str, aligned: bool) -> None:
        """Store values at ``(base, at, value)``, past the cache where that is wanted and they are ``aligned`` lines."""

        def store(past: bool) -> None:
            for base, at, value in places:
                self.store(base, at, value, dtype, past)

        if not self.wide or not aligned or any(value.type.count * size_of(dtype) != LINE for _, _, value in places):
            store(False)
            return
        with self.b.if_else(self.past) as (then, other):
            with then:
                store(True)
            with other:
                store(False)

    def prefetch(self, address: Any, size: int) -> None:
        """Fetch bytes into the cache; a hint at what is nobody's memory does nothing."""
        byte = ir.IntType(8)
        fetch = self.declare("llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(byte), I32, I32, I32])
        hints = [ir.Constant(I32, hint) for hint in (0, 3, 1)]  # to read, into every cache, data
        for line in range(0, size, LINE):
            self.b.call(fetch, [self.pointer(self.b.add(address, integer(line)), byte), *hints])

    def round(self, value: Any, dtype: str) -> Any:
        """Return float32 numbers in ``dtype``, rounded to nearest, ties to even."""
        b, lanes = self.b, value.type.count
        if dtype == "bfloat16" and self.bfloats and lanes == 16:
            convert = self.declare("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, lanes), [value.type])
            return b.bitcast(b.call(convert, [value]), ir.VectorType(I16, lanes))
        if dtype == "bfloat16":
            bits = b.bitcast(value, ir.VectorType(I32, lanes))
            odd = b.and_(b.lshr(bits, _all(16, lanes)), _all(1, lanes))
            rounded = b.lshr(b.add(b.add(bits, _all(0x7FFF, lanes)), odd), _all(16, lanes))
            rounded = b.select(b.fcmp_unordered("uno", value, value), _all(0x7FC0, lanes), rounded)
            return b.trunc(rounded, ir.VectorType(I16, lanes))
        return b.fptrunc(value, ir.VectorType(ir.HalfType(), lanes)) if dtype == "float16" else value

    def round_both(self, x: Any, y: Any, dtype: str) -> Any:
        """Return two vectors as `round` does, one behind the other."""
        b, lanes = self.b, x.type.count
        if dtype != "bfloat16" or not self.bfloats or lanes != 16:
            return self.shuffle(self.round(x, dtype), self.round(y, dtype), range(2 * lanes))
        kind = ir.VectorType(BFLOAT, 2 * lanes)
        convert = self.declare("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [x.type, x.type])
        return b.bitcast(b.call(convert, [y, x]), ir.VectorType(I16, 2 * lanes))

    def shuffle(self, x: Any, y: Any, order: Sequence[int]) -> Any:
        """Return numbers of two vectors in an order."""
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    def splat(self, number: Any, lanes: int) -> Any:
        """Return a number in all lanes."""
        kind = ir.VectorType(number.type, lanes)
        vector = self.b.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(I32, 0))
        return self.shuffle(vector, vector, [0] * lanes)

    @contextmanager
    def loop(self, end: Any, step: int = 1, values: list[Any] | None = None) -> Iterator[Any]:
        """Count from 0 up to ``end``; ``values`` are carried on: the body replaces them in the list."""
        values = [] if values is None else values
        b = self.b
        entry = b.block
        head, body, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(integer(0), entry)
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
        i.add_incoming(b.add(i, integer(step)), b.block)
        b.branch(head)
        b.position_at_end(after)


@lru_cache(maxsize=1)
def _use_matrix_registers() -> bool:
    """Ask Linux for the registers that hold matrices, which a process may not use without; return whether they are granted."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def integer(value: int) -> Any:
    """Return a constant."""
    return ir.Constant(I64, value)


def alternate(lanes: int) -> list[int]:
    """Return the order in which the numbers of two vectors alternate."""
    return [i // 2 + i % 2 * lanes for i in range(2 * lanes)]


def size_of(dtype: str) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2


def _all(value: int, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(I32, lanes), [value] * lanes)
