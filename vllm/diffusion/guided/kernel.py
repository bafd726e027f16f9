# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of joint choices; `window.py` says the same with arrays.

A class's best token is one 64-bit key: its logit, over the temperature and with its noise, as an
integer of the same order above, and below it a number that is larger for lower token ids. Sums of
probabilities are whole multiples of 2^-38 of the best one, so they do not depend on an order.
"""

import triton
import triton.language as tl

LEAST_WEIGHT = tl.constexpr(-1e4)
LEAST_KEY = tl.constexpr(-(2**63))
UNITS = tl.constexpr(2.0**38)
LOG_UNITS = tl.constexpr(26.339592861277918)
NEVER = tl.constexpr(-1e30)  # instead of -inf, which leaves differences undefined
FIELDS = tl.constexpr(24)  # of a request's numbers


@triton.jit
def _word(purpose, step, position, column, seed_low, seed_high):
    """[N] uint32, the words of which `flash_sample.uniform` makes numbers."""
    column = column.to(tl.uint32)
    c0 = column * 0 + purpose
    c1 = column * 0 + step.to(tl.uint32)
    c2 = column * 0 + position.to(tl.uint32)
    c3 = column >> 2
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    m0 = column * 0 + 0xD2511F53
    m1 = column * 0 + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    word = column & 3
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def _gumbel(purpose, step, position, column, seed_low, seed_high):
    """[N] fp32: -log(-log(u)) of the numbers u, with all digits where u is next to 1."""
    word = _word(purpose, step, position, column, seed_low, seed_high)
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    missing = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = missing * (1 + missing * (0.5 + missing * (0.3333333333 + 0.25 * missing)))
    return -tl.log(tl.where(missing < 0.01, series, -tl.log(u)))


@triton.jit
def _key(value, column):
    """[N] int64 of values [N] fp32 of columns [N]; of equal values the lowest column is largest."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _value(key):
    """The fp32 values of keys."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _loaded(logits, place, is_column):
    found = tl.load(logits + place, mask=is_column, other=float("-inf")).to(tl.float32)
    return tl.where(found == found, found, float("-inf"))


@triton.jit(do_not_specialize=["num_columns", "first_row", "seed_low", "seed_high", "step"])
def read_kernel(
    logits,  # [r, V]
    row_stride,
    class_of,  # [V] int32, -1 for none
    positions,  # [r] int64
    keys,  # [R, C] int64, at least LEAST_KEY
    parts,  # [R, tiles, 2] fp32: maximum, and sum of exp of what is left, at the score's scale
    num_columns,
    num_classes,
    num_tiles,
    first_row,
    scale,  # fp32: of the draw
    score_scale,
    seed_low,
    seed_high,
    step,
    PURPOSE: tl.constexpr,
    NOISY: tl.constexpr,
    GIANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best tokens of all classes, and what a softmax wants, of one tile of one row."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    found = _loaded(logits, row.to(tl.int64) * row_stride + columns, is_column)
    scored = found * score_scale
    top = tl.maximum(tl.max(scored, axis=0), NEVER)
    total = tl.sum(tl.exp(scored - top), axis=0)
    place = ((first_row + row) * num_tiles + tile) * 2
    tl.store(parts + place, top)
    tl.store(parts + place + 1, total)
    value = found * scale
    if NOISY:
        position = tl.load(positions + row)
        value += _gumbel(PURPOSE, step, position, columns, seed_low, seed_high)
    key = _key(tl.maximum(value, NEVER), columns)
    own = tl.load(class_of + columns, mask=is_column, other=-1)
    to = keys + (first_row + row).to(tl.int64) * num_classes
    for giant in tl.static_range(GIANTS):
        tl.atomic_max(to + giant, tl.max(tl.where(own == giant, key, LEAST_KEY), axis=0))
    tl.atomic_max(to + own, key, mask=own >= GIANTS)


@triton.jit(do_not_specialize=["num_columns", "first_row"])
def sum_kernel(
    logits,  # as `read_kernel`
    row_stride,
    class_of,
    keys,
    sums,  # [R, C] int64
    num_columns,
    num_classes,
    first_row,
    scale,
    GIANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over the tokens of every class of exp(logit - the best key)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    found = _loaded(logits, row.to(tl.int64) * row_stride + columns, is_column)
    own = tl.load(class_of + columns, mask=is_column, other=-1)
    start = (first_row + row).to(tl.int64) * num_classes
    best = _value(tl.load(keys + start + own, mask=own >= 0, other=0))
    share = tl.where(own >= 0, tl.exp(tl.maximum(found * scale, NEVER) - best), 0.0)
    units = (share.to(tl.float64) * UNITS).to(tl.int64)
    for giant in tl.static_range(GIANTS):
        of_giant = tl.where(own == giant, units, tl.zeros_like(units))
        tl.atomic_add(sums + start + giant, tl.sum(of_giant, axis=0))
    tl.atomic_add(sums + start + own, units, mask=own >= GIANTS)


@triton.jit
def _softmax_terms(parts, row, num_tiles, TILES: tl.constexpr):
    """Maximum and log of the sum of exp of a row, at the score's scale."""
    tiles = tl.arange(0, TILES)
    place = (row * num_tiles + tiles) * 2
    tops = tl.load(parts + place, mask=tiles < num_tiles, other=NEVER)
    totals = tl.load(parts + place + 1, mask=tiles < num_tiles, other=0.0)
    top = tl.max(tops, axis=0)
    return top, top + tl.log(tl.sum(totals * tl.exp(tops - top), axis=0))


