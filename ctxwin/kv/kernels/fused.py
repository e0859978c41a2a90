# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: SIM102, SIM300 - one condition is of the compilation, the other of the run; a constexpr stands on the left
"""The load kernel in Triton: patch, rotation, rounding and the write of some layers in one pass; and its counterpart, which reads
paged caches. `triton_kernel` launches them.

Two rules keep it the same program under Triton's interpreter, which the tests run it by, and on a GPU. Rounding to
bfloat16 is spelled out, because the interpreter's conversion truncates. And only built-in operators are used: helpers of
`triton.language` that are functions of Triton's own (``tl.zeros``, ``tl.cdiv``) are bound to one of the two when
Triton is imported.
"""

import triton
import triton.language as tl

FIELDS: int = 7
"""Numbers of a part in the table that `load_layers` reads: first row, last plus one, rank (-1: dense, 0: no patch), where in
``factors`` its left and right side begin (dense: its delta, and nothing), and the addresses of its keys and of its values."""
TARGETS: int = 3
"""Numbers of a layer in the table that `load_layers` reads: which of the angles turn its keys, and the addresses of the tensors
that its keys and its values are written to."""


@triton.jit(do_not_specialize=["tokens", "factors_step", "parts_step"])
def load_layers(
    factors_ptr, parts_ptr, targets_ptr, blocks_ptr, turn_ptr, frame_ptr, slots_ptr, tokens, factors_step, parts_step,
    k_base, k_block, k_token, k_head, k_step, v_base, v_block, v_token, v_head, v_step,
    FIELDS: tl.constexpr, TARGETS: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, OFFSET: tl.constexpr, REST: tl.constexpr,
    TASKS: tl.constexpr, PATCHED: tl.constexpr, FRAMED: tl.constexpr, PAGED: tl.constexpr, NARROW: tl.constexpr,
    ALIGNMENT: tl.constexpr, PART_ALIGNMENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr,
    STORED: tl.constexpr, OUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: the keys of one head, or up to ``BLOCK_V`` of its values, of up to ``BLOCK_T`` tokens of one part.

    ``blocks [B, 2]`` names each block's part and first row, ``parts [L, P, FIELDS]`` and ``targets [L, TARGETS]`` see above; a
    part's keys ``[t, HEADS, K_DIM]`` and values ``[t, HEADS, V_DIM]`` lie as stored, wherever the table says.
    ``turn [kinds, T, 2, HALF]`` are cosine and sine of new angles minus stored ones, ``frame`` of stored ones minus the origin's.
    Row t goes to slot ``slots[t]`` of blocks of ``BLOCK_SIZE`` tokens, or to row t. ``ALIGNMENT``, ``PART_ALIGNMENT``: bytes that
    divide all addresses of ``targets`` and of ``parts``. ``NARROW``: the products of a patch take its factors as they are stored,
    in 16 bits; their sums have 32. Grid: ``(B, HEADS * TASKS, L)``.
    """
    block = tl.program_id(0)
    # 64-bit throughout: a paged cache, and many layers at once, outgrow 32-bit offsets.
    layer = tl.program_id(2).to(tl.int64)
    target = targets_ptr + layer * TARGETS
    kind = tl.load(target)
    out_k_ptr = tl.multiple_of(tl.load(target + 1).to(tl.pointer_type(OUT)), ALIGNMENT)
    out_v_ptr = tl.multiple_of(tl.load(target + 2).to(tl.pointer_type(OUT)), ALIGNMENT)
    factors_ptr += layer * factors_step
    parts_ptr += layer * parts_step
    turn_ptr += kind * tokens * (2 * HALF)
    frame_ptr += kind * tokens * (2 * HALF)
    head = tl.program_id(1) // TASKS
    task = tl.program_id(1) % TASKS
    part = tl.load(blocks_ptr + 2 * block)
    entry = parts_ptr + part * FIELDS
    begin = tl.load(entry)
    stop = tl.load(entry + 1)
    rank = tl.load(entry + 2)
    left = factors_ptr + tl.load(entry + 3)
    right = factors_ptr + tl.load(entry + 4)
    k_ptr = tl.multiple_of(tl.load(entry + 5).to(tl.pointer_type(STORED)), PART_ALIGNMENT)
    v_ptr = tl.multiple_of(tl.load(entry + 6).to(tl.pointer_type(STORED)), PART_ALIGNMENT)
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
        source = k_ptr + ((local * HEADS + head) * K_DIM)[:, None] + (pair * STEP)[None, :]
        x = tl.load(source, mask=live, other=0.0).to(COMPUTE)
        y = tl.load(source + OFFSET, mask=live, other=0.0).to(COMPUTE)
        if PATCHED:
            if rank != 0:
                first = head * K_DIM + pair * STEP
                dx = _delta(left, right, local, inside, first, turning, rank, WIDTH, NARROW, COMPUTE, BLOCK_R)
                dy = _delta(left, right, local, inside, first + OFFSET, turning, rank, WIDTH, NARROW, COMPUTE, BLOCK_R)
                if FRAMED:  # what is added turns to the frame of the keys first
                    cos, sin = _angle(frame_ptr, rows, pair, live, HALF)
                    x += dx * cos - dy * sin
                    y += dy * cos + dx * sin
                else:
                    x += dx
                    y += dy
        cos, sin = _angle(turn_ptr, rows, pair, live, HALF)
        address = out[:, None] + (pair * STEP * k_step)[None, :]
        tl.store(address, _rounded(x * cos - y * sin, OUT), mask=live)
        tl.store(address + OFFSET * k_step, _rounded(y * cos + x * sin, OUT), mask=live)
        if REST > 0:
            beyond = 2 * HALF + tl.arange(0, BLOCK_REST)
            passing = beyond < K_DIM
            there = inside[:, None] & passing[None, :]
            resting = k_ptr + ((local * HEADS + head) * K_DIM)[:, None] + beyond[None, :]
            rest = tl.load(resting, mask=there, other=0.0).to(COMPUTE)
            if PATCHED:
                if rank != 0:
                    last = head * K_DIM + beyond
                    rest += _delta(left, right, local, inside, last, passing, rank, WIDTH, NARROW, COMPUTE, BLOCK_R)
            tl.store(out[:, None] + (beyond * k_step)[None, :], _rounded(rest, OUT), mask=there)
    else:  # the values ``[(task - 1) * BLOCK_V, task * BLOCK_V)``
        out_v = out_v_ptr + v_base + (slots // BLOCK_SIZE) * v_block + (slots % BLOCK_SIZE) * v_token + head * v_head
        column = (task - 1) * BLOCK_V + tl.arange(0, BLOCK_V)
        valid = column < V_DIM
        mask = inside[:, None] & valid[None, :]
        stored = v_ptr + ((local * HEADS + head) * V_DIM)[:, None] + column[None, :]
        z = tl.load(stored, mask=mask, other=0.0).to(COMPUTE)
        if PATCHED:
            if rank != 0:
                values = HEADS * K_DIM + head * V_DIM + column
                z += _delta(left, right, local, inside, values, valid, rank, WIDTH, NARROW, COMPUTE, BLOCK_R)
        tl.store(out_v[:, None] + (column * v_step)[None, :], _rounded(z, OUT), mask=mask)


@triton.jit(do_not_specialize=["begin", "tokens"])
def read_layers(
    k_out_ptr, v_out_ptr, table_ptr, begin, tokens,
    k_base, k_block, k_token, k_head, k_step, v_base, v_block, v_token, v_head, v_step,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, NUMBER: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the keys of one head, or its values, of up to ``BLOCK_T`` tokens of one layer, to the bit.

    ``table`` holds the address of each of ``LAYERS`` caches, then the number of each block. Tokens from ``begin`` on go to
    ``[LAYERS, tokens, HEADS, dim]``. ``NUMBER``: integers as wide as the numbers. Grid: ``(token blocks, 2 * HEADS, LAYERS)``.
    """
    layer = tl.program_id(2).to(tl.int64)
    cache_ptr = tl.multiple_of(tl.load(table_ptr + layer).to(tl.pointer_type(NUMBER)), ALIGNMENT)
    head, column = tl.program_id(1) // 2, tl.arange(0, BLOCK_D)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < tokens
    block = tl.load(table_ptr + LAYERS + (begin + rows) // BLOCK_SIZE, mask=inside, other=0)
    place, line = (begin + rows) % BLOCK_SIZE, (layer * tokens + rows) * HEADS + head
    if tl.program_id(1) % 2 == 0:
        live = inside[:, None] & (column < K_DIM)[None, :]
        source = cache_ptr + k_base + block * k_block + place * k_token + head * k_head
        numbers = tl.load(source[:, None] + (column * k_step)[None, :], mask=live, other=0)
        tl.store(k_out_ptr + (line * K_DIM)[:, None] + column[None, :], numbers, mask=live)
    else:
        live = inside[:, None] & (column < V_DIM)[None, :]
        source = cache_ptr + v_base + block * v_block + place * v_token + head * v_head
        numbers = tl.load(source[:, None] + (column * v_step)[None, :], mask=live, other=0)
        tl.store(v_out_ptr + (line * V_DIM)[:, None] + column[None, :], numbers, mask=live)


@triton.jit
def _angle(table_ptr, rows, pair, live, HALF: tl.constexpr):
    """Cosine and sine of each token and pair, from a table ``[T, 2, HALF]``."""
    at = table_ptr + (rows * (2 * HALF))[:, None] + pair[None, :]
    return tl.load(at, mask=live, other=0.0), tl.load(at + HALF, mask=live, other=0.0)


@triton.jit
def _delta(
    left, right, local, inside, column, live, rank,
    WIDTH: tl.constexpr, NARROW: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
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
            a = tl.load(mine, mask=inside[:, None] & (m < rank)[None, :], other=0.0)
            b = tl.load(theirs, mask=(m < rank)[:, None] & live[None, :], other=0.0)
            if NARROW:  # products of 16-bit numbers are exact in float32
                total = tl.dot(a, b, total, out_dtype=COMPUTE)
            else:  # no tf32, whose 10 bits of mantissa would round the delta before it is added
                total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee", out_dtype=COMPUTE)
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
