# SPDX-License-Identifier: Apache-2.0
"""flash_sample: the references match plain formulas, and the kernel matches float64."""

import itertools
from functools import partial as bound

import pytest
import torch

import flash_sample
from flash_sample import Rows, candidates, entropy, entropy_witht, low_confidence, margin, partial
from flash_sample.philox import uniform
from tests.native.support import chi_square_limit

INF = torch.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Relative error of a probability whose logits are exact in fp32. On a CPU, PyTorch adds up a row in
# a few long chains. The kernel adds in trees, and its exp() is accurate to two units in the last
# place.
CONFIDENCE_RTOL = {"cpu": 5e-5, "cuda": 5e-6}

# One column, sizes around a vector and around a segment of the kernel, ragged, and LLaDA's width.
WIDTHS = [1, 7, 8, 300, 2047, 2048, 2049, 10_001, 126_464]


def random_logits(generator, num_rows, num_columns, dtype=torch.float32, device="cpu"):
    return (torch.randn(num_rows, num_columns, generator=generator) * 4).to(dtype).to(device)


def exact(logits, excluded=()):
    """Return token and confidence from float64, with an explicit search for ties."""
    values = logits.double().cpu()
    is_best = values == values.amax(dim=-1, keepdim=True)
    token = is_best.int().argmax(dim=-1)
    kept = values.clone()
    kept[:, list(excluded)] = -INF
    confidence = torch.softmax(kept, dim=-1).gather(-1, token[:, None])[:, 0]
    return token, confidence.nan_to_num(0.0)


