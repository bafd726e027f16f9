# SPDX-License-Identifier: Apache-2.0
"""flash_sample: the references against plain formulas, the kernel against float64."""

import itertools

import pytest
import torch

import flash_sample
from flash_sample import entropy, entropy_witht, low_confidence, low_confidence_partial, reference
from flash_sample.philox import uniform
from tests.native.test_philox import chi_square_limit

INF = torch.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Relative error of a probability whose logits are exact in fp32. On a CPU, PyTorch adds a row up in
# a few long chains; the kernel adds by trees, and its exp() is good to two units in the last place.
CONFIDENCE_RTOL = {"cpu": 5e-5, "cuda": 5e-6}

# One column; less and more than a vector, and than a segment of the kernel; ragged; LLaDA's.
WIDTHS = [1, 7, 8, 300, 2047, 2048, 2049, 10_001, 126_464]


def random_logits(generator, num_rows, num_columns, dtype=torch.float32, device="cpu"):
    return (torch.randn(num_rows, num_columns, generator=generator) * 4).to(dtype).to(device)


def exact(logits, excluded=()):
    """Token and confidence from float64, and ties by an explicit search."""
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
    torch.testing.assert_close(
        confidence.cpu().double(),
        wanted_confidence,
        rtol=CONFIDENCE_RTOL[logits.device.type],
        atol=1e-30,
    )


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
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_random_logits(generator, device, dtype, num_columns):
    check(random_logits(generator, 5, num_columns, dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 31, 133, 1025])
def test_number_of_rows(generator, device, num_rows):
    check(random_logits(generator, num_rows, 515, torch.bfloat16, device))


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
    logits[1, :4000] = -INF  # more than a segment
    logits[2, ::2] = -INF
    logits[3, 1:] = -INF  # certain
    logits[4, :-1] = -INF
    check(logits)
    token, confidence = low_confidence(logits)
    assert token[0] == 0 and confidence[0] == 0
    assert confidence[3] == 1 and token[3] == 0
    assert confidence[4] == 1 and token[4] == 6000


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_logits(generator, device):
    logits = random_logits(generator, 4, 3000, torch.float32, device)
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
    logits[0, 4321] = 60  # excluded and best
    logits[1, 7] = 60
    logits[2, 8] = logits[2, 4321] = 60  # a tie that an ordinary column wins
    logits[3] = -INF
    logits[3, 7] = 1.0  # nothing but an excluded column
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


def shards_of(logits, cuts):
    edges = [0, *cuts, logits.shape[1]]
    return [(first, logits[:, first:end]) for first, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cuts", [(2500,), (1, 2, 4999), (1250, 2500, 3750)])
def test_merged_shards_equal_the_whole(generator, device, cuts):
    logits = random_logits(generator, 60, 5000, torch.float32, device)
    logits[:20] = torch.randint(-2, 3, (20, 5000), generator=generator)  # ties across shards
    logits[20] = -INF
    logits[21, : cuts[0]] = -INF  # a shard without a finite logit
    logits[22, 4999] = 60
    excluded = (4999, 3)
    parts = [
        low_confidence_partial(shard, first_column=first, excluded=excluded)
        for first, shard in shards_of(logits, cuts)
    ]
    whole = flash_sample.merge(parts)
    token, confidence = low_confidence(logits, excluded=excluded)
    assert torch.equal(whole.column, token)
    merged = flash_sample.confidence(whole, excluded=excluded)
    torch.testing.assert_close(merged, confidence, rtol=CONFIDENCE_RTOL[device], atol=1e-30)
    assert merged[20] == 0 and merged[22] == 0


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
def test_kernel_runs_on_a_gpu_and_in_a_captured_graph(generator):
    assert flash_sample.is_built()
    logits = random_logits(generator, 32, 126_464, torch.bfloat16, "cuda")
    low_confidence(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, confidence = low_confidence(logits)
    logits.copy_(random_logits(generator, 32, 126_464, torch.bfloat16))
    graph.replay()
    wanted_token, wanted_confidence = exact(logits)
    assert torch.equal(token.cpu(), wanted_token)
    torch.testing.assert_close(
        confidence.cpu().double(), wanted_confidence, rtol=CONFIDENCE_RTOL["cuda"], atol=0
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy(generator, device, dtype):
    logits = random_logits(generator, 12, 5003, dtype, device)
    logits[0] = 0  # log V
    logits[1] = -INF
    logits[1, 17] = 0  # certain
    logits[2] = -INF
    token, value = entropy(logits, epsilon=1e-12)
    p = torch.softmax(logits.double().cpu(), dim=-1)
    wanted = -(p * torch.log(p + 1e-12)).sum(dim=-1)
    wanted[2] = INF
    assert token.cpu()[[0, 1, 2]].tolist() == [0, 17, 0]
    assert torch.equal(token.cpu()[3:], exact(logits)[0][3:])
    torch.testing.assert_close(value.cpu().double(), wanted, rtol=2e-5, atol=1e-6)


def test_float64_logits_are_computed_in_float64(generator):
    logits = random_logits(generator, 3, 200).double()
    p = torch.softmax(logits, dim=-1)
    assert torch.equal(low_confidence(logits)[1], p.amax(dim=-1))
    assert torch.equal(entropy(logits)[1], -(p * torch.log(p + 1e-10)).sum(dim=-1))


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
def test_entropy_shares_of_shards_add_up(generator, temperature):
    logits = random_logits(generator, 20, 3000)
    logits[0, :1500] = -INF
    logits[1] = -INF
    shards = shards_of(logits, (700, 1500))
    whole = reference.merge(
        [reference.partial(s, first_column=f, temperature=temperature) for f, s in shards],
        temperature=temperature,
    )
    shares = [
        reference.entropy_share(s, whole, epsilon=1e-10, temperature=temperature) for _, s in shards
    ]
    wanted = entropy(logits if temperature is None else logits / temperature)[1]
    torch.testing.assert_close(sum(shares), wanted, rtol=2e-5, atol=1e-6)


def test_noised_choice_of_shards_equals_the_whole(generator):
    logits = random_logits(generator, 40, 20_000)
    noise = (torch.rand(40, generator=generator), 99, torch.arange(40) % 3, torch.arange(40))
    whole = reference.gumbel_best(logits, *noise)
    parts = [
        reference.gumbel_best(shard, *noise, first_column=first)
        for first, shard in shards_of(logits, (3, 8191, 15_001))
    ]
    merged = reference.merge_best(parts)
    assert torch.equal(merged.column, whole.column) and torch.equal(merged.score, whole.score)


def test_entropy_witht_is_the_gumbel_argmax_and_the_tempered_entropy(generator):
    logits = random_logits(generator, 6, 9000)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 3.0, 1e-9])
    seeds, steps = torch.tensor([1, 2, 3, 3, -4, 5]), torch.tensor([0, 1, 2, 2, 3, 4])
    positions = torch.tensor([9, 8, 7, 7, 6, 5])
    token, value = entropy_witht(logits, temperature, seeds, steps, positions, epsilon=1e-12)
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
    alone = entropy_witht(logits[4:5], 3.0, -4, 3, positions[4:5], epsilon=1e-12)
    assert alone[0] == token[4] and alone[1] == value[4]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_have_the_frequencies_of_the_softmax(temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -INF, 2.0, 1.9])
    num_draws = 20_000
    token, _ = entropy_witht(
        logits.expand(num_draws, -1), temperature, 42, 0, torch.arange(num_draws)
    )
    counts = torch.bincount(token, minlength=7).double()
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
