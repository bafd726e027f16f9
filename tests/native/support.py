# SPDX-License-Identifier: Apache-2.0
"""Results in float64 and cases, shared by the tests of native rooms."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from gather_gemm import SOFTMAX, Scoring, reference, route, route_rows

# Norm of the error over the norm of the result: fp32 sums, then a few roundings to the dtype.
ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# One row; in one block of the kernel and past it; experts that fill no power of two; all chosen;
# more blocks than are counted at once.
SIZES = [
    *((1, 4, 1), (5, 6, 6), (33, 6, 3), (32, 64, 8), (33, 64, 8), (300, 40, 7), (9, 1000, 16)),
    (1100, 64, 8),
]
# Experts, experts of a row, and how they are chosen: as in LLaDA2, SDAR-MoE and LLaDA-MoE; groups
# that are all kept, of no power of two, and one expert of one group; scores as they are.
SCORINGS = [
    (256, 8, Scoring(True, 8, 4, is_normalised=True, scale=2.5, in_fp32=True)),
    (128, 8, Scoring(is_normalised=True)),
    (64, 8, SOFTMAX),
    (12, 3, Scoring(num_groups=3, num_kept_groups=3)),
    (40, 6, Scoring(num_groups=8, num_kept_groups=2, in_fp32=True)),
    (6, 1, Scoring(True, 3, 1, is_normalised=True)),
    (5, 4, Scoring(True, scale=0.5)),
]
# Depths: of a part of a tile, of a tile, of several and a part; of the compiled kernel.
DEPTHS = [5, 256, 600, 1024]

# One row, at and past the edges of every tile; columns and depth that fill no tile.
SHAPES = [(1, 1, 1), (16, 64, 64), (17, 131, 70), (33, 64, 200), (65, 129, 33), (300, 257, 130)]
# Rows: one, at and past the edges of the tiles. Columns and depth: no multiples of any tile.
TOP_SHAPES = [(1, 40, 64), (16, 256, 128), (17, 131, 72), (33, 300, 200), (70, 257, 136)]


def ends_of(sizes, device="cpu"):
    return torch.tensor(sizes).cumsum(0).to(dtype=torch.int32, device=device)


def as_fp8(weight):
    """Matrices as fp8, the scales of their rows, and what both stand for, in float64."""
    scales = (weight.float().abs().amax(dim=2) / 448).clamp(min=1e-30)
    values = (weight.float() / scales[:, :, None]).to(torch.float8_e4m3fn)
    return values, scales, values.double() * scales.double()[:, :, None]


def relative_error(given, wanted):
    """Zero where both are zero; NaN or inf where something was not written."""
    return ((given.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def grouped_wanted(x, weight, sizes):
    parts = zip(x.double().split(sizes), weight.double(), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


def gated_wanted(x, slots, num_chosen, weight, sizes):
    gate, up = grouped_wanted(x[slots.long() // num_chosen], weight, sizes).chunk(2, dim=-1)
    return functional.silu(gate) * up


def weighted_wanted(x, weight, sizes, slots, weights):
    terms = torch.empty(len(x), weight.shape[1], dtype=torch.float64, device=x.device)
    terms[slots.long()] = grouped_wanted(x, weight, sizes)
    return terms.view(*weights.shape, -1) * weights.double()[:, :, None]


def check_routing(logits, num_chosen, bias, scoring=SOFTMAX):
    for has_shared in (False, True):
        given = route(logits, num_chosen, bias, scoring, has_shared=has_shared)
        wanted = reference.route(logits, num_chosen, bias, scoring, has_shared=has_shared)
        assert torch.equal(given.slots, wanted[1]) and torch.equal(given.ends, wanted[2])
        torch.testing.assert_close(given.weights, wanted[0], equal_nan=True)


def awkward_logits(generator, num_rows, num_experts):
    """Few values, so that many are equal; -inf here and there, and rows of zeros and of -inf."""
    logits = torch.randint(-3, 4, (num_rows, num_experts), generator=generator) / 2
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[0] = 0.0
    logits[num_rows // 2] = -torch.inf
    logits[num_rows // 2, -1] = 1.0
    return logits


def experts_of(routing, num_rows, num_chosen):
    """[R, k]: the experts of each row by its places."""
    places = torch.arange(len(routing.slots), device=routing.slots.device)
    members = torch.bucketize(places, routing.ends, right=True)
    experts = torch.empty_like(members)
    experts[routing.slots.long()] = members
    return experts.view(num_rows, num_chosen)


def exact_rows(generator, num_rows, num_experts, depth, dtype):
    """x [R, D] and gate [E, D] of strided rows, whose logits no order of the sums changes.

    Few values: many logits are equal.
    """
    x = torch.randint(-2, 3, (num_rows, depth + 8), generator=generator).to(dtype)
    gate = torch.randint(-2, 3, (num_experts, depth + 16), generator=generator).to(dtype)
    return x[:, :depth], gate[:, :depth] / 8


def check_rows(x, gate, num_chosen, bias, scoring=SOFTMAX):
    logits = x.float() @ gate.float().t()
    logits = logits if scoring.in_fp32 else logits.to(x.dtype)
    for has_shared in (False, True):
        given = route_rows(x, gate, num_chosen, bias, scoring, has_shared=has_shared)
        wanted = reference.route(logits, num_chosen, bias, scoring, has_shared=has_shared)
        assert torch.equal(given.slots, wanted[1]) and torch.equal(given.ends, wanted[2])
        torch.testing.assert_close(given.weights, wanted[0])


def masks_of(kind, generator, num_rows, num_columns, device):
    """Special columns, the last one and two of one tile among them: of no row, all, or some."""
    if kind == "none":
        return {}
    columns = (num_columns - 1, 3, 39)
    if kind == "of all rows":
        return {"columns": columns, "forbidden": 0b101, "excluded": 0b010}
    bits = torch.randint(0, 8, (2, num_rows), generator=generator).to(torch.int32).to(device)
    return {"columns": columns, "forbidden": bits[0], "excluded": bits[1]}


def chi_square_limit(degrees: int) -> float:
    """Value that chi-square passes once in a million (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3