@triton.jit
def _weights(keys, sums, place, mask, is_drawn):
    """[N] fp32 of classes: of all their tokens where one is drawn, else of the best one."""
    best = _value(tl.load(keys + place, mask=mask, other=LEAST_KEY))
    units = tl.load(sums + place, mask=mask & is_drawn, other=1)
    more = tl.log(tl.maximum(units, 1).to(tl.float32)) - LOG_UNITS
    return tl.where(is_drawn, best + more, best)


@triton.jit
def set_kernel(
    numbers,  # [requests, FIELDS] int64
    scales,  # [requests, 2] fp32: of the draw, of the score
    request_of,  # [N] int32, of every position
    row_of,  # [N] int32: its row; -1 where a token stands, -2 where anything may
    class_at,  # [N] int32: of the token that stands there
    tables,  # int32: the languages
    keys,
    sums,
    parts,
    weights,  # [N, most_sets] fp32, written
    num_classes,
    num_tiles,
    most_sets,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILES: tl.constexpr,
):
    """What each set weighs at a position."""
    position = tl.program_id(0)
    request = tl.load(request_of + position)
    own = numbers + request * FIELDS
    starts, members = tl.load(own), tl.load(own + 1)
    num_sets = tl.load(own + 2)
    is_drawn = tl.load(own + 3) > 0
    row, standing = tl.load(row_of + position), tl.load(class_at + position)
    sets = tl.program_id(1) * SETS + tl.arange(0, SETS)
    is_set = sets < num_sets
    first = tl.load(tables + starts + sets, mask=is_set, other=0)
    count = tl.load(tables + starts + sets + 1, mask=is_set, other=0) - first
    top = tl.full([SETS], NEVER, tl.float32)
    total = tl.zeros([SETS], tl.float32)
    there = tl.zeros([SETS], tl.int32)
    for start in range(0, tl.max(count, axis=0), MEMBERS):
        index = start + tl.arange(0, MEMBERS)
        mask = index[None, :] < count[:, None]
        member = tl.load(tables + members + first[:, None] + index[None, :], mask=mask, other=-1)
        there = tl.maximum(there, tl.max((member == standing).to(tl.int32), axis=1))
        place = tl.maximum(row, 0).to(tl.int64) * num_classes + member
        found = _weights(keys, sums, place, mask & (row >= 0), is_drawn)
        found = tl.where(mask & (row >= 0), found, NEVER)
        newest = tl.maximum(top, tl.max(found, axis=1))
        shares = tl.where(found > NEVER, tl.exp(found - newest[:, None]), 0.0)
        total = total * tl.exp(top - newest) + tl.sum(shares, axis=1)
        top = newest
    best, _ = _softmax_terms(parts, tl.maximum(row, 0), num_tiles, TILES)
    base = best * tl.load(scales + 2 * request) / tl.load(scales + 2 * request + 1)
    whole = tl.where(is_drawn & (total > 0), top + tl.log(tl.maximum(total, 1e-37)), top)
    found = tl.maximum(whole - base, LEAST_WEIGHT)
    known = tl.where(there > 0, 0.0, NEVER)
    found = tl.where(row >= 0, found, tl.where(row == -1, known, 0.0))
    tl.store(
        weights + position.to(tl.int64) * most_sets + sets,
        tl.where(is_set, found, NEVER),
        mask=sets < most_sets,
    )


