# SPDX-License-Identifier: Apache-2.0
"""Cases, checks and float64 results that the tests of native packages share."""

import math

import torch
from torch.nn import functional

from gather_gemm import (
    SOFTMAX,
    LowRank,
    Piece,
    Scoring,
    Tiles,
    expand,
    gated_expand,
    gated_gemm,
    gather_gemm,
    reference,
    route,
    route_rows,
    shrink,
    sum_terms,
    weighted_gemm,
)

# Norm of the error over the norm of the result: fp32 sums, then a few roundings to the dtype.
ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# Rows, experts, and experts per row. There is one row, one block of the kernel and more, a number
# of experts that is no power of two, all experts chosen, and more blocks than are counted at once.
SIZES = [
    *((1, 4, 1), (5, 6, 6), (33, 6, 3), (32, 64, 8), (33, 64, 8), (300, 40, 7), (9, 1000, 16)),
    (1100, 64, 8),
]
# Experts, experts per row, and their scoring. The first three are those of LLaDA2, SDAR-MoE and
# LLaDA-MoE. The others keep all groups, have no power of two, choose one expert in one group, and
# leave scores unnormalised.
SCORINGS = [
    (256, 8, Scoring(True, 8, 4, is_normalised=True, scale=2.5, in_fp32=True)),
    (128, 8, Scoring(is_normalised=True)),
    (64, 8, SOFTMAX),
    (12, 3, Scoring(num_groups=3, num_kept_groups=3)),
    (40, 6, Scoring(num_groups=8, num_kept_groups=2, in_fp32=True)),
    (6, 1, Scoring(True, 3, 1, is_normalised=True)),
    (5, 4, Scoring(True, scale=0.5)),
    (128, 8, Scoring(is_normalised=True, in_fp32=True, logit_scale=0.25)),
]
# The same with windows of rows. The first is that of LLaDA2.2. The others have no power of two, a
# capacity equal to the experts per row in fp32, groups that a window closes to some rows, windows
# of one row, and a capacity of all experts.
WINDOWED = [
    (256, 8, Scoring(True, is_normalised=True, scale=2.5, in_fp32=True, window=32, capacity=48)),
    (20, 3, Scoring(is_normalised=True, window=6, capacity=5)),
    (16, 3, Scoring(True, in_fp32=True, window=4, capacity=3)),
    (12, 3, Scoring(True, 4, 2, is_normalised=True, window=5, capacity=4)),
    (6, 1, Scoring(window=1, capacity=2)),
    (5, 2, Scoring(True, scale=0.5, window=3, capacity=5)),
]
# Depths: part of a tile, one tile, several tiles and a part, and that of the compiled kernel.
DEPTHS = [5, 256, 600, 1024]

# One row, sizes at and past the edges of every tile, and columns and depth that fill no tile.
SHAPES = [(1, 1, 1), (16, 64, 64), (17, 131, 70), (33, 64, 200), (65, 129, 33), (300, 257, 130)]
# Rows: one, at and past the edges of the tiles. Columns and depth: no multiples of any tile.
TOP_SHAPES = [(1, 40, 64), (16, 256, 128), (17, 131, 72), (33, 300, 200), (70, 257, 136)]


def ends_of(sizes, device="cpu"):
    return torch.tensor(sizes).cumsum(0).to(dtype=torch.int32, device=device)


def as_fp8(weight):
    """Return matrices as fp8, the scales of their rows, and the values of both in float64."""
    scales = (weight.float().abs().amax(dim=2) / 448).clamp(min=1e-30)
    values = (weight.float() / scales[:, :, None]).to(torch.float8_e4m3fn)
    return values, scales, values.double() * scales.double()[:, :, None]


