# SPDX-License-Identifier: Apache-2.0
"""flash_sample's filters: the reference and the kernel match float64, row by row."""

import math

import pytest
import torch

from flash_sample import Filters, Rows, candidates, kept_columns, partial
from flash_sample.philox import uniform

INF = torch.inf
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 8, 300, 2049, 10_001, 126_464]
ONE_ROW = {"seed": 2**63 + 5, "step": 3, "purpose": 2}
# Two correct ways to compute the sums that top_p is compared with may differ by this much.
SLACK = 2e-5

FILTERS = {
    "min_p": Filters(min_p=0.05),
    "min_p of all": Filters(min_p=1.0),
    "top_k": Filters(top_k=20),
    "top_k of one": Filters(top_k=1),
    "top_k of many": Filters(top_k=3000),
    "top_p": Filters(top_p=0.9),
    "top_p of one": Filters(top_p=0.0, keeps_equal=True),
    "top_p of nearly all": Filters(top_p=0.9999),
    "top_p after top_k": Filters(top_k=40, top_p=0.8),
    "top_p before top_k": Filters(top_k=40, top_p=0.8, is_top_p_first=True, are_scored=True),
    "all": Filters(min_p=0.01, top_k=50, top_p=0.9, are_scored=True),
    "all, top_p before top_k": Filters(
        min_p=0.01, top_k=50, top_p=0.9, is_top_p_first=True, keeps_equal=True, are_scored=True
    ),
    "nothing": Filters(),
}


def kept_of(distance, temperature, filters):
    """Return which columns are kept, given their float64 distances [V] to the best column."""
    order = sorted(range(len(distance)), key=distance.tolist().__getitem__)  # stable
    ordered = distance[order]
    weights = torch.exp(-ordered / (temperature or 1.0))
    before = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumsum(weights, 0)[:-1]])
    stays = torch.ones(len(order), dtype=torch.bool)
    if filters.min_p > 0:
        stays &= ordered <= -math.log(filters.min_p) * (temperature or 1.0)
    total = weights[stays].sum()
    if filters.top_k > 0:
        stays &= ordered <= ordered[min(filters.top_k, len(order)) - 1]
    if filters.top_p < 1:
        total = total if filters.is_top_p_first else weights[stays].sum()
        limit = filters.top_p * total
        stays &= (before <= limit) if filters.keeps_equal else (before < limit)
    stays[0] = True
    actual = torch.zeros(len(order), dtype=torch.bool)
    actual[torch.tensor(order)[stays]] = True
    return actual


def checked_rows(logits, rows, score, actual):
    """Check tokens and scores of rows, which have their own filters, temperatures and positions."""
    filters = rows.filters
    values = logits.detach().cpu().float()
    for i, row in enumerate(values):
        temperature = float(torch.as_tensor(rows.temperature).expand(len(values))[i])
        own = {
            name: torch.as_tensor(getattr(filters, name)).expand(len(values))[i].item()
            for name in ("min_p", "top_k", "top_p")
        }
        row = row.clone()
        for bit, column in enumerate(rows.columns):
            if rows.forbidden >> bit & 1:
                row[column] = -INF
        best = int((row == row.max()).int().argmax())
        assert int(actual.greedy[i]) == best
        distance = (row.max() if row.max() > -INF else torch.tensor(0.0)) - row
        allowed = []
        for slack in (-SLACK, SLACK) if own["top_p"] < 1 else (0.0,):
            here = {**vars(filters), **own, "top_p": own["top_p"] + slack}
            # Distances are exact in fp32, but computations with them are not.
            stays = kept_of(distance.double(), temperature, Filters(**here))
            allowed.append(check_row(row, stays, i, rows, temperature, score))
        token, value = int(actual.token[i]), float(actual.score[i])
        assert any(
            token == wanted and value == pytest.approx(wanted_value, rel=2e-4, abs=1e-6)
            for wanted, wanted_value in allowed
        ), (i, token, value, allowed)