@triton.jit
def choose_kernel(
    numbers,
    row_of,
    tables,
    weights,
    values,  # fp32: [n + 1, Q] of every request, written
    chosen,  # [N] int32, written: the set that each position takes
    most_sets,
    PURPOSE: tl.constexpr,
    STATES: tl.constexpr,
    EDGES: tl.constexpr,
    WIDEST: tl.constexpr,
):
    """One request: backward over its positions what a state is worth, forward what they take."""
    request = tl.program_id(0)
    own = numbers + request * FIELDS
    num_sets = tl.load(own + 2)
    is_drawn = tl.load(own + 3) > 0
    edge_sets, edge_targets = tl.load(own + 4), tl.load(own + 5)
    room, num_states, width = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
    first, count = tl.load(own + 9), tl.load(own + 10)
    to, start, left = tl.load(own + 11), tl.load(own + 12), tl.load(own + 13)
    for begin in range(0, num_states, STATES):
        states = begin + tl.arange(0, STATES)
        is_state = states < num_states
        needed = tl.load(tables + room + states, mask=is_state, other=1 << 30)
        done = tl.where(needed <= tl.maximum(left, 0), 0.0, NEVER)
        tl.store(values + to + count * num_states + states, done, mask=is_state)
    tl.debug_barrier()
    for behind in range(1, count + 1):
        index = count - behind
        here = to + index * num_states
        weight = weights + (first + index) * most_sets
        is_summed = is_drawn & (tl.load(row_of + first + index) != -2)
        for begin in range(0, num_states, STATES):
            states = begin + tl.arange(0, STATES)
            is_state = states < num_states
            top = tl.full([STATES], 2 * NEVER, tl.float32)
            total = tl.zeros([STATES], tl.float32)
            for edge in range(0, width, EDGES):
                edges = edge + tl.arange(0, EDGES)
                place = states[:, None] * width + edges[None, :]
                mask = is_state[:, None] & (edges[None, :] < width)
                taken = tl.load(tables + edge_sets + place, mask=mask, other=0)
                target = tl.load(tables + edge_targets + place, mask=mask, other=0)
                mask = mask & (taken < num_sets)
                worth = tl.load(weight + taken, mask=mask, other=NEVER)
                worth += tl.load(values + here + num_states + target, mask=mask, other=NEVER)
                newest = tl.maximum(top, tl.max(worth, axis=1))
                shares = tl.where(mask, tl.exp(worth - newest[:, None]), 0.0)
                total = total * tl.exp(top - newest) + tl.sum(shares, axis=1)
                top = newest
            found = tl.where(is_summed, top + tl.log(tl.maximum(total, 1e-37)), top)
            needed = tl.load(tables + room + states, mask=is_state, other=0)
            is_late = (index == count + left) & (needed > 0)
            found = tl.maximum(tl.where(is_late, NEVER, found), NEVER)
            tl.store(values + here + states, found, mask=is_state)
        tl.debug_barrier()
    seed_low, seed_high = tl.load(own + 14), tl.load(own + 15)
    step, position = tl.load(own + 16), tl.load(own + 17)
    edges = tl.arange(0, WIDEST)
    state = start
    for index in range(count):
        mask = edges < width
        taken = tl.load(tables + edge_sets + state * width + edges, mask=mask, other=0)
        target = tl.load(tables + edge_targets + state * width + edges, mask=mask, other=0)
        mask = mask & (taken < num_sets)
        weight = weights + (first + index) * most_sets
        worth = tl.load(weight + taken, mask=mask, other=2 * NEVER)
        after = to + (index + 1) * num_states
        worth += tl.load(values + after + target, mask=mask, other=2 * NEVER)
        top = tl.max(worth, axis=0)
        place = tl.argmax(worth, axis=0)
        if is_drawn & (tl.load(row_of + first + index) != -2):
            shares = tl.where(mask, tl.exp(worth - top), 0.0)
            word = _word(PURPOSE, step, position + index, edges * 0, seed_low, seed_high)
            drawn = (tl.max(word.to(tl.float32), axis=0) + 0.5) * 2.3283064365386963e-10
            drawn = drawn * tl.sum(shares, axis=0)
            below = (tl.cumsum(shares, axis=0) <= drawn) & mask
            place = tl.minimum(tl.sum(below.to(tl.int32), axis=0), place * 0 + width - 1).to(
                tl.int32
            )
        is_place = edges == place
        tl.store(chosen + first + index, tl.sum(tl.where(is_place, taken, 0), axis=0))
        state = tl.sum(tl.where(is_place, target, 0), axis=0).to(tl.int64)