def relative_error(given, wanted):
    """Return the relative error: zero if both are zero, NaN or inf if elements are missing."""
    return ((given.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def grouped_wanted(x, weight, sizes):
    parts = zip(x.double().split(sizes), weight.double(), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


def gated_wanted(x, slots, num_chosen, weight, sizes, *, is_gelu=False):
    gate, up = grouped_wanted(x[slots.long() // num_chosen], weight, sizes).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)) * up


def weighted_wanted(x, weight, sizes, slots, weights):
    terms = torch.empty(len(x), weight.shape[1], dtype=torch.float64, device=x.device)
    terms[slots.long()] = grouped_wanted(x, weight, sizes)
    return terms.view(*weights.shape, -1) * weights.double()[:, :, None]


# Slots of consecutive rows, each with the number of the rows; -1 for rows without a slot.
RUNS = [
    [(0, 1)],
    [(-1, 3), (1, 17), (0, 5), (-1, 2)],
    [(2, 40), (-1, 30), (0, 64), (1, 7), (2, 1)],
]
# Ranks of the parts in three slots: some have no matrix, some are no power of two.
RANKS = [[8, 3, 0], [16, 16, 16], [0, 1, 5]]


def tiles_of(generator, runs, size, device="cpu", num_empty=2):
    """Return tiles of each slot's rows, in random order, and some without rows."""
    of_rows = torch.tensor([slot for slot, count in runs for _ in range(count)])
    tiles, rows = [[-1, 0, 0]] * num_empty, []
    for slot in of_rows.unique().tolist():
        own = (of_rows == slot).nonzero()[:, 0]
        first, count = sum(map(len, rows)), len(own)
        tiles += [[slot, first + i, min(size, count - i)] for i in range(0, count, size)]
        rows.append(own[torch.randperm(count, generator=generator)])
    table = torch.tensor(tiles[::-1], dtype=torch.int32, device=device).view(-1, 3)
    return Tiles(table, torch.cat(rows).int().to(device), size)


class LowRankCase:
    """Rows with slots, the low-rank matrices, and the exact products in float64.

    Everything that must not be read is NaN.
    """

    def __init__(self, generator, runs, ranks, widths, depth, dtype, device, *, max_rank=None):
        def drawn(*shape):
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        num_parts, num_rows = len(widths), sum(count for _, count in runs)
        ranks = [own[:num_parts] for own in ranks]
        max_rank = max_rank or max(max(own) for own in ranks)
        self.widths, self.num_rows, self.dtype, self.device = widths, num_rows, dtype, device
        self.x = drawn(num_rows, depth + 8)[:, :depth] / depth**0.5
        shape = len(ranks), num_parts, max_rank, depth
        down = torch.full(shape, torch.nan, dtype=dtype, device=device)
        up = torch.full((len(ranks), max_rank, sum(widths)), torch.nan, dtype=dtype, device=device)
        scales = torch.rand(len(ranks), num_parts, generator=generator).to(device) + 0.5
        self.delta = torch.zeros(num_rows, sum(widths), dtype=torch.float64, device=device)
        num_numbers = num_parts * max_rank
        self.scaled = self.delta.new_zeros(num_rows, len(ranks) * num_numbers)
        row_slots = torch.tensor([slot for slot, count in runs for _ in range(count)])
        for slot, own in enumerate(ranks):
            start = 0
            for part, (rank, width) in enumerate(zip(own, widths, strict=True)):
                columns = slice(start, start + width)
                down[slot, part, :rank] = drawn(rank, depth)
                up[slot, :rank, columns] = drawn(rank, width)
                low = self.x.double() @ down[slot, part, :rank].double().t()
                low *= scales[slot, part].double()
                rows = (row_slots == slot).to(device)
                self.delta[rows, columns] = (low @ up[slot, :rank, columns].double())[rows]
                first = slot * num_numbers + part * max_rank
                self.scaled[rows, first : first + rank] = low[rows]
                start += width
        ranks = torch.tensor(ranks, dtype=torch.int32, device=device)
        self.matrices = LowRank(down, up, ranks, scales)

    def low(self, tiles, num_splits, rows=slice(None)):
        """Products with the first matrices of each row's slot, [rows, 1, numbers]."""
        num_rows = len(self.x[rows])
        shape = num_splits, num_rows, 1, self.matrices.num_ranks
        low = torch.full(shape, torch.nan, device=self.device)
        shrink(self.x[rows], self.matrices, tiles, low)
        return low[0]

    def by_slot(self, tiles, num_splits, rows=slice(None)):
        """The same times the scales, with zeros for all other slots, [rows, slots * numbers]."""
        num_rows, num_numbers = self.scaled[rows].shape
        low = torch.full((num_splits, num_rows, 1, self.matrices.num_ranks), torch.nan)
        wide = torch.full((num_rows, num_numbers + 8), torch.nan).to(self.dtype).to(self.device)
        by_slot = wide[:, :num_numbers]
        shrink(self.x[rows], self.matrices, tiles, low.to(self.device), by_slot)
        assert wide[:, num_numbers:].isnan().all()
        return by_slot

    def low_of_all(self):
        """Products with the first matrices of all slots, [rows, slots, numbers], rows apart."""
        low = self.x.float() @ self.matrices.down.flatten(0, 2).float().t()
        wide = torch.full((len(low), low.shape[1] + 24), torch.nan).to(self.dtype).to(self.device)
        wide[:, : low.shape[1]] = low
        return wide[:, : low.shape[1]].unflatten(1, (len(self.matrices.down), -1))

    def base(self, generator, num_columns):
        base = torch.randn(self.num_rows, num_columns + 8, generator=generator)
        return base.to(self.dtype).to(self.device)[:, :num_columns]


def check_low_rank(generator, runs, ranks, dtype, device, size, num_splits, depth=72):
    """Check all columns, some columns of some rows, and gated products against float64."""
    widths = (40, 24, 24)
    case = LowRankCase(generator, runs, ranks, widths, depth, dtype, device)
    tiles = tiles_of(generator, runs, size, device)
    low = case.low(tiles, num_splits)
    base = case.base(generator, 88)
    out, pieces = base.clone(), (Piece(0, 0, 0, 40), Piece(1, 40, 40, 24), Piece(2, 64, 64, 24))
    expand(low, case.matrices, tiles, out, pieces)
    without = (case.delta == 0).all(dim=1)
    assert relative_error(out, base.double() + case.delta) <= ERROR[dtype]
    assert torch.equal(out[without], base[without])
    # All slots' products, which a larger product computes, and another addend.
    for adds in (False, True):
        other = case.base(generator, 88).clone()
        wanted = base.double() + case.delta + adds * other.double()
        options = {"base": base, "adds": adds}
        expand(case.low_of_all(), case.matrices, tiles, other, pieces, **options)
        assert relative_error(other, wanted) <= ERROR[dtype]
        assert adds or torch.equal(other[without], base[without])
    # A window of the rows, which cuts tiles, and columns of two parts.
    rows = slice(case.num_rows // 4, case.num_rows - case.num_rows // 3)
    window = tiles._replace(first_row=rows.start)
    for some, own in ((slice(None), tiles), (rows, window)):
        by_slot = case.by_slot(own, num_splits, some)
        assert relative_error(by_slot, case.scaled[some]) <= ERROR[dtype]
        assert not by_slot[case.scaled[some] == 0].any()
    some = base[rows, 30:70].clone()
    pieces = Piece(0, 30, 0, 10), Piece(1, 40, 10, 24), Piece(2, 64, 34, 6)
    expand(case.low(window, num_splits, rows), case.matrices, window, some, pieces)
    wanted = (base.double() + case.delta)[rows, 30:70]
    assert relative_error(some, wanted) <= ERROR[dtype]
    for has_gate, has_up in ((True, True), (True, False), (False, True)):
        halves = [24] * (has_gate + has_up)
        case = LowRankCase(generator, runs, ranks, halves, depth, dtype, device)
        wide = case.base(generator, 48)
        gate, up = wide.double().split(24, dim=1)
        out = torch.full((case.num_rows, 24), torch.nan, dtype=dtype, device=device)
        low = case.low(tiles, num_splits)
        which = {"has_gate": has_gate, "has_up": has_up}
        gated_expand(low, case.matrices, tiles, wide, out, **which)
        gate = gate + case.delta[:, :24] * has_gate
        up = up + case.delta[:, has_gate * 24 :] if has_up else up
        assert relative_error(out, functional.silu(gate) * up) <= ERROR[dtype]


def check_gather(generator, num_rows, num_columns, depth, dtype, device, error):
    """Check chosen rows of strided matrices against float64, and then the first rows."""
    x = torch.randn(90, depth + 5, generator=generator).to(dtype).to(device)[:, :depth]
    weight = torch.randn(num_columns, depth, generator=generator).to(dtype).to(device)
    rows = torch.randint(0, 90, (num_rows,), generator=generator).to(device)
    out = torch.full((num_rows, num_columns + 3), torch.nan, dtype=dtype, device=device)
    result = gather_gemm(x, rows, weight, out=out[:, :num_columns])
    assert relative_error(result, x.double()[rows] @ weight.double().t()) < error
    assert out[:, num_columns:].isnan().all()
    assert torch.equal(gather_gemm(x, rows, weight), result)
    first = x[:num_rows]
    whole = gather_gemm(first, None, weight)
    assert relative_error(whole, first.double() @ weight.double().t()) < error


def top_case(generator, num_rows, num_columns, depth, dtype, device):
    """Return small integers with exact products, so that logits have ties and no rounding."""
    x = torch.randint(-2, 3, (160, depth + 8), generator=generator).to(device, dtype)[:, :depth]
    weight = torch.randint(-2, 3, (num_columns, depth), generator=generator).to(device, dtype) / 16
    return x, torch.randint(0, 160, (num_rows,), generator=generator).to(device), weight


def check_top(top, wanted):
    assert torch.equal(top.maximum.double(), wanted[0].double())
    assert torch.equal(top.column, wanted[1])
    for given, exact in ((top.sum_exp, wanted[2]), (top.probability, wanted[3])):
        torch.testing.assert_close(given.double(), exact.double(), rtol=1e-5, atol=0)


def check_experts(generator, sizes, num_chosen, width, depth, dtype, device, early, quantises=True):
    """Check both products of experts against float64, with plain weights and fp8 weights."""
    num_slots, ends = sum(sizes), ends_of(sizes, device)
    shape = num_slots // num_chosen, num_chosen

    def drawn(*size):
        return torch.randn(size, generator=generator).to(dtype).to(device)

    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).to(device)
    x, w1 = drawn(shape[0], depth), drawn(len(sizes), 2 * width, depth) / depth**0.5
    w2 = drawn(len(sizes), depth, width)
    weights = torch.rand(shape, generator=generator).to(dtype).to(device)
    kinds = [((w1, None, w1), (w2, None, w2))] + [(as_fp8(w1), as_fp8(w2))] * quantises
    for (v1, s1, m1), (v2, s2, m2) in kinds:
        for is_gelu in (True, False):
            inner = gated_gemm(x, slots, num_chosen, v1, ends, s1, is_gelu=is_gelu)
            wanted = gated_wanted(x, slots, num_chosen, m1, sizes, is_gelu=is_gelu)
            assert relative_error(inner, wanted) <= ERROR[dtype], (dtype, sizes, width, depth)
        terms = weighted_gemm(inner, v2, ends, slots, weights, early=early, weight_scales=s2)
        assert terms.shape == (*shape, depth)
        wanted = weighted_wanted(inner, m2, sizes, slots, weights)
        assert relative_error(terms, wanted) <= ERROR[dtype], (dtype, sizes, width, depth)


def check_sums(generator, shape, dtype, device):
    """Check sums of terms, which round each addition, and weighted sums, which round once.

    An addend is added last.
    """
    terms = torch.randn(*shape, generator=generator).to(dtype).to(device)
    wide = torch.randn(shape[0], shape[2] + 2, generator=generator).to(dtype).to(device)
    x, addend = wide[:, : shape[2]], wide[:, 2:].clone()
    total = terms[:, 0].clone()
    for index in range(1, shape[1]):
        total = total + terms[:, index]
    assert torch.equal(sum_terms(terms), total)
    assert torch.equal(sum_terms(terms, None, addend), total + addend)
    wanted, edge = x + total, wide[:, shape[2] :].clone()
    sum_terms(terms, out=x, adds=True)
    assert torch.equal(x, wanted) and torch.equal(wide[:, shape[2] :], edge)
    # Small integers times eighths are exact in fp32, but depend on the order of sums in 16 bits.
    terms = torch.randint(-100, 101, shape, generator=generator).to(dtype).to(device)
    weights = torch.randint(1, 9, shape[:2], generator=generator).to(device) / 8
    total = (terms.double() * weights.double()[:, :, None]).sum(1).to(dtype)
    for some in (None, addend):
        whole = total if some is None else total + some
        assert torch.equal(sum_terms(terms, weights, some), whole)
        wanted = x + whole
        sum_terms(terms, weights, some, out=x, adds=True)
        assert torch.equal(x, wanted)
    if shape[1] > 1:  # strided terms: the last term of each row is the addend
        parts = terms[:, :-1], weights[:, :-1], terms[:, -1]
        whole = sum_terms(*(part.contiguous() for part in parts))
        assert torch.equal(sum_terms(*parts), whole)
        wanted = x + whole
        sum_terms(*parts, out=x, adds=True)
        assert torch.equal(x, wanted)


def check_routing(logits, num_chosen, bias, scoring=SOFTMAX):
    factors = torch.linspace(0.5, 2.0, logits.shape[1], device=logits.device)
    for has_shared, expert_scales in ((False, None), (True, factors)):
        options = {"has_shared": has_shared, "expert_scales": expert_scales}
        given = route(logits, num_chosen, bias, scoring, **options)
        wanted = reference.route(logits, num_chosen, bias, scoring, **options)
        assert torch.equal(given.slots, wanted[1]) and torch.equal(given.ends, wanted[2])
        torch.testing.assert_close(given.weights, wanted[0], equal_nan=True)


def best_of(values, count):
    """Return the indices of the `count` largest values; of equal ones, the first."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def window_choice(ranks, num_chosen, scoring):
    """Return the ascending experts of each row by plain loops: groups, then windows, then rows."""
    rows = [[rank if rank > -3e38 else -3e38 for rank in row] for row in ranks]
    size = len(rows[0]) // scoring.num_groups
    for row in rows if scoring.num_groups > 1 else ():
        pairs = [sorted(row[i : i + size])[-2:] for i in range(0, len(row), size)]
        groups = best_of(torch.tensor(pairs).sum(dim=1).tolist(), scoring.num_kept_groups)
        row[:] = [rank if e // size in groups else -math.inf for e, rank in enumerate(row)]
    chosen = []
    for start in range(0, len(rows), scoring.window):
        members = rows[start : start + scoring.window]
        kept = best_of([max(ranks) for ranks in zip(*members, strict=True)], scoring.capacity)
        for row in members:
            own = [rank if e in kept else -math.inf for e, rank in enumerate(row)]
            chosen.append(sorted(best_of(own, num_chosen)))
    return chosen


def check_windows(logits, num_chosen, bias, scoring):
    """Check windows against the reference, and the choice of experts against plain loops."""
    check_routing(logits, num_chosen, bias, scoring)
    given = route(logits, num_chosen, bias, scoring)
    wide = logits.float()
    scores = wide.sigmoid() if scoring.is_sigmoid else wide.softmax(dim=-1)
    ranks = scores if bias is None else scores + bias
    wanted = window_choice(ranks.tolist(), num_chosen, scoring)
    assert experts_of(given, len(logits), num_chosen).tolist() == wanted


def window_logits(generator, num_rows, num_experts, scoring):
    """Return logits with a row of NaN.

    Values are few, so that many are equal, unless rounding of sums could decide between equal ones.
    """
    if scoring.is_sigmoid and scoring.num_groups == 1:
        logits = awkward_logits(generator, num_rows, num_experts)
    else:
        logits = torch.randn(num_rows, num_experts, generator=generator)
    if num_rows > 2:
        logits[num_rows // 3] = torch.nan
    return logits


def awkward_logits(generator, num_rows, num_experts):
    """Return few values, many of them equal, with some -inf, and rows of zeros and of -inf."""
    logits = torch.randint(-3, 4, (num_rows, num_experts), generator=generator) / 2
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[0] = 0.0
    logits[num_rows // 2] = -torch.inf
    logits[num_rows // 2, -1] = 1.0
    return logits


def experts_of(routing, num_rows, num_chosen):
    """Return the experts of each row in the order of its slots, [R, k]."""
    places = torch.arange(len(routing.slots), device=routing.slots.device)
    members = torch.bucketize(places, routing.ends, right=True)
    experts = torch.empty_like(members)
    experts[routing.slots.long()] = members
    return experts.view(num_rows, num_chosen)


def exact_rows(generator, num_rows, num_experts, depth, dtype):
    """Return x [R, D] and gate [E, D] with strided rows, whose logits no order of sums changes.

    There are few values, so that many logits are equal.
    """
    x = torch.randint(-2, 3, (num_rows, depth + 8), generator=generator).to(dtype)
    gate = torch.randint(-2, 3, (num_experts, depth + 16), generator=generator).to(dtype)
    return x[:, :depth], gate[:, :depth] / 8


def check_rows(x, gate, num_chosen, bias, scoring=SOFTMAX, *, in_parts=True):
    logits = x.float() @ gate.float().t()
    logits = logits if scoring.in_fp32 else logits.to(x.dtype)
    for has_shared in (False, True):
        how = {"has_shared": has_shared, "in_parts": in_parts}
        given = route_rows(x, gate, num_chosen, bias, scoring, **how)
        wanted = reference.route(logits, num_chosen, bias, scoring, has_shared=has_shared)
        assert torch.equal(given.slots, wanted[1]) and torch.equal(given.ends, wanted[2])
        torch.testing.assert_close(given.weights, wanted[0])


def masks_of(kind, generator, num_rows, num_columns, device):
    """Return masks of special columns for no, all or some rows; two columns share a tile."""
    if kind == "none":
        return {}
    columns = (num_columns - 1, 3, 39)
    if kind == "of all rows":
        return {"columns": columns, "forbidden": 0b101, "excluded": 0b010}
    bits = torch.randint(0, 8, (2, num_rows), generator=generator).to(torch.int32).to(device)
    return {"columns": columns, "forbidden": bits[0], "excluded": bits[1]}


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds once in a million (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3
