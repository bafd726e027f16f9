# SPDX-License-Identifier: Apache-2.0
"""Every algorithm, with every cache and family, gives the tokens of its published loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.models import load_reference

from tests import golden
from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.cases import (
    ADABLOCK,
    DELAYED,
    DREAM,
    FOUR_BLOCKS,
    FULL,
    MULTI,
    PROMPT_LENGTH,
    TWO_BLOCKS,
)
from tests.engine.harness import (
    Engine,
    Response,
    as_request,
    assert_alike,
    assert_parity,
    clear_case,
    clear_cases,
    running,
    speculating,
)
from vllm.diffusion.request.algorithms import ALGORITHMS

CASES = ("mha", "dream", "moe")

# These pairs of algorithm and parameters work with every cache of blocks.
BLOCKWISE: list[dict[str, Any]] = [
    {"algorithm": "semi_ar", "steps": 16},
    {"algorithm": "semi_ar", "steps": 4},
    {"algorithm": "semi_ar", "steps": 32},
    {"algorithm": "semi_ar", "steps": 16, "remasking": "random", "seed": 3},
    {"algorithm": "threshold", "threshold": 0.6},
    {"algorithm": "factor"},
    {"algorithm": "factor", "factor": 2.0},
    {"algorithm": "local_leap"},
    {"algorithm": "local_leap", "threshold": 0.7, "relaxed_threshold": 0.3, "radius": 2},
    {"algorithm": "entropy_threshold"},
    {"algorithm": "entropy_threshold", "threshold": 2.0},
    {"algorithm": "hierarchy"},
    {"algorithm": "hierarchy", "threshold": 0.6, "low_threshold": 0.2},
    {"algorithm": "credit"},
    {"algorithm": "credit", "threshold": 0.5},
    {**ADABLOCK, "delimiter_threshold": 0.0},
    {**ADABLOCK, "delimiter_threshold": 0.1, "threshold": 0.5},
    {**ADABLOCK, "delimiter_threshold": 1.5},
]
OTHERS: list[dict[str, Any]] = [
    {**MULTI},
    {**MULTI, "threshold": 1.5},
    {**MULTI, "threshold": 1.5, "block_add_threshold": 0.1, "decoded_token_threshold": 0.95},
    {**MULTI, "threshold": 1.0, "block_add_threshold": 0.0, "decoded_token_threshold": 0.2},
    {**MULTI, "threshold": 1.0, "block_add_threshold": 1.0, "decoded_token_threshold": 1.0},
    {**MULTI, "threshold": 1.0, "block_length": 4},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 0},
    {**DELAYED, "threshold": 1.0, "cache_delay_iter": 1},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 2, "refresh_interval": 3},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 2, "block_length": 4},
    {**DELAYED, "threshold": 2.5, "cache_delay_iter": 3, "block_length": 4},
    {**DELAYED, "threshold": 1.0},
    {**FULL},
    {**FULL, "threshold": 1.5},
    {**FULL, "threshold": 1.5, "block_length": 7},
    {**FULL, "threshold": 1.0, "block_add_threshold": 0.0, "decoded_token_threshold": 0.3},
    {**FULL, "threshold": 2.0, "block_add_threshold": 0.5, "gen_length": 30, "block_length": 8},
    {**FULL, "block_length": 64},
    {**DREAM, "steps": 24},
    {**DREAM, "steps": 7, "alg": "maskgit_plus"},
    {**DREAM, "steps": 12, "alg": "topk_margin"},
    {**DREAM, "steps": 30, "alg": "entropy"},
    {**DREAM, "steps": 9, "alg": "entropy", "eps": 0.2},
    {**DREAM, "steps": 8, "alg": "origin", "seed": 3},
    {**DREAM, "steps": 8, "alg": "origin", "eps": 0, "seed": 3},
    {**DREAM, "steps": 8, "alg": "maskgit_plus", "alg_temp": 0.5, "seed": 4},
    {**DREAM, "steps": 8, "alg": "entropy", "alg_temp": 0.2, "seed": 2**64 - 1},
    {**DREAM, "steps": 8, "alg": "entropy", "top_k": 5},
    {**DREAM, "steps": 8, "alg": "maskgit_plus", "top_p": 0.7},
    {**DREAM, "steps": 1},
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.8, "seed": 6},
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.8, "top_p": 0.8, "seed": 6},
    {
        **DREAM,
        "gen_length": 6,
        "steps": 4,
        "temperature": 1.2,
        "top_p": 0.9,
        "top_k": 9,
        "seed": 7,
        "alg": "topk_margin",
        "alg_temp": 0.3,
    },
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.5, "alg": "origin", "seed": 8},
]
NOISY: list[dict[str, Any]] = [
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "factor"},
    {**ADABLOCK, **TWO_BLOCKS, "gen_length": 11, "temperature": 0.6, "delimiter_threshold": 0.01},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "local_leap", "remasking": "random"},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "entropy_threshold"},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "hierarchy", "threshold": 0.6},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "credit", "threshold": 0.6},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "multi_block", "threshold": 1.0},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "multi_block", "threshold": 0.2},
    {**TWO_BLOCKS, "temperature": 0.6, "algorithm": "semi_ar", "steps": 4, "cache": "dual"},
    {**TWO_BLOCKS, "algorithm": "entropy_threshold", "cfg_scale": 1.0},
    {**TWO_BLOCKS, "algorithm": "full_attn_multi_block", "cfg_scale": 0.5, "threshold": 1.0},
    {**TWO_BLOCKS, "algorithm": "multi_block", "cfg_scale": 0.5, "threshold": 1.0},
    {**TWO_BLOCKS, "algorithm": "credit", "cfg_scale": 0.5},
    {**TWO_BLOCKS, "algorithm": "hierarchy", "logits_eos_inf": True},
    {**TWO_BLOCKS, "algorithm": "factor", "confidence_eos_eot_inf": True},
    {**TWO_BLOCKS, "algorithm": "factor", "remasking": "random"},
    {**TWO_BLOCKS, "algorithm": "entropy_threshold", "confidence_dtype": "float64"},
]


def name_of(parameters: dict[str, Any]) -> str:
    parts = {k: v for k, v in parameters.items() if k not in ("gen_length", "algorithm")}
    return "-".join([str(parameters["algorithm"]), *(f"{k}={v}" for k, v in parts.items())])


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[str, Engine, Any]]:
    folder = checkpoint(request.param)
    with running(folder) as engine:
        yield request.param, engine, load_reference(folder)


Pair = tuple[str, Engine, Any]


CACHES = ("none", "prefix", "dual")
EVERYTHING = [
    *(
        {**FOUR_BLOCKS, **parameters, "cache": cache}
        for parameters in BLOCKWISE
        for cache in CACHES
    ),
    *(*OTHERS, *NOISY),
]


@pytest.fixture(scope="module")
def together(pair: Pair) -> dict[str, tuple[Response, golden.Run]]:
    """Return the responses to all cases in one batch, and the runs of their published loops."""
    _, engine, model = pair
    asks, wanted = clear_cases(model, [(PROMPT_LENGTH, parameters) for parameters in EVERYTHING])
    answers = zip(engine.ask(*asks), wanted, strict=True)
    return dict(zip(map(name_of, EVERYTHING), answers, strict=True))


@pytest.mark.parametrize("name", [name_of(parameters) for parameters in EVERYTHING])
def test_every_algorithm_cache_and_parameter(
    together: dict[str, tuple[Response, golden.Run]], name: str
) -> None:
    assert_alike(*together[name])


def test_a_request_alone(pair: Pair) -> None:
    """Requests give the reference's tokens when each of them runs without neighbours."""
    _, engine, model = pair
    for parameters in {parameters["algorithm"]: parameters for parameters in EVERYTHING}.values():
        assert_parity(engine, model, PROMPT_LENGTH, parameters)