def check(logits, excluded=()):
    token, confidence = low_confidence(logits, excluded=excluded)
    wanted_token, wanted_confidence = exact(logits, excluded)
    assert token.dtype == torch.int64 and confidence.dtype == torch.float32
    assert token.device == confidence.device == logits.device
    assert torch.equal(token.cpu(), wanted_token)
    tolerance = {"rtol": CONFIDENCE_RTOL[logits.device.type], "atol": 1e-30}
    torch.testing.assert_close(confidence.cpu().double(), wanted_confidence, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_has_the_bits_of_the_public_loops(generator, dtype):
    logits = random_logits(generator, 33, 5003, dtype)
    token, confidence = low_confidence(logits)
    wanted = torch.argmax(logits, dim=-1)
    assert torch.equal(token, wanted)
    probabilities = torch.softmax(logits.float(), dim=-1)
    assert torch.equal(confidence, probabilities.gather(-1, wanted[:, None])[:, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_columns"),
    [*((5, width) for width in WIDTHS), *((rows, 515) for rows in (0, 1, 2, 31, 133, 1025))],
)
def test_random_logits(generator, device, dtype, num_rows, num_columns):
    check(random_logits(generator, num_rows, num_columns, dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_column(generator, device, dtype):
    few_values = torch.randint(-2, 3, (40, 9001), generator=generator)
    check(few_values.to(dtype).to(device))
    check(torch.full((3, 4100), 1.5, dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_columns_and_rows(generator, device, dtype):
    logits = random_logits(generator, 6, 6001, dtype, device)
    logits[0] = -INF
    logits[1, :4000] = -INF  # more columns than a segment
    logits[2, ::2] = -INF
    logits[3, 1:] = -INF  # probability 1
    logits[4, :-1] = -INF
    check(logits)
    token, confidence = low_confidence(logits)
    assert token[0] == 0 and confidence[0] == 0
    assert confidence[3] == 1 and token[3] == 0
    assert confidence[4] == 1 and token[4] == 6000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(generator, device, dtype):
    logits = random_logits(generator, 4, 3000, dtype, device)
    logits[0] *= 1e6
    logits[1] += 1e4
    logits[2] -= 1e4
    logits[3] = 3e38
    check(logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_rows(generator, device, dtype):
    storage = random_logits(generator, 20, 5100, dtype, device)
    for first in (0, 1, 3, 8):
        check(storage[::2, first : first + 5001])
        check(storage[:, first : first + 4096])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_excluded_columns(generator, device, dtype):
    logits = random_logits(generator, 9, 5001, dtype, device)
    logits[0, 4321] = 60  # the best column is excluded
    logits[1, 7] = 60
    logits[2, 8] = logits[2, 4321] = 60  # an ordinary column wins a tie
    logits[3] = -INF
    logits[3, 7] = 1.0  # only an excluded column is finite
    logits[4] = -INF
    excluded = (7, 4321, 0, 5000)
    check(logits, excluded)
    token, confidence = low_confidence(logits, excluded=excluded)
    assert token[:5].tolist() == [4321, 7, 8, 7, 0]
    assert confidence[[0, 1, 3, 4]].tolist() == [0, 0, 0, 0]
    assert confidence[2] > 0.99
    check(logits, tuple(range(16)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [torch.nan, INF])
def test_nan_marks_its_row_alone(generator, device, poison):
    logits = random_logits(generator, 4, 5000, torch.float32, device)
    logits[1, 2500] = poison
    logits[2] = poison
    token, confidence = low_confidence(logits)
    assert confidence[1:3].isnan().all() and not confidence[[0, 3]].isnan().any()
    assert ((token >= 0) & (token < 5000)).all()


@pytest.mark.parametrize(
    ("logits", "excluded", "message"),
    [
        (torch.zeros(3), (), r"must be \[R, V\].*got torch.float32 \[3\]"),
        (torch.zeros(3, 0), (), "V >= 1"),
        (torch.zeros(3, 4, dtype=torch.int64), (), "got torch.int64"),
        (torch.zeros(4, 3).t(), (), "columns of logits must be contiguous"),
        (torch.zeros(3, 4), (4,), r"excluded columns must be >= 0 and < 4, got \[4\]"),
        (torch.zeros(3, 4), (-1,), r"got \[-1\]"),
        (torch.zeros(3, 40), tuple(range(17)), "at most 16 columns, got 17"),
    ],
)
def test_low_confidence_checks_its_arguments(logits, excluded, message):
    with pytest.raises(ValueError, match=message):
        low_confidence(logits, excluded=excluded)


SCORES = ["confidence", "entropy", "margin"]
COLUMNS = (4999, 3, 17)


def shards_of(logits, cuts):
    edges = [0, *cuts, logits.shape[1]]
    return [(first, logits[:, first:end]) for first, end in itertools.pairwise(edges)]


def mixed_rows(num_rows, device, **changes):
    """Return rows of many requests: half of them without noise, each with its own columns."""
    index = torch.arange(num_rows)
    parameters = {
        "temperature": torch.where(index % 2 == 0, 0.0, 0.25 * (index % 7)).double(),
        "seed": index * 1_000_003 - 5,
        "step": index % 9,
        "positions": index.flip(0) * 17,
        "columns": COLUMNS,
        "forbidden": (index % 5 == 1).int() * 4,
        "excluded": (index % 8).int(),
    }
    parameters |= changes
    tensors = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
    return Rows(**tensors)


def awkward_logits(generator, num_columns=5000, dtype=torch.float32, device="cpu"):
    logits = random_logits(generator, 60, num_columns, dtype, device)
    logits[:20] = torch.randint(-2, 3, (20, num_columns), generator=generator).to(dtype)  # ties
    logits[20] = -INF
    logits[21, : num_columns // 2] = -INF  # slices without a finite logit
    logits[22, num_columns - 1] = 60
    return logits


def exactly(logits, rows, score):
    """Return token, score and greedy column of each row by plain formulas in float64."""
    tokens, scores, greedy = [], [], []
    for row, values in enumerate(logits.double().cpu()):
        at = {
            name: value[row].item() if isinstance(value, torch.Tensor) else value
            for name, value in vars(rows).items()
        }
        values = values.clone()
        for i, column in enumerate(at["columns"]):
            if at["forbidden"] >> i & 1:
                values[column] = -INF
        noised = values
        if at["temperature"] > 0:
            place = torch.tensor([at["positions"]])
            u = uniform(at["seed"], at["purpose"], at["step"], place, len(values))[0]
            noised = values - at["temperature"] * torch.log(-torch.log(u))
        token = int((noised == noised.max()).int().argmax())
        greedy.append(int((values == values.max()).int().argmax()))
        kept = values.clone()
        for i, column in enumerate(at["columns"]):
            if at["excluded"] >> i & 1:
                kept[column] = -INF
        p = torch.softmax(kept / ((at["is_tempered"] and at["temperature"]) or 1.0), dim=0)
        p = p.nan_to_num(0.0)  # for a row without a finite logit
        is_empty = bool((p == 0).all())
        best = p.sort(descending=True).values
        tokens.append(token)
        scores.append(
            {
                "confidence": p[token],
                "entropy": INF if is_empty else -(p * torch.log(p + at["epsilon"])).sum(),
                "margin": best[0] - (best[1] if len(best) > 1 else 0),
            }[score]
        )
    return torch.tensor(tokens), torch.tensor(scores), torch.tensor(greedy)


def assert_found(actual, wanted, device):
    token, score, greedy = actual
    assert (token.dtype, greedy.dtype) == (torch.int64, torch.int64)
    assert torch.equal(token.cpu(), wanted[0]) and torch.equal(greedy.cpu(), wanted[2])
    tolerance = {"rtol": CONFIDENCE_RTOL[device] * 4, "atol": 2e-6}
    torch.testing.assert_close(score.cpu().double(), wanted[1].double(), **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("is_tempered", [False, True])
def test_rows_of_many_requests(generator, device, dtype, score, is_tempered):
    logits = awkward_logits(generator, dtype=dtype, device=device)
    epsilon = torch.logspace(-12, -6, 60, device=device)
    rows = mixed_rows(60, device, is_tempered=is_tempered, epsilon=epsilon)
    assert_found(candidates(logits, rows, score), exactly(logits, rows, score), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_widths(generator, device, score, num_columns):
    logits = random_logits(generator, 3, num_columns, torch.bfloat16, device)
    rows = mixed_rows(3, device, columns=(), epsilon=1e-7)
    assert_found(candidates(logits, rows, score), exactly(logits, rows, score), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_more_columns_than_a_team_holds(generator, dtype, score):
    logits = random_logits(generator, 4, 400_003, dtype, "cuda")
    logits[2] = torch.randint(-2, 3, (400_003,), generator=generator).to(dtype)
    rows = mixed_rows(4, "cuda", columns=(399_999, 3, 17), epsilon=1e-8)
    assert_found(candidates(logits, rows, score), exactly(logits, rows, score), "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1e-12, 0.1, 1.0, 30.0])
def test_noised_choice_among_equal_logits(generator, device, temperature):
    """The noise alone decides, or hardly matters."""
    logits = torch.randint(0, 2, (20, 6001), generator=generator).float().to(device)
    rows = Rows(temperature, 9, 4, torch.arange(20, device=device))
    assert_found(candidates(logits, rows), exactly(logits, rows, "confidence"), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("cuts", [(2500,), (1, 2, 4999), (1250, 2500, 3750)])
@pytest.mark.parametrize("is_tempered", [False, True])
def test_merged_slices_equal_the_whole(generator, device, score, cuts, is_tempered):
    logits = awkward_logits(generator, device=device)
    rows = mixed_rows(60, device, is_tempered=is_tempered, epsilon=1e-12)
    shards = shards_of(logits, cuts)
    records = torch.stack([partial(s, rows, score, first_column=f) for f, s in shards])
    actual = flash_sample.merge(records, rows, score)
    assert_found(actual, exactly(logits, rows, score), device)
    whole = candidates(logits, rows, score)
    assert torch.equal(actual.token, whole.token) and torch.equal(actual.greedy, whole.greedy)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_fill_a_record_one_after_another(generator, device):
    """[R, V] never exists, because a tile's logits may be overwritten after its record is made."""
    logits = awkward_logits(generator, device=device)
    rows = mixed_rows(60, device)
    tile, width = torch.empty(60, 1024, device=device), 1024
    records = torch.empty(5, 60, flash_sample.RECORD_FIELDS, dtype=torch.float64, device=device)
    for index, (first, columns) in enumerate(shards_of(logits, range(width, 5000, width))):
        part = tile[:, : columns.shape[1]].copy_(columns)
        partial(part, rows, first_column=first, out=records[index])
    assert_found(flash_sample.merge(records, rows), exactly(logits, rows, "confidence"), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_tempered", [False, True])
def test_entropy_shares_of_slices_add_up(generator, device, is_tempered):
    logits = awkward_logits(generator, device=device)
    rows = mixed_rows(60, device, is_tempered=is_tempered, epsilon=1e-5)
    shards = shards_of(logits, (700, 1500))
    records = torch.stack([partial(s, rows, "entropy", first_column=f) for f, s in shards])
    actual = sum(flash_sample.entropy_share(s, records, rows, first_column=f) for f, s in shards)
    wanted = exactly(logits, rows, "entropy")[1]
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("call", "score", "edges"),
    [
        (margin, "margin", [0.0, 0.0, 1.0]),
        (bound(entropy, epsilon=1e-12), "entropy", [INF, 0.69315, 0.0]),
    ],
    ids=["margin", "entropy"],
)
def test_scores_of_calls_without_noise(generator, device, dtype, call, score, edges):
    """Rows with no finite logit, two equal best logits, and probability 1 are covered."""
    logits = random_logits(generator, 12, 5003, dtype, device)
    logits[:3] = -INF
    logits[1, [70, 4000]] = 40
    logits[2, 17] = 0
    token, value = call(logits)
    wanted = exactly(logits, Rows(epsilon=1e-12), score)
    assert torch.equal(token.cpu(), wanted[0]) and token[:3].tolist() == [0, 70, 17]
    torch.testing.assert_close(value.cpu().double(), wanted[1].double(), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(value[:3].cpu(), torch.tensor(edges), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_special_columns_far_above_the_rest(generator):
    """In fp32, their maximum may leave the other columns at 0, which must not give NaN."""
    logits = random_logits(generator, 4, 5000, torch.float32, "cuda")
    logits[:, 3] = 300
    for score in SCORES:
        actual = candidates(logits, Rows(columns=(3,), excluded=1), score)
        assert actual.token.tolist() == [3] * 4 and not actual.score.isnan().any()


@pytest.mark.gpu
def test_numbers_of_the_kernel_are_those_of_the_reference():
    positions = torch.tensor([0, 77, 2**31, 2**32 - 1])
    seeds, steps = torch.tensor([1, -5, 2**62, 0]), torch.tensor([0, 3, 2**31, 9])
    for columns in (1, (5, 999), (4, 8), (3, 3)):
        wanted = uniform(seeds, 2, steps, positions, columns)
        actual = flash_sample.uniform(seeds.cuda(), 2, steps.cuda(), positions.cuda(), columns)
        assert torch.equal(actual.cpu(), wanted)
    assert flash_sample.uniform(2**64 - 1, 0, 0, positions[:0].cuda(), 3).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_draws_of_wide_rows_equal_float64(generator, temperature):
    """There are many rows, so that some of them have near ties in fp32."""
    logits = random_logits(generator, 256, 126_464, torch.bfloat16, "cuda")
    positions = torch.arange(256, device="cuda")
    actual = candidates(logits, Rows(temperature, 2**63 + 11, 5, positions))
    u = flash_sample.uniform(2**63 + 11, 0, 5, positions, 126_464)
    noised = logits.double() - temperature * torch.log(-torch.log(u))
    assert torch.equal(actual.token, noised.argmax(dim=-1))
    p = torch.softmax(logits.double(), dim=-1).gather(1, actual.token[:, None])[:, 0]
    torch.testing.assert_close(actual.score.double(), p, rtol=CONFIDENCE_RTOL["cuda"], atol=1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_neighbours_or_alignment(generator, dtype):
    logits = random_logits(generator, 300, 126_464, dtype, "cuda")
    token, confidence = low_confidence(logits)
    for row in (0, 7, 299):
        alone = low_confidence(logits[row : row + 1])
        assert token[row] == alone[0][0] and confidence[row] == alone[1][0]
    shifted = torch.empty(300 * 126_467 + 1, dtype=dtype, device="cuda")[1:].view(300, -1)
    shifted = shifted[:, :126_464].copy_(logits)
    again = low_confidence(shifted)
    assert torch.equal(token, again[0]) and torch.equal(confidence, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("num_columns", [10_001, 126_464, 400_003])
def test_bits_do_not_depend_on_the_number_of_rows(generator, score, num_columns):
    """Few rows are spread over more multiprocessors, in several steps."""
    logits = random_logits(generator, 160, num_columns, torch.bfloat16, "cuda")
    index = torch.arange(160, device="cuda")

    def first(num_rows):
        rows = Rows(0.5 * (index % 3)[:num_rows].double(), 7, 3, index[:num_rows], epsilon=1e-7)
        return candidates(logits[:num_rows], rows, score)

    wanted = first(160)
    for num_rows in (1, 2, 17, 33, 34, 66, 67, 132, 133):
        actual = first(num_rows)
        assert all(torch.equal(a, b[:num_rows]) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 32, 200])
def test_draws_of_warps_that_tell_each_other_bounds_are_the_same(generator, num_rows):
    """The time at which a warp receives another warp's bound differs from launch to launch."""
    logits = random_logits(generator, num_rows, 126_464, torch.bfloat16, "cuda")
    rows = Rows(0.7, 11, 2, torch.arange(num_rows, device="cuda"))
    wanted = candidates(logits, rows)
    u = flash_sample.uniform(11, 0, 2, torch.arange(num_rows, device="cuda"), 126_464)
    noised = logits.double() - 0.7 * torch.log(-torch.log(u))
    assert torch.equal(wanted.token, noised.argmax(dim=-1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = [candidates(logits, rows) for _ in range(50)]
    for _ in range(20):
        graph.replay()
        for results in actual:
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_columns", [3000, 20_000])
def test_a_team_goes_through_many_rows(num_columns):
    logits = torch.randn(5000, num_columns, device="cuda").mul_(4).bfloat16()
    token, confidence = low_confidence(logits)
    assert torch.equal(token, logits.argmax(dim=-1))
    wanted = torch.softmax(logits.double(), dim=-1).gather(1, token[:, None])[:, 0]
    tolerance = {"rtol": CONFIDENCE_RTOL["cuda"], "atol": 1e-30}
    torch.testing.assert_close(confidence.double(), wanted, **tolerance)
    rows = Rows(epsilon=1e-6)
    value = candidates(logits, rows, "entropy").score
    p = torch.softmax(logits.double(), dim=-1)
    wanted = -(p * torch.log(p + 1e-6)).sum(dim=-1)
    torch.testing.assert_close(value.double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.gpu
def test_kernel_runs_on_a_gpu_and_in_a_captured_graph(generator):
    assert flash_sample.is_built()
    logits = random_logits(generator, 32, 126_464, torch.bfloat16, "cuda")
    low_confidence(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, confidence = low_confidence(logits)
    logits.copy_(random_logits(generator, 32, 126_464, torch.bfloat16))
    graph.replay()
    wanted_token, wanted = exact(logits)
    assert torch.equal(token.cpu(), wanted_token)
    tolerance = {"rtol": CONFIDENCE_RTOL["cuda"], "atol": 0}
    torch.testing.assert_close(confidence.cpu().double(), wanted, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 32, 200])
def test_launches_that_overlap_wait_for_what_they_read(generator, num_rows):
    """A call with epsilon launches two kernels, and the second reads the output of the first."""
    rows = Rows(epsilon=1e-6)
    inputs = [random_logits(generator, num_rows, 126_464, torch.bfloat16, "cuda") for _ in range(6)]
    wanted = []
    for logits in inputs:
        wanted.append(candidates(logits, rows, "entropy"))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = [candidates(logits, rows, "entropy") for logits in inputs]
    for _ in range(20):
        for results in actual:
            results.score.zero_()
        graph.replay()
        for results, expected in zip(actual, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_float64_logits_are_computed_in_float64(generator):
    logits = random_logits(generator, 3, 200).double()
    p = torch.softmax(logits, dim=-1)
    assert torch.equal(low_confidence(logits)[1], p.amax(dim=-1))
    assert torch.equal(entropy(logits)[1], -(p * torch.log(p + 1e-10)).sum(dim=-1))


@pytest.mark.parametrize("device", DEVICES)
def test_entropy_witht_is_the_gumbel_argmax_and_the_tempered_entropy(generator, device):
    logits = random_logits(generator, 6, 9000)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 3.0, 1e-9])
    seeds, steps = torch.tensor([1, 2, 3, 3, -4, 5]), torch.tensor([0, 1, 2, 2, 3, 4])
    positions = torch.tensor([9, 8, 7, 7, 6, 5])
    noise = [x.to(device) for x in (temperature, seeds, steps, positions)]
    actual = entropy_witht(logits.to(device), *noise, epsilon=1e-12)
    token, value = (x.cpu() for x in actual)
    for row in range(6):
        tau = temperature[row].item()
        numbers = uniform(
            int(seeds[row]), 0, int(steps[row]), positions[row : row + 1], logits.shape[1]
        )[0]
        noised = logits[row].double() - tau * torch.log(-torch.log(numbers))
        assert token[row] == noised.argmax()
        p = torch.softmax(logits[row].double() / (tau or 1.0), dim=-1)
        wanted = -(p * torch.log(p + 1e-12)).sum()
        torch.testing.assert_close(value[row].double(), wanted, rtol=2e-5, atol=1e-6)
    assert token[0] == logits[0].argmax()
    alone = entropy_witht(logits[4:5].to(device), 3.0, -4, 3, noise[3][4:5], epsilon=1e-12)
    assert alone[0] == token[4] and alone[1] == value[4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_have_the_frequencies_of_the_softmax(device, temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -INF, 2.0, 1.9])
    num_draws = 20_000
    positions = torch.arange(num_draws, device=device)
    token, _ = entropy_witht(logits.to(device).expand(num_draws, -1), temperature, 42, 0, positions)
    counts = torch.bincount(token.cpu(), minlength=7).double()
    expected = torch.softmax(logits.double() / temperature, dim=-1) * num_draws
    assert counts[4] == 0
    possible = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum()
    assert chi_square < chi_square_limit(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"temperature": torch.tensor([1.0, -2.0])}, "temperature must be >= 0, got -2.0"),
        ({"temperature": torch.ones(3)}, r"temperature must be a float or floating \[R=2\]"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions must be int64 \[R=2\]"),
        ({"seed": torch.zeros(2)}, "seed must be int64"),
        ({"step": torch.zeros(1, dtype=torch.int64)}, "step must be int64"),
    ],
)
def test_entropy_witht_checks_its_arguments(changes, message):
    arguments = {"temperature": 1.0, "seed": 1, "step": 0, "positions": torch.arange(2)} | changes
    with pytest.raises(ValueError, match=message):
        entropy_witht(torch.zeros(2, 5), **arguments)
