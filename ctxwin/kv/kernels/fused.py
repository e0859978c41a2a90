# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: SIM102, SIM300 - one condition is of the compilation, the other of the run; a constexpr stands on the left
"""The load kernel in Triton: patch, rotation, rounding and the write of one layer in one pass; `TritonKernel` launches it.

Two rules keep it the same program under Triton's interpreter, which the tests run it by, and on a GPU. Rounding to
bfloat16 is spelled out, because the interpreter's conversion truncates. And only built-in operators are used: helpers of
`triton.language` that are functions of Triton's own (``tl.zeros``, ``tl.cdiv``) are bound to one of the two when
Triton is imported.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS: int = 5
"""Numbers of a part in the table that `load_layer` reads: first row, last plus one, rank (-1: dense, 0: no patch), and where
in ``factors`` its left and right side begin (dense: its delta, and nothing)."""


@triton.jit
def load_layer(
    k_ptr,
    v_ptr,
    factors_ptr,
    parts_ptr,
    blocks_ptr,
    turn_ptr,
    frame_ptr,
    slots_ptr,
    out_k_ptr,
    out_v_ptr,
    k_base,
    k_block,
    k_token,
    k_head,
    k_step,
    v_base,
    v_block,
    v_token,
    v_head,
    v_step,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    REST: tl.constexpr,
    TASKS: tl.constexpr,
    PATCHED: tl.constexpr,
    FRAMED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: the keys of one head, or up to ``BLOCK_V`` of its values, of up to ``BLOCK_T`` tokens of one part.

    ``k [T, HEADS, K_DIM]`` and ``v [T, HEADS, V_DIM]`` lie as stored; ``blocks [B, 2]`` names each block's part and first
    row, ``parts [P, FIELDS]`` see above; ``turn [T, 2, HALF]`` are cosine and sine of new angles minus stored ones,
    ``frame`` of stored ones minus the origin's. Row t goes to slot ``slots[t]`` of blocks of ``BLOCK_SIZE`` tokens, or to
    row t. Grid: ``(B, HEADS * TASKS)``.
    """
    block = tl.program_id(0)
    head = tl.program_id(1) // TASKS
    task = tl.program_id(1) % TASKS
    part = tl.load(blocks_ptr + 2 * block)
    entry = parts_ptr + part * FIELDS
    begin = tl.load(entry)
    stop = tl.load(entry + 1)
    rank = tl.load(entry + 2)
    left = factors_ptr + tl.load(entry + 3)
    right = factors_ptr + tl.load(entry + 4)
    # 64-bit throughout: a paged cache outgrows 32-bit offsets.
    rows = tl.load(blocks_ptr + 2 * block + 1) + tl.arange(0, BLOCK_T)
    inside = rows < stop
    local = rows - begin
    slots = rows
    if PAGED:
        slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    if task == 0:  # pairs ``(i * STEP, i * STEP + OFFSET)`` turn, the last ``REST`` dimensions pass
        out = out_k_ptr + k_base + (slots // BLOCK_SIZE) * k_block + (slots % BLOCK_SIZE) * k_token + head * k_head
        pair = tl.arange(0, BLOCK_HALF)
        turning = pair < HALF
        live = inside[:, None] & turning[None, :]
        source = k_ptr + ((rows * HEADS + head) * K_DIM)[:, None] + (pair * STEP)[None, :]
        x = tl.load(source, mask=live, other=0.0).to(COMPUTE)
        y = tl.load(source + OFFSET, mask=live, other=0.0).to(COMPUTE)
        if PATCHED:
            if rank != 0:
                first = head * K_DIM + pair * STEP
                dx = _delta(left, right, local, inside, first, turning, rank, WIDTH, COMPUTE, BLOCK_R)
                dy = _delta(left, right, local, inside, first + OFFSET, turning, rank, WIDTH, COMPUTE, BLOCK_R)
                if FRAMED:  # what is added turns to the frame of the keys first
                    cos, sin = _angle(frame_ptr, rows, pair, live, HALF)
                    x += dx * cos - dy * sin
                    y += dy * cos + dx * sin
                else:
                    x += dx
                    y += dy
        cos, sin = _angle(turn_ptr, rows, pair, live, HALF)
        target = out[:, None] + (pair * STEP * k_step)[None, :]
        tl.store(target, _rounded(x * cos - y * sin, OUT), mask=live)
        tl.store(target + OFFSET * k_step, _rounded(y * cos + x * sin, OUT), mask=live)
        if REST > 0:
            beyond = 2 * HALF + tl.arange(0, BLOCK_REST)
            passing = beyond < K_DIM
            there = inside[:, None] & passing[None, :]
            resting = k_ptr + ((rows * HEADS + head) * K_DIM)[:, None] + beyond[None, :]
            rest = tl.load(resting, mask=there, other=0.0).to(COMPUTE)
            if PATCHED:
                if rank != 0:
                    last = head * K_DIM + beyond
                    rest += _delta(left, right, local, inside, last, passing, rank, WIDTH, COMPUTE, BLOCK_R)
            tl.store(out[:, None] + (beyond * k_step)[None, :], _rounded(rest, OUT), mask=there)
    else:  # the values ``[(task - 1) * BLOCK_V, task * BLOCK_V)``
        out_v = out_v_ptr + v_base + (slots // BLOCK_SIZE) * v_block + (slots % BLOCK_SIZE) * v_token + head * v_head
        column = (task - 1) * BLOCK_V + tl.arange(0, BLOCK_V)
        shown = column < V_DIM
        held = inside[:, None] & shown[None, :]
        stored = v_ptr + ((rows * HEADS + head) * V_DIM)[:, None] + column[None, :]
        z = tl.load(stored, mask=held, other=0.0).to(COMPUTE)
        if PATCHED:
            if rank != 0:
                values = HEADS * K_DIM + head * V_DIM + column
                z += _delta(left, right, local, inside, values, shown, rank, WIDTH, COMPUTE, BLOCK_R)
        tl.store(out_v[:, None] + (column * v_step)[None, :], _rounded(z, OUT), mask=held)


@triton.jit
def _angle(table_ptr, rows, pair, live, HALF: tl.constexpr):
    """Cosine and sine of each token and pair, from a table ``[T, 2, HALF]``."""
    at = table_ptr + (rows * (2 * HALF))[:, None] + pair[None, :]
    return tl.load(at, mask=live, other=0.0), tl.load(at + HALF, mask=live, other=0.0)


@triton.jit
def _delta(
    left, right, local, inside, column, live, rank, WIDTH: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Return a patch's addition at tokens ``local`` of its part and columns ``column`` of a row (keys of all heads first)."""
    total = tl.full((local.shape[0], column.shape[0]), 0.0, COMPUTE)
    if rank < 0:
        source = left + (local * WIDTH)[:, None] + column[None, :]
        total = tl.load(source, mask=inside[:, None] & live[None, :], other=0.0).to(COMPUTE)
    else:
        for at in range(0, rank, BLOCK_R):
            m = at + tl.arange(0, BLOCK_R)
            mine = left + (local * rank)[:, None] + m[None, :]
            theirs = right + (m * WIDTH)[:, None] + column[None, :]
            a = tl.load(mine, mask=inside[:, None] & (m < rank)[None, :], other=0.0).to(COMPUTE)
            b = tl.load(theirs, mask=(m < rank)[:, None] & live[None, :], other=0.0).to(COMPUTE)
            # No tf32, whose 10 bits of mantissa would round the delta before it is added.
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=COMPUTE)
    return total


@triton.jit
def _rounded(x, OUT: tl.constexpr):
    """``x`` in the dtype that is served, rounded to nearest, ties to even."""
    if OUT == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x != x, 0x7FC0, bits)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(OUT)