def test_a_batch_of_everything(pair: Pair) -> None:
    """Neighbours with other algorithms, caches, guidance and seeds do not change a request."""
    _, engine, model = pair
    asks, canvases = [], []
    blockwise = [
        {**FOUR_BLOCKS, **parameters, "cache": ("none", "prefix", "dual")[i % 3]}
        for i, parameters in enumerate(BLOCKWISE)
    ]
    for number, parameters in enumerate([*blockwise[::2], *OTHERS[::3], *NOISY[::3]]):
        prompt, wanted = clear_case(model, 5 + number, **parameters)
        asks.append(as_request(prompt, **parameters))
        canvases.append((wanted.ids, wanted.num_forwards))
    answers = engine.ask(*asks)
    assert [(a.token_ids, a.num_forwards) for a in answers] == canvases
    assert engine.is_idle()
    assert engine.runner.caches.num_bytes == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_guesses_change_nothing(pair: Pair, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests with drafts give the tokens and steps of the loops, for any number of drafts.

    Each family uses another cache with the same parameters.
    """
    case, engine, model = pair
    monkeypatch.setattr(engine.loop, "runs_ahead", ahead)
    cached = [
        {**FOUR_BLOCKS, **parameters, "cache": CACHES[(number + CASES.index(case)) % 3]}
        for number, parameters in enumerate(BLOCKWISE)
    ]
    cases = [
        parameters
        for parameters in [*cached, *OTHERS, *NOISY][ahead::2]
        if ALGORITHMS[parameters["algorithm"]].speculates
    ]
    asks, wanted = clear_cases(model, [(PROMPT_LENGTH, parameters) for parameters in cases])
    asks = speculating(asks, {"mha": 7, "dream": 3, "moe": 1}[case])
    saved = 0
    for start in range(0, len(asks), 8):
        answers = engine.ask(*asks[start : start + 8])
        for answer, run in zip(answers, wanted[start:], strict=False):
            assert_alike(answer, run)
            saved += answer.report["num_steps"] - answer.report["num_forwards"]
    assert saved > len(asks) / 2
    assert engine.is_idle()


def test_random_entropies(pair: Pair) -> None:
    """d3LLM may rank by random numbers with LLaDA, and is refused with Dream."""
    case, engine, model = pair
    parameters = {**MULTI, "threshold": 0.3, "remasking": "random", "seed": 12}
    if case == "dream":
        with pytest.raises(Exception, match="remasking: given 'random'"):
            engine.ask(as_request(random_prompt(PROMPT_LENGTH, 0), **parameters))
    else:
        assert_parity(engine, model, PROMPT_LENGTH, parameters)


# Parameters, and the prompt of each family for which EOS is committed before earlier masks.
EARLY_STOPS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({**MULTI, "threshold": 1.5}, {"mha": 5, "dream": 29, "moe": 24}),
    (
        {**MULTI, "threshold": 2.0, "block_add_threshold": 0.1, "decoded_token_threshold": 0.95},
        {"mha": 1, "dream": 5, "moe": 14},
    ),
    (
        {**DELAYED, "threshold": 2.0, "cache_delay_iter": 1, "block_length": 4},
        {"mha": 1, "dream": 67, "moe": 19},
    ),
]


@pytest.mark.parametrize(
    ("parameters", "seeds"), EARLY_STOPS, ids=[name_of(parameters) for parameters, _ in EARLY_STOPS]
)
def test_early_stop(pair: Pair, parameters: dict[str, Any], seeds: dict[str, int]) -> None:
    """With `early_stop`, the answer up to EOS is the reference's, which differs without it."""
    case, engine, model = pair
    prompt = random_prompt(PROMPT_LENGTH, seeds[case])
    wanted = golden.run(model, prompt, early_stop=True, **parameters)
    without = golden.run(model, prompt, **parameters)
    place = wanted.ids.index(EOS_ID)
    assert 0 < place < len(wanted.ids) - 4
    assert without.ids[: place + 1] != wanted.ids[: place + 1]
    assert wanted.is_clear
    (answer,) = engine.ask(as_request(prompt, ignore_eos=False, early_stop=True, **parameters))
    assert answer.finish_reason == "stop"
    end = len(answer.token_ids)
    assert end <= place + 1  # another stop token may come first
    assert answer.token_ids == wanted.ids[:end]
    assert answer.num_forwards is not None
    assert answer.num_forwards <= wanted.num_forwards
    # A request with `ignore_eos` does not stop early.
    (whole,) = engine.ask(as_request(prompt, early_stop=True, **parameters))
    if without.is_clear:
        assert whole.token_ids == without.ids


def test_a_model_that_predicts_the_mask(checkpoint: Callable[[str], Path]) -> None:
    """Every algorithm ends, and no answer contains a mask token."""
    settings = [{**FOUR_BLOCKS, **parameters} for parameters in BLOCKWISE] + OTHERS + NOISY
    settings += [{**FOUR_BLOCKS, **parameters, "cache": "dual"} for parameters in BLOCKWISE]
    with running(checkpoint("predicts_mask")) as engine:
        asks = [
            as_request(random_prompt(20, number % 2), **{"seed": number, **parameters})
            for number, parameters in enumerate(settings)
        ]
        for ask, answer in zip(asks, engine.ask(*asks), strict=True):
            assert len(answer.token_ids) == ask.extra["gen_length"]
            assert MASK_ID not in answer.token_ids
            assert answer.num_forwards is not None
            assert answer.num_forwards <= 2 * ask.extra["gen_length"] + ask.extra.get("steps", 0)
        assert engine.is_idle()
