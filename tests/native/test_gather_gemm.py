# SPDX-License-Identifier: Apache-2.0
"""gather_gemm matches float64, on a GPU and under Triton's interpreter."""

import pytest
import torch

from gather_gemm import gather_gemm, gather_top, has_top
from gather_gemm.launch import choose_config, choose_top_config
from tests.native.support import (
    SHAPES,
    TOP_SHAPES,
    check_gather,
    check_top,
    masks_of,
    top_case,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Norm of the error over the norm of the result: fp32 sums, then one rounding to the dtype.
ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_against_float64(generator, device, dtype, num_rows, num_columns, depth):
    check_gather(generator, num_rows, num_columns, depth, dtype, device, ERROR[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x, weight = torch.ones(4, 8, device=device), torch.ones(5, 8, device=device)
    assert gather_gemm(x, torch.empty(0, dtype=torch.int64, device=device), weight).shape == (0, 5)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_fit_the_shared_memory_of_every_target(element_bytes):
    for num_rows in (1, 16, 17, 32, 33, 64, 65, 8192):
        config = choose_config(num_rows, element_bytes)
        sides = config.block_rows + config.block_columns
        assert sides * config.block_depth * element_bytes * config.num_stages <= 99 * 1024
        assert config.block_rows >= 16 and config.block_depth >= 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "x must be"),
        ({"x": torch.zeros(4, 8, dtype=torch.int64)}, "x must be"),
        ({"x": torch.zeros(8, 4).t()}, "columns of x must be contiguous"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \['any', 8\]"),
        ({"weight": torch.zeros(5, 8).half()}, "got torch.float16"),
        ({"rows": torch.zeros(3)}, r"rows must be int64 \[R\]"),
        ({"out": torch.zeros(3, 6)}, r"out must be \[3, 5\]"),
    ],
)
def test_arguments_are_checked(changes, message):
    arguments = {
        "x": torch.zeros(4, 8),
        "rows": torch.zeros(3, dtype=torch.int64),
        "weight": torch.zeros(5, 8),
    }
    with pytest.raises(ValueError, match=message):
        gather_gemm(**(arguments | changes))


def softmax_of(logits, columns=(), forbidden=0, excluded=0):
    """Return maximum, lowest column, sum of exp and best probability, in float64."""
    hidden = torch.zeros(2, *logits.shape, dtype=torch.bool, device=logits.device)
    for number, mask in enumerate((forbidden, excluded)):
        for row in range(len(logits)):
            bits = int(mask if isinstance(mask, int) else mask[row])
            for index, column in enumerate(columns):
                hidden[number, row, column] |= bool(bits >> index & 1)
    logits = logits.double().masked_fill(hidden[0], -torch.inf)
    maximum = logits.amax(dim=-1)
    column = (logits == maximum[:, None]).int().argmax(dim=-1)
    kept = logits.masked_fill(hidden[1], -torch.inf)
    sums = (kept - maximum.masked_fill(maximum == -torch.inf, 0)[:, None]).exp().sum(dim=-1)
    is_zero = hidden[1].gather(1, column[:, None])[:, 0] | (maximum == -torch.inf)
    return maximum, column, sums, (1 / sums).masked_fill(is_zero, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), [*TOP_SHAPES, (150, 1000, 264)])
@pytest.mark.parametrize("kind", ["none", "of all rows", "by row"])
def test_top_against_float64(generator, device, dtype, num_rows, num_columns, depth, kind):
    x, rows, weight = top_case(generator, num_rows, num_columns, depth, dtype, device)
    logits = (x.double() @ weight.double().t()).to(dtype)
    for given in (rows, None):
        count = 160 if given is None else num_rows
        masks = masks_of(kind, generator, count, num_columns, device)
        top = gather_top(x, given, weight, **masks)
        check_top(top, softmax_of(logits if given is None else logits[rows], **masks))


@pytest.mark.parametrize("device", DEVICES)
def test_top_of_rows_that_say_nothing(device):
    x = torch.ones(4, 64, device=device, dtype=torch.bfloat16)
    x[1] = torch.nan
    weight = torch.full((300, 64), -torch.inf, device=device, dtype=torch.bfloat16)
    top = gather_top(x, None, weight, columns=(0, 299), excluded=2)
    assert top.column[0] == 0 and top.sum_exp[0] == 0 and top.probability[0] == 0
    assert top.sum_exp[1].isnan() and top.probability[1].isnan() and 0 <= top.column[1] < 300
    assert gather_top(x[:0], None, weight).column.shape == (0,)
    ones = torch.ones(5, 64, device=device, dtype=torch.bfloat16)
    all_forbidden = gather_top(x, None, ones[:4], columns=(0, 1, 2, 3), forbidden=15)
    assert all_forbidden.column[0] == 0 and all_forbidden.probability[0] == 0
    best_excluded = gather_top(x, None, ones, columns=(0,), excluded=1)
    assert best_excluded.column[0] == 0 and best_excluded.probability[0] == 0
    assert best_excluded.sum_exp[0] == 4


@pytest.mark.gpu
def test_rows_of_a_top_do_not_depend_on_each_other(generator):
    """A row has the same bits alone and in a batch that uses the same tile."""
    x = torch.randn(32, 512, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(1000, 512, generator=generator).to("cuda", torch.bfloat16)
    whole = gather_top(x, None, weight)
    some = gather_top(x, torch.arange(31, 10, -1, device="cuda"), weight)
    for of_whole, of_some in zip(whole, some, strict=True):
        assert torch.equal(of_whole[11:].flip(0), of_some)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "gather_top: x must be"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \['any', 8\]"),
        ({"weight": torch.zeros(0, 8)}, "at least one row"),
        ({"rows": torch.zeros(3)}, r"rows must be int64 \[R\]"),
        ({"columns": [5]}, r"columns must be at most 4 columns in \[0, 5\)"),
        ({"columns": [0] * 5}, "columns must be at most 4 columns"),
        ({"forbidden": torch.zeros(4)}, r"forbidden must be a number or int32 \[4\]"),
        ({"excluded": torch.zeros(3, dtype=torch.int32)}, r"excluded must be .* int32 \[4\]"),
    ],
)
def test_arguments_of_top_are_checked(changes, message):
    arguments = {"x": torch.zeros(4, 8), "rows": None, "weight": torch.zeros(5, 8)}
    with pytest.raises(ValueError, match=message):
        gather_top(**(arguments | changes))


def test_tiles_of_a_top_fit_the_shared_memory():
    wanted = [16, 16, 32, 64, 128, 128]
    assert [choose_top_config(rows).block_rows for rows in (1, 16, 17, 64, 128, 500)] == wanted
    for rows in (1, 17, 33, 65):
        config = choose_top_config(rows)
        sides = config.block_rows + config.block_columns
        assert sides * config.block_depth * 2 * config.num_stages <= 226 * 1024
    assert not has_top(torch.zeros(4, 8), torch.zeros(5, 8))
