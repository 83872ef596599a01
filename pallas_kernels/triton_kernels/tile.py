"""How a tensor is presented to the Triton kernels: as groups, one block of the format each, one group a thread.

A program handles a tile of groups. The last axis of an array holds WIDTH entries for each group and ROW for each row; the last group of
a row may be cut short. What is missing there, or beyond the last group, is loaded as zero and not stored, so no array is padded.
Offsets are 64 bits wide.

A group is loaded and stored in pieces of one access: eight entries at most, one where the rows are no whole groups and begin at any
address. Triton then gives a thread whole groups, and nothing is exchanged between threads, neither for the block maximum nor between
arrays of different widths (where it was, Triton 3.6 gave wrong bits on an H200).
"""

import triton
import triton.language as tl


@triton.jit
def locate(pointer, groups, ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """(pointer to its first entry, whether it exists, entries of its row from there on) of each group of the tile, of `groups` in all."""
    lane = tl.arange(0, TILE)
    group = tl.program_id(0) * TILE + lane
    if ROW % WIDTH == 0:
        first = pointer + tl.program_id(0).to(tl.int64) * (TILE * WIDTH) + lane * WIDTH
        entries = tl.full([TILE], WIDTH, tl.int32)
    else:
        blocks: tl.constexpr = (ROW + WIDTH - 1) // WIDTH
        row = group // blocks
        column = (group - row * blocks) * WIDTH
        first = pointer + row.to(tl.int64) * ROW + column
        entries = ROW - column
    return first, group < groups, entries


@triton.jit
def load_groups(pointer, groups, ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The entries of each group, [TILE, WIDTH]."""
    first, exists, entries = locate(pointer, groups, ROW, WIDTH, TILE)
    return _load(first, exists, entries, WIDTH, 0, 8 if ROW % WIDTH == 0 else 1)


@triton.jit
def store_groups(pointer, values, groups, ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Stores [TILE, WIDTH] as the entries of each group."""
    first, exists, entries = locate(pointer, groups, ROW, WIDTH, TILE)
    _store(first, exists, entries, values, WIDTH, 0, 8 if ROW % WIDTH == 0 else 1)


@triton.jit
def load_words(pointer, groups, ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Up to four bytes of each group as int32[TILE, 1], the first one in the lowest bits."""
    first, exists, entries = locate(pointer, groups, ROW, WIDTH, TILE)
    word = tl.load(first, mask=exists, other=0).to(tl.int32)
    for number in tl.static_range(1, WIDTH):
        word |= tl.load(first + number, mask=exists & (number < entries), other=0).to(tl.int32) << (8 * number)
    return word[:, None]


@triton.jit
def row_value(pointer, groups, BLOCKS: tl.constexpr, EACH_ROW: tl.constexpr, TILE: tl.constexpr):
    """The value of the row of each group, [TILE, 1], or the one value of all rows. A row has `BLOCKS` groups."""
    if EACH_ROW:
        group = tl.program_id(0) * TILE + tl.arange(0, TILE)
        return tl.load(pointer + group // BLOCKS, mask=group < groups, other=0)[:, None]
    else:
        return tl.load(pointer)


@triton.jit
def _load(first, exists, entries, WIDTH: tl.constexpr, START: tl.constexpr, MOST: tl.constexpr):
    """`WIDTH` entries of each group from number `START` on, at most `MOST` with one access."""
    if WIDTH <= MOST and WIDTH * first.dtype.element_ty.primitive_bitwidth <= 128:
        lane = START + tl.arange(0, WIDTH)[None, :]
        return tl.load(first[:, None] + lane, mask=exists[:, None] & (lane < entries[:, None]), other=0)
    else:
        half: tl.constexpr = WIDTH // 2
        low = _load(first, exists, entries, half, START, MOST)
        high = _load(first, exists, entries, half, START + half, MOST)
        return tl.join(low, high).permute(0, 2, 1).reshape(first.shape[0], WIDTH)


@triton.jit
def _store(first, exists, entries, values, WIDTH: tl.constexpr, START: tl.constexpr, MOST: tl.constexpr):
    if WIDTH <= MOST and WIDTH * first.dtype.element_ty.primitive_bitwidth <= 128:
        lane = START + tl.arange(0, WIDTH)[None, :]
        tl.store(first[:, None] + lane, values, mask=exists[:, None] & (lane < entries[:, None]))
    else:
        half: tl.constexpr = WIDTH // 2
        low, high = values.reshape(first.shape[0], 2, half).permute(0, 2, 1).split()
        _store(first, exists, entries, low, half, START, MOST)
        _store(first, exists, entries, high, half, START + half, MOST)
