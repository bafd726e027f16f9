# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of joint choices; `open_window.py` is their reference implementation in numpy.

Rows of logits are read in the order of `Language.segments`. So one program reduces a whole
segment, and later a whole class: no result depends on the order of programs, and nothing is
sorted.
"""

import triton
import triton.language as tl

MIN_WEIGHT = tl.constexpr(-1e4)
# It replaces -inf, whose differences are undefined.
NEVER = tl.constexpr(-1e30)
FIELDS = tl.constexpr(32)  # numbers per request


@triton.jit
def _word(purpose, step, position, column, seed_low, seed_high):
    """Return the random words [N] uint32 from which `flash_sample.uniform` computes numbers."""
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
def _uniform(step, position, column, seed_low, seed_high, PURPOSE: tl.constexpr):
    """Return fp32 numbers u in (0, 1), one per column, and 1 - u."""
    word = _word(PURPOSE, step, position, column, seed_low, seed_high)
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return u, ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _gumbel(step, position, column, seed_low, seed_high, PURPOSE: tl.constexpr):
    """Return fp32 -log(-log(u)) of uniform numbers u, also accurate if u is close to 1."""
    u, missing = _uniform(step, position, column, seed_low, seed_high, PURPOSE)
    series = missing * (1 + missing * (0.5 + missing * (0.3333333333 + 0.25 * missing)))
    return -tl.log(tl.where(missing < 0.01, series, -tl.log(u)))


@triton.jit
def _place_of(fields, position):
    """Return step, canvas position and seed: the keys of a position's random numbers."""
    at = tl.load(fields + 17) + position - tl.load(fields + 9)
    return tl.load(fields + 16), at, tl.load(fields + 14), tl.load(fields + 15)