def check_row(row, stays, i, rows, temperature, score):
    """Check token and score of a row, given the columns that stay."""
    double = row.double()
    drawn = double.masked_fill(~stays, -INF)
    token = int(drawn.argmax())
    if temperature > 0:
        position = rows.positions[i : i + 1].cpu()
        u = uniform(rows.seed, rows.purpose, rows.step, position, len(row))[0]
        token = int((drawn - temperature * torch.log(-torch.log(u))).argmax())
    scored = drawn if rows.filters.are_scored else double
    if double.max() == -INF:
        return token, INF if score == "entropy" else 0.0
    scale = temperature if rows.is_tempered and temperature > 0 else 1.0
    p = torch.softmax((scored - scored.max()) / scale, 0)
    if score == "confidence":
        return token, float(p[token])
    if score == "entropy":
        return token, float(-torch.special.xlogy(p, p).sum())
    best = p.sort(descending=True).values
    return token, float(best[0] - (best[1] if len(best) > 1 else 0))


def run(logits, filters, temperature=0.8, score="confidence", **others):
    positions = torch.arange(5, 5 + len(logits), device=logits.device)
    rows = Rows(temperature, positions=positions, filters=filters, **ONE_ROW, **others)
    actual = candidates(logits, rows, score)
    assert actual.token.shape == actual.score.shape == actual.greedy.shape == (len(logits),)
    assert actual.token.dtype == torch.int64 and actual.score.dtype == torch.float32
    checked_rows(logits, rows, score, actual)
    return actual


def random_logits(generator, num_rows, num_columns, dtype, device, spread=4.0):
    logits = torch.randn(num_rows, num_columns, generator=generator) * spread
    return logits.to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_random_logits(generator, device, name, num_columns):
    dtype = DTYPES[len(name) % 3]
    logits = random_logits(generator, 3, num_columns, dtype, device)
    is_tempered = FILTERS[name].are_scored
    run(logits, FILTERS[name], is_tempered=is_tempered)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FILTERS)
def test_ties_stay_together(generator, device, name):
    logits = torch.randint(-3, 4, (6, 5003), generator=generator).to(torch.bfloat16).to(device)
    logits[1] = 1.5
    logits[2, 4:] = -9.0
    run(logits, FILTERS[name], is_tempered=FILTERS[name].are_scored)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FILTERS)
def test_infinite_columns_and_rows(generator, device, name):
    logits = random_logits(generator, 6, 6001, torch.float32, device)
    logits[0] = -INF
    logits[1, :4000] = -INF
    logits[2, ::2] = -INF
    logits[3, 1:] = -INF
    logits[4, :-1] = -INF
    for score in ("confidence", "entropy"):
        run(logits, FILTERS[name], score=score, is_tempered=FILTERS[name].are_scored)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["confidence", "entropy", "margin"])
@pytest.mark.parametrize("are_scored", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0, 3.0])
def test_scores(generator, device, score, are_scored, temperature):
    logits = random_logits(generator, 5, 3001, torch.float32, device, spread=2.0)
    logits[4, 7] = logits[4, 9] = 12.0  # two equal best columns
    filters = Filters(top_k=30, top_p=0.95, are_scored=are_scored)
    for is_tempered in (False, True):
        run(logits, filters, temperature, score, is_tempered=is_tempered)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_columns", [700, 40_000])
