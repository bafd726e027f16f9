# SPDX-License-Identifier: Apache-2.0
"""A decision is made once, crosses processes unchanged, and cannot be forged."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.params.support import MODEL, PROMPT
from vllm import SamplingParams
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, AlgorithmParams
from vllm.diffusion.request.decision import (
    DECISION,
    attach,
    decide,
    decision_of,
    is_decided,
    request_values_of,
)
from vllm.diffusion.request.fields import PARAMETERS
from vllm.diffusion.request.likelihood import SCORE, SCORED_AS
from vllm.diffusion.request.params import DiffusionParams

ASKED: dict[str, Any] = {"gen_length": 64, "steps": 8, "block_length": 32}


def decided(sampling: SamplingParams) -> DiffusionParams:
    return decide(request_values_of(sampling), MODEL, PROMPT)


def crossed(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters that the engine's process receives from a front end."""
    none = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    given: dict[str, Any] = {"request_id": "r", "prompt_token_ids": PROMPT, "arrival_time": 0.0}
    request = EngineCoreRequest(**given, sampling_params=sampling, **dict.fromkeys(none))
    received: Any = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    actual: SamplingParams = received.sampling_params
    return actual


def no_decision(*_: Any) -> Any:
    raise AssertionError("decided again")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("crosses", [True, False])
def test_the_engine_gets_the_decision_as_it_was_made(
    algorithm: str, crosses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: value for name, value in ASKED.items() if name != "steps" or algorithm != "dream"}
    sampling = SamplingParams(
        temperature=0.7,
        seed=2**64 - 1,
        stop_token_ids=[7],
        logprobs=2,
        extra_args={**own, "algorithm": algorithm, "logits_eos_inf": True},
    )
    wanted = decided(sampling)
    attach(sampling, wanted)
    monkeypatch.setattr("vllm.diffusion.request.decision.decide", no_decision)
    received = crossed(sampling) if crosses else sampling.clone()
    assert decision_of(received, MODEL, PROMPT) == wanted


def test_answers_differ_by_their_seed_alone() -> None:
    sampling = SamplingParams(extra_args={**ASKED, "seed": 2**64 - 2})
    wanted = decided(sampling)
    for index, seed in enumerate((2**64 - 2, 2**64 - 1, 0)):
        own = sampling.clone()
        attach(own, wanted, index)
        assert decision_of(own, MODEL, PROMPT) == dataclasses.replace(wanted, seed=seed)
    drawn = SamplingParams(extra_args=ASKED)
    attach(drawn, decided(drawn), 5)
    assert (drawn.seed, decision_of(drawn, MODEL, PROMPT).seed) == (None, None)


def test_what_comes_without_a_decision_is_decided_alike() -> None:
    sampling = SamplingParams(temperature=0.0, extra_args=ASKED)
    assert not is_decided(sampling)
    assert decision_of(sampling, MODEL, PROMPT) == decided(sampling)


@pytest.mark.parametrize("forged", [{"gen_length": 10**9, "algorithm": "semi_ar"}, "x", 1, [1]])
def test_a_client_cannot_send_a_decision(forged: Any) -> None:
    """No JSON value is a decision, so that the field is refused like any unknown parameter."""
    sampling = SamplingParams(extra_args={**ASKED, DECISION: forged})
    assert not is_decided(sampling)
    with pytest.raises(InvalidParameterError, match=f"^{DECISION}: given .*; unknown parameter"):
        decided(sampling)


def test_a_forged_decision_does_not_pass_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's routes pass extra_args of a client unchanged, and must refuse it as well."""
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm.diffusion.api import validator

    forged = dataclasses.asdict(decided(SamplingParams(extra_args=ASKED)))
    sampling = SamplingParams(extra_args={DECISION: {**forged, "stop_ids": []}})
    request = SimpleNamespace(sampling_params=sampling.clone(), prompt_token_ids=PROMPT)
    front_end: Any = SimpleNamespace(diffusion_validator=validator.Validator(None))
    monkeypatch.setattr(validator, "_upstreams", lambda *_, **__: request)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)
    validator.install()
    for prompt in ("raw", {"type": "token", "prompt_token_ids": PROMPT}):
        with pytest.raises(validator.RequestRefused, match=f"^{DECISION}: "):
            InputProcessor.process_inputs(front_end, "r", prompt, sampling)


def test_what_is_read_is_checked_though_one_of_its_length_was_decided() -> None:
    from vllm.diffusion.api.validator import RequestRefused, Validator

    front = Validator(None)  # type: ignore[arg-type]
    vars(front)["_model"] = MODEL
    score = {"positions": [1], "token_ids": [[3]], "cfg_scale": 0.0}
    terms = {"timeout_s": 2.0}
    first = front.decide_query(score, PROMPT, terms)
    assert first == decide({SCORE: score, **SCORED_AS, **terms}, MODEL, PROMPT)
    assert front.decide_query({**score, "positions": [0]}, PROMPT, terms) is first
    assert front.decide_query(score, PROMPT, {}).timeout_s is None
    assert front.decide_query({**score, "cfg_scale": 1.0}, PROMPT, terms).cfg_scale == 1.0
    for wrong, prompt, field in (
        ({**score, "positions": [len(PROMPT)]}, PROMPT, "score.positions"),
        ({**score, "token_ids": [[MODEL.vocab_size]]}, PROMPT, "score.token_ids"),
        (score, [MODEL.vocab_size, *PROMPT[1:]], "prompt"),
        ({**score, "shares_prefix": True}, PROMPT, "score.shares_prefix"),
    ):
        with pytest.raises(RequestRefused, match=f"^{field}: given"):
            front.decide_query(wrong, prompt, terms)


def test_parameters_of_algorithms_have_a_type_a_user_and_a_default() -> None:
    names = {spec.name for spec in PARAMETERS}
    assert names == {f.name for f in dataclasses.fields(AlgorithmParams)}
    assert all(spec.algorithms or spec.block_algorithms for spec in PARAMETERS)
    for algorithm in (*ALGORITHMS.values(), *BLOCK_ALGORITHMS.values()):
        assert set(algorithm.parameters) <= names
        assert set(algorithm.shifted_defaults) <= set(algorithm.parameters)
        assert set(algorithm.defaults) <= set(algorithm.parameters)