@triton.jit(do_not_specialize=["first_column", "num_columns"])
def read_kernel(
    logits,  # [r, V]
    row_stride,
    first_column,  # column of `row_at` for the first row
    row_at,  # [num_columns] int32: the row of the step, -1 for none
    num_columns,
    places,  # [R, 3] int32: position, column and request of every row
    numbers,  # [requests, FIELDS] int64
    scales,  # [requests, 2] fp32: factors for the draw and for the score
    tables,  # int32: the languages
    # [r, most_segments] fp32, written: weight of all tokens, or of the best one if not drawn
    weights,
    sums,  # same shape, written: log of the sum of exp at the score's scale
    values,  # same shape, written: scaled logit of the token for its score
    tokens,  # [r, most_segments] int32, written: the best or the drawn token
    most_segments,
    PURPOSE: tl.constexpr,
    DRAWN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Reduce some segments of one row of logits."""
    line = tl.program_id(0)
    column = first_column + line
    row = tl.load(row_at + column, mask=column < num_columns, other=-1)
    if row < 0:
        return
    position, request = tl.load(places + 3 * row), tl.load(places + 3 * row + 2)
    fields = numbers + request * FIELDS
    is_drawn = tl.load(fields + 3) > 0
    segments = tl.program_id(1) * SEGMENTS + tl.arange(0, SEGMENTS)
    is_segment = segments < tl.load(fields + 21)
    lanes = tl.arange(0, WIDTH)
    start = tl.multiple_of(tl.load(fields + 22), 16)
    columns = tl.load(
        tables + start + segments[:, None] * WIDTH + lanes[None, :],
        mask=is_segment[:, None],
        other=-1,
    )
    is_token = columns >= 0
    place = line.to(tl.int64) * row_stride + columns
    logit = tl.load(logits + place, mask=is_token, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    scored = tl.maximum(logit * tl.load(scales + 2 * request + 1), NEVER)
    top = tl.max(scored, axis=1)
    total = tl.sum(tl.where(is_token, tl.exp(scored - top[:, None]), 0.0), axis=1)
    sum_of_all = top + tl.log(tl.maximum(total, 1e-37))
    scaled = tl.maximum(logit * tl.load(scales + 2 * request), NEVER)
    weight = tl.max(scaled, axis=1)
    taken = tl.argmax(scaled, axis=1)
    if DRAWN:
        step, at, seed_low, seed_high = _place_of(fields, position)
        u, _ = _uniform(step, at, segments, seed_low, seed_high, PURPOSE)
        shares = tl.where(is_token, tl.exp(scaled - weight[:, None]), 0.0)
        total = tl.sum(shares, axis=1)
        is_below = (tl.cumsum(shares, axis=1) <= (u * total)[:, None]) & is_token
        last = tl.maximum(tl.sum(is_token.to(tl.int32), axis=1) - 1, 0)
        drawn = tl.minimum(tl.sum(is_below.to(tl.int32), axis=1), last)
        taken = tl.where(is_drawn, drawn, taken)
        weight = tl.where(is_drawn, weight + tl.log(tl.maximum(total, 1e-37)), weight)
    is_taken = lanes[None, :] == taken[:, None]
    to = line.to(tl.int64) * most_segments + segments
    tl.store(weights + to, weight, mask=is_segment)
    tl.store(sums + to, sum_of_all, mask=is_segment)
    tl.store(values + to, tl.sum(tl.where(is_taken, scored, 0.0), axis=1), mask=is_segment)
    tl.store(tokens + to, tl.sum(tl.where(is_taken, columns, 0), axis=1), mask=is_segment)


@triton.jit
def _sum_of(start, count, BLOCK: tl.constexpr):
    """Return the maximum, and the log of the sum of exp, of `count` numbers from `start` on."""
    top = tl.full([BLOCK], NEVER, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        terms = tl.load(start + index, mask=index < count, other=2 * NEVER)
        next_top = tl.maximum(top, terms)
        total = total * tl.exp(top - next_top) + tl.exp(terms - next_top)
        top = next_top
    best = tl.max(top, axis=0)
    return best, best + tl.log(tl.sum(total * tl.exp(top - best), axis=0))


@triton.jit(do_not_specialize=["first_column", "num_columns"])
def class_kernel(
    # the parameters up to `tokens` are as in `read_kernel`, which writes weights to tokens
    first_column,
    row_at,
    num_columns,
    places,
    numbers,
    tables,
    weights,
    sums,
    values,
    tokens,
    most_segments,
    class_weights,  # [R, most_classes] fp32, written: in nats, relative to the weight of the row
    class_logprobs,  # same shape, written: log probability of the class's token
    class_tokens,  # [R, most_classes] int32, written
    most_classes,
    PURPOSE: tl.constexpr,
    DRAWN: tl.constexpr,
    CLASSES: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce the segments of some classes of one row."""
    line = tl.program_id(0)
    column = first_column + line
    row = tl.load(row_at + column, mask=column < num_columns, other=-1)
    if row < 0:
        return
    position, request = tl.load(places + 3 * row), tl.load(places + 3 * row + 2)
    fields = numbers + request * FIELDS
    is_drawn = tl.load(fields + 3) > 0
    num_segments = tl.load(fields + 21)
    offset = line.to(tl.int64) * most_segments
    best_of_row, weight_of_row = _sum_of(weights + offset, num_segments, BLOCK)
    base = tl.where(is_drawn, weight_of_row, best_of_row)
    _, score_of_row = _sum_of(sums + offset, num_segments, BLOCK)
    classes = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    is_class = classes < tl.load(fields + 24)
    starts = tables + tl.load(fields + 23)
    first = tl.load(starts + classes, mask=is_class, other=0)
    count = tl.load(starts + classes + 1, mask=is_class, other=0) - first
    step, at, seed_low, seed_high = _place_of(fields, position)
    best = tl.full([CLASSES], 2 * NEVER, tl.float32)
    taken = first
    top = tl.full([CLASSES], NEVER, tl.float32)
    total = tl.zeros([CLASSES], tl.float32)
    for begin in range(0, tl.max(count, axis=0), MEMBERS):
        index = begin + tl.arange(0, MEMBERS)
        mask = index[None, :] < count[:, None]
        segments = first[:, None] + index[None, :]
        terms = tl.load(weights + offset + segments, mask=mask, other=2 * NEVER)
        key = terms
        if DRAWN:
            noise = _gumbel(step, at, num_segments + segments, seed_low, seed_high, PURPOSE)
            key = tl.where(is_drawn & mask, terms + noise, terms)
            next_top = tl.maximum(top, tl.max(terms, axis=1))
            shares = tl.sum(tl.where(mask, tl.exp(terms - next_top[:, None]), 0.0), axis=1)
            total = total * tl.exp(top - next_top) + shares
            top = next_top
        largest = tl.max(key, axis=1)
        is_better = largest > best
        taken = tl.where(is_better, first + begin + tl.argmax(key, axis=1), taken)
        best = tl.where(is_better, largest, best)
    weight = tl.where(is_drawn, top + tl.log(tl.maximum(total, 1e-37)), best)
    to = row.to(tl.int64) * most_classes + classes
    tl.store(class_weights + to, tl.maximum(weight - base, MIN_WEIGHT), mask=is_class)
    value = tl.load(values + offset + taken, mask=is_class)
    tl.store(class_logprobs + to, value - score_of_row, mask=is_class)
    tl.store(class_tokens + to, tl.load(tokens + offset + taken, mask=is_class), mask=is_class)


@triton.jit
def set_kernel(
    numbers,
    request_of,  # [N] int32: request of every position
    row_of,  # [N] int32: row of a position; -1 if it has a token, -2 if any token may follow later
    class_at,  # [N] int32: class of the token at a position
    tables,
    class_weights,
    weights,  # [N, most_sets] fp32, written
    most_classes,
    most_sets,
    DRAWN: tl.constexpr,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Compute the weight of each set at a position."""
    position = tl.program_id(0)
    fields = numbers + tl.load(request_of + position) * FIELDS
    starts, members = tl.load(fields), tl.load(fields + 1)
    num_sets = tl.load(fields + 2)
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
        place = tl.maximum(row, 0).to(tl.int64) * most_classes + member
        weight = tl.load(class_weights + place, mask=mask & (row >= 0), other=NEVER)
        next_top = tl.maximum(top, tl.max(weight, axis=1))
        if DRAWN:
            shares = tl.where(weight > NEVER, tl.exp(weight - next_top[:, None]), 0.0)
            total = total * tl.exp(top - next_top) + tl.sum(shares, axis=1)
        top = next_top
    weight = top
    if DRAWN:
        is_drawn = (tl.load(fields + 3) > 0) & (total > 0)
        weight = tl.where(is_drawn, top + tl.log(tl.maximum(total, 1e-37)), top)
    known = tl.where(there > 0, 0.0, NEVER)
    weight = tl.where(row >= 0, weight, tl.where(row == -1, known, 0.0))
    tl.store(
        weights + position.to(tl.int64) * most_sets + sets,
        tl.where(is_set, weight, NEVER),
        mask=sets < most_sets,
    )


@triton.jit
def choose_kernel(
    numbers,
    row_of,
    tables,
    weights,
    values,  # fp32, written: [n + 1, Q] of every request
    chosen,  # [N] int32, written: the set that each position selects
    most_sets,
    PURPOSE: tl.constexpr,
    DRAWN: tl.constexpr,
    STATES: tl.constexpr,
    EDGES: tl.constexpr,
    WIDEST: tl.constexpr,
):
    """Choose for one request: compute the values of states backward, then choose forward."""
    request = tl.program_id(0)
    fields = numbers + request * FIELDS
    num_sets = tl.load(fields + 2)
    is_drawn = tl.load(fields + 3) > 0
    edge_sets, edge_targets = tl.load(fields + 4), tl.load(fields + 5)
    room, num_states, width = tl.load(fields + 6), tl.load(fields + 7), tl.load(fields + 8)
    first, count = tl.load(fields + 9), tl.load(fields + 10)
    to, start, left = tl.load(fields + 11), tl.load(fields + 12), tl.load(fields + 13)
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
                next_top = tl.maximum(top, tl.max(worth, axis=1))
                if DRAWN:
                    shares = tl.where(mask, tl.exp(worth - next_top[:, None]), 0.0)
                    total = total * tl.exp(top - next_top) + tl.sum(shares, axis=1)
                top = next_top
            total_weight = top
            if DRAWN:
                total_weight = tl.where(is_summed, top + tl.log(tl.maximum(total, 1e-37)), top)
            needed = tl.load(tables + room + states, mask=is_state, other=0)
            is_late = (index == count + left) & (needed > 0)
            total_weight = tl.maximum(tl.where(is_late, NEVER, total_weight), NEVER)
            tl.store(values + here + states, total_weight, mask=is_state)
        tl.debug_barrier()
    seed_low, seed_high = tl.load(fields + 14), tl.load(fields + 15)
    step, position = tl.load(fields + 16), tl.load(fields + 17)
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
            u, _ = _uniform(step, position + index, edges * 0, seed_low, seed_high, PURPOSE)
            drawn = tl.max(u, axis=0) * tl.sum(shares, axis=0)
            below = (tl.cumsum(shares, axis=0) <= drawn) & mask
            place = tl.minimum(tl.sum(below.to(tl.int32), axis=0), place * 0 + width - 1).to(
                tl.int32
            )
        is_place = edges == place
        tl.store(chosen + first + index, tl.sum(tl.where(is_place, taken, 0), axis=0))
        state = tl.sum(tl.where(is_place, target, 0), axis=0).to(tl.int64)


@triton.jit(do_not_specialize=["stride"])
def token_kernel(
    numbers,
    places,
    tables,
    class_weights,
    class_logprobs,
    class_tokens,
    chosen,
    sampled,  # [3 or more, columns] fp64, written
    stride,
    logprobs,  # [R] fp64, written
    tokens,  # [R] int64, written
    most_classes,
    PURPOSE: tl.constexpr,
    DRAWN: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Write the token of a row's set and its score; among equals, the lowest token."""
    row = tl.program_id(0)
    position, column = tl.load(places + 3 * row), tl.load(places + 3 * row + 1)
    fields = numbers + tl.load(places + 3 * row + 2) * FIELDS
    starts, members = tl.load(fields), tl.load(fields + 1)
    taken = tl.load(chosen + position)
    first = tl.load(tables + starts + taken)
    count = tl.load(tables + starts + taken + 1) - first
    step, at, seed_low, seed_high = _place_of(fields, position)
    best = tl.full([MEMBERS], 2 * NEVER, tl.float32)
    token = tl.full([MEMBERS], 0x7FFFFFFF, tl.int32)
    logprob = tl.full([MEMBERS], NEVER, tl.float32)
    for start in range(0, count, MEMBERS):
        index = start + tl.arange(0, MEMBERS)
        mask = index < count
        member = tl.load(tables + members + first + index, mask=mask, other=0)
        place = row.to(tl.int64) * most_classes + member
        key = tl.load(class_weights + place, mask=mask, other=2 * NEVER)
        if DRAWN:
            noise_at = 2 * tl.load(fields + 21) + member
            noise = _gumbel(step, at, noise_at, seed_low, seed_high, PURPOSE)
            key = tl.where(mask & (tl.load(fields + 3) > 0), key + noise, key)
        new = tl.load(class_tokens + place, mask=mask, other=0x7FFFFFFF)
        is_better = (key > best) | ((key == best) & (new < token))
        best = tl.where(is_better, key, best)
        token = tl.where(is_better, new, token)
        own_logprob = tl.load(class_logprobs + place, mask=mask, other=NEVER)
        logprob = tl.where(is_better, own_logprob, logprob)
    is_best = best == tl.max(best, axis=0)
    lowest = tl.min(tl.where(is_best, token, 0x7FFFFFFF), axis=0)
    score = tl.max(tl.where(is_best & (token == lowest), logprob, NEVER), axis=0).to(tl.float64)
    tl.store(tokens + row, lowest)
    tl.store(logprobs + row, score)
    tl.store(sampled + column, lowest.to(tl.float64))
    tl.store(sampled + 2 * stride + column, lowest.to(tl.float64))
    is_excluded = (lowest == tl.load(fields + 19)) | (lowest == tl.load(fields + 20))
    probability = tl.where(is_excluded, 0.0, tl.exp(score))
    tl.store(sampled + stride + column, probability, mask=tl.load(fields + 18) > 0)