@triton.jit
def token_kernel(
    numbers,
    scales,
    place_of,  # [R, 2] int32: of every row, its position and its column in `sampled`
    request_of,
    tables,
    keys,
    parts,
    chosen,
    sampled,  # [3 or more, columns] fp64, written
    stride,
    logprobs,  # [R] fp64, written
    tokens,  # [R] int64, written
    num_classes,
    num_tiles,
    PURPOSE: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The best token of a row's set, and its score."""
    row = tl.program_id(0)
    position, column = tl.load(place_of + 2 * row), tl.load(place_of + 2 * row + 1)
    request = tl.load(request_of + position)
    own = numbers + request * FIELDS
    starts, members = tl.load(own), tl.load(own + 1)
    taken = tl.load(chosen + position)
    first = tl.load(tables + starts + taken)
    count = tl.load(tables + starts + taken + 1) - first
    best = tl.full([MEMBERS], LEAST_KEY, tl.int64)
    for start in range(0, count, MEMBERS):
        index = start + tl.arange(0, MEMBERS)
        member = tl.load(tables + members + first + index, mask=index < count, other=0)
        place = row.to(tl.int64) * num_classes + member
        found = tl.load(keys + place, mask=index < count, other=LEAST_KEY)
        best = tl.maximum(best, found)
    key = tl.max(best, axis=0)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    scale, score_scale = tl.load(scales + 2 * request), tl.load(scales + 2 * request + 1)
    value = _value(key).to(tl.float64)
    if tl.load(own + 3) > 0:
        step = tl.load(own + 16)
        at = tl.load(own + 17) + position - tl.load(own + 9)
        columns = tl.arange(0, 16) * 0 + token
        noise = _gumbel(PURPOSE, step, at, columns, tl.load(own + 14), tl.load(own + 15))
        value = value - tl.max(noise, axis=0)
    _, total = _softmax_terms(parts, row, num_tiles, TILES)
    logprob = value / scale * score_scale - total
    tl.store(tokens + row, token)
    tl.store(logprobs + row, logprob)
    tl.store(sampled + column, token.to(tl.float64))
    tl.store(sampled + 2 * stride + column, token.to(tl.float64))
    is_excluded = (token == tl.load(own + 19)) | (token == tl.load(own + 20))
    score = tl.where(is_excluded, 0.0, tl.exp(logprob))
    tl.store(sampled + stride + column, score, mask=tl.load(own + 18) > 0)