def test_rows_have_filters_of_their_own(generator, device, num_columns):
    logits = random_logits(generator, 40, num_columns, torch.bfloat16, device)

    def of_rows(values, dtype):
        chosen = torch.randint(0, len(values), (40,), generator=generator)
        return torch.tensor(values, dtype=dtype)[chosen].to(device)

    filters = Filters(
        min_p=of_rows([0.0, 0.0, 0.02], torch.float64),
        top_k=of_rows([0, 1, 50, 2000], torch.int64),
        top_p=of_rows([1.0, 0.3, 0.95], torch.float64),
    )
    run(logits, filters, of_rows([0.0, 0.5, 1.5], torch.float64))


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_unaligned_rows_have_the_same_bits(generator, device):
    storage = random_logits(generator, 8, 5100, torch.bfloat16, device)
    filters = Filters(top_k=9, top_p=0.9)
    for first in (0, 1, 3, 8):
        own = storage[::2, first : first + 5001]
        actual = run(own, filters)
        copied = torch.zeros(4, 5008, dtype=own.dtype, device=device)[:, :5001]
        copied.copy_(own)
        again = run(copied, filters)
        assert all(map(torch.equal, actual, again))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_those_beside_it(generator, device):
    logits = random_logits(generator, 300, 4001, torch.bfloat16, device, spread=1.0)
    rows = Rows(
        1.0,
        positions=torch.arange(300, device=device),
        filters=Filters(top_p=0.7, are_scored=True),
        is_tempered=True,
    )
    whole = candidates(logits, rows, "entropy")
    for row in (0, 150, 299):
        own = Rows(
            1.0,
            positions=rows.positions[row : row + 1],
            filters=rows.filters,
            is_tempered=True,
        )
        alone = candidates(logits[row : row + 1], own, "entropy")
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_flat_rows_of_which_many_columns_stay(generator, device):
    """The kernel's list of columns overflows, which only changes the time."""
    logits = random_logits(generator, 2, 126_464, torch.float32, device, spread=0.5)
    logits[1] = 0.0
    for filters in (Filters(top_k=40_000), Filters(top_p=0.8), Filters(min_p=1e-6, top_p=0.5)):
        run(logits, filters)


@pytest.mark.parametrize("device", DEVICES)
def test_forbidden_columns_do_not_count(generator, device):
    logits = random_logits(generator, 4, 2000, torch.float32, device)
    logits[:, 1999] = 30.0
    logits[:, 3] = 29.0
    actual = run(logits, Filters(top_k=2), columns=(1999, 17), forbidden=0b01)
    assert 1999 not in actual.token.tolist()
    rows = Rows(
        0.8,
        positions=torch.arange(4, device=device),
        columns=(3,),
        excluded=1,
        filters=Filters(top_k=1),
        **ONE_ROW,
    )
    logits[:, 1999] = -5.0
    demoted = candidates(logits, rows, "confidence")
    assert demoted.token.tolist() == [3] * 4 and demoted.score.tolist() == [0.0] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_what_is_refused(device):
    logits = torch.zeros(0, 50, device=device)
    actual = candidates(logits, Rows(filters=Filters(top_k=3)), "confidence")
    assert [len(part) for part in actual] == [0, 0, 0]
    logits = torch.zeros(2, 50, device=device)
    with pytest.raises(ValueError, match="filters must be None"):
        partial(logits, Rows(filters=Filters(top_k=3)))
    for filters, name in (
        (Filters(top_p=-0.5), "top_p"),
        (Filters(min_p=-0.5), "min_p"),
        (Filters(top_k=torch.zeros(3, dtype=torch.int64, device=device)), "top_k"),
    ):
        with pytest.raises(ValueError, match=f"candidates: {name}"):
            candidates(logits, Rows(filters=filters), "confidence")


def test_kept_columns_of_wider_dtypes():
    """Logits in fp64 may differ by less than fp32 can represent."""
    logits = torch.tensor([[30.0, 30.0 - 1e-9, 0.0]], dtype=torch.float64)
    assert kept_columns(logits, 1.0, Filters(top_k=1)).tolist() == [[True, False, False]]
    assert kept_columns(logits.float(), 1.0, Filters(top_k=1)).tolist() == [[True, True, False]]


@pytest.mark.gpu
def test_the_kernel_draws_as_the_reference_does(generator):
    logits = random_logits(generator, 64, 126_464, torch.bfloat16, "cpu")
    rows = {"temperature": 0.9, "seed": 5, "step": 1, "filters": Filters(top_k=50, top_p=0.9)}
    actual = candidates(
        logits.cuda(), Rows(positions=torch.arange(64).cuda(), **rows), "confidence"
    )
    wanted = candidates(logits, Rows(positions=torch.arange(64), **rows), "confidence")
    assert actual.token.tolist() == wanted.token.tolist()
    torch.testing.assert_close(actual.score.cpu(), wanted.score, rtol=1e-4, atol=1e-7)
