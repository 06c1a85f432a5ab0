"""Triton kernels. Importing them needs Triton; with ``TRITON_INTERPRET=1`` they run on a CPU, slowly."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x, added, weight, total, normed, eps, width, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute ``total`` = ``x`` + ``added`` and its RMS norm; a program for each row of ``width`` values."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row + column, inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(added + row + column, inside, other=0.0).to(tl.float32)
        tl.store(total + row + column, value.to(total.dtype.element_ty), inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    weights = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (value * scale * weights).to(normed.dtype.element_ty), inside)


@triton.jit
def rotate(parts, stride, positions, cosines, sines, HALF: tl.constexpr):
    """Rotate the heads of each row in place, a program for each head; the halves of a head are the planes' axes."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = parts + row.to(tl.int64) * stride + head * 2 * HALF + tl.arange(0, HALF)
    table = tl.load(positions + row) * 2 * HALF + tl.arange(0, HALF)
    a, b = tl.load(first).to(tl.float32), tl.load(first + HALF).to(tl.float32)
    cosine, sine = tl.load(cosines + table).to(tl.float32), tl.load(sines + table).to(tl.float32)
    turned = a * cosine + b * sine
    cosine, sine = tl.load(cosines + table + HALF).to(tl.float32), tl.load(sines + table + HALF).to(tl.float32)
    second = b * cosine + a * sine
    tl.store(first, turned.to(parts.dtype.element_ty))
    tl.store(first + HALF, second.to(parts.dtype.element_ty))


@triton.jit
def gate(both, result, width, BLOCK: tl.constexpr):
    """Compute SiLU of the first ``width`` values of each row times the second ``width`` values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = tl.load(both + row * 2 * width + column, inside, other=0.0).to(tl.float32)
    values = tl.load(both + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + column, (gates * tl.sigmoid(gates) * values).to(result.dtype.element_ty), inside)


@triton.jit
def store(key, value, key_row, value_row, keys, values, slots, stores, of_slot, of_head, DIM: tl.constexpr):
    """Store the key and the value of each row and head at their place of a slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, DIM)
    place = tl.load(slots + row).to(tl.int64) * of_slot + head * of_head + tl.load(stores + row).to(tl.int64) * DIM
    source = head * DIM + column
    tl.store(keys + place + column, tl.load(key + row * key_row + source).to(keys.dtype.element_ty))
    tl.store(values + place + column, tl.load(value + row * value_row + source).to(values.dtype.element_ty))


@triton.jit(do_not_specialize=["splits", "rows", "width", "nodes", "window", "places"])
def attend(
    query, of_row, keys, values, of_slot, of_head, places,
    cells, where, owners, visible, positions, base, mask,
    sums, tops, totals,
    scale, softcap, window, splits, rows, width, nodes,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to one of ``splits`` parts of the places that a sequence's rows see, for one head of keys.

    Stores for each row, head and part the highest score, and relative to it the sum of weights and of weighted values.
    """
    tile, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line, head = pair // KV_HEADS, pair % KV_HEADS
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cell, group = line * width + m // GROUPS, m % GROUPS
    column = tl.arange(0, DIM)
    row = tl.load(cells + cell, m < width * GROUPS, other=0)
    live = (m < width * GROUPS) & (tl.load(where + row) == cell)
    line_of_part = row * (KV_HEADS * GROUPS) + head * GROUPS + group  # row and head of each line of the tile
    seen = tl.where(live, tl.load(visible + row), 0)
    limit = tl.max(seen, 0)
    position = tl.load(positions + row)
    begin = tl.load(base + row) if TREE else seen
    if TREE:
        limit = tl.maximum(limit, tl.max(tl.where(live, begin + nodes, 0), 0))
    limit = tl.minimum(limit, places)
    address = query + row * of_row + (head * GROUPS + group) * DIM
    q = tl.load(address[:, None] + column[None, :], live[:, None], other=0.0).to(keys.dtype.element_ty)
    slot = tl.load(owners + line).to(tl.int64) * of_slot + head * of_head
    each = tl.cdiv(tl.cdiv(limit, BLOCK_N), splits) * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(split * each, tl.minimum((split + 1) * each, limit), BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        read = slot + place[:, None] * DIM + column[None, :]
        inside = (place < limit)[:, None]
        k = tl.load(keys + read, inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # a hyperbolic tangent
        shown = place[None, :] < seen[:, None]
        if WINDOW:
            shown = shown & (place[None, :] > (position - window)[:, None])
        if TREE:
            node = place[None, :] - begin[:, None]
            within = live[:, None] & (node >= 0) & (node < nodes)
            shown = shown | (tl.load(mask + row[:, None] * nodes + node, within, other=0) != 0)
        scores = tl.where(shown, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        by = tl.where(highest == float("-inf"), 0.0, highest)  # 0 for a row that has seen no place yet
        weights, kept = tl.exp(scores - by[:, None]), tl.exp(top - by)
        v = tl.load(values + read, inside, other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total, top = total * kept + tl.sum(weights, 1), highest
    part = split * rows * (KV_HEADS * GROUPS) + line_of_part
    tl.store(tops + part, top, live)
    tl.store(totals + part, total, live)
    tl.store(sums + part[:, None] * DIM + column[None, :], mixed, live[:, None])


@triton.jit(do_not_specialize=["splits", "rows"])
def combine(
    sums, tops, totals, cells, where, result, splits, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Combine the parts of ``attend``, at most ``MOST``, a program for each row and head.

    Padding rows, which ``attend`` has not computed, become 0.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    owner = tl.load(cells + tl.load(where + row))  # differs from ``row`` for padding
    split, column = tl.arange(0, MOST), tl.arange(0, DIM)
    part = split * rows * HEADS + row * HEADS + head
    computed = (split < splits) & (split * 0 + owner == row)
    top = tl.load(tops + part, computed, other=-1e30)  # counts only if there is no other part
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weights * tl.load(totals + part, computed, other=1.0), 0)
    mixed = tl.load(sums + part[:, None] * DIM + column[None, :], computed[:, None], other=0.0)
    mixed = tl.sum(weights[:, None] * mixed, 0) / total
    tl.store(result + (row * HEADS + head) * DIM + column, mixed.to(result.dtype.element_ty))
