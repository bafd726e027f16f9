# SPDX-License-Identifier: Apache-2.0
"""Canvases after every step, and the probability of each token at its commit.

A replay of the canvases through the reference model gives the expected values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import decode, shaping
from reference.models import load_reference

from tests.checkpoints import DELETE_ID, EOS_ID, MASK_ID, SPLIT_ID, random_prompt
from tests.engine.harness import STOP_IDS, Engine, Request, running, sampling_params

PROMPT_LENGTH = 13
NUM_TOP = 3
BLOCKS: dict[str, Any] = {"gen_length": 16, "block_length": 8}
NOISE: dict[str, Any] = {"temperature": 1.0, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    "semi_ar": {**BLOCKS, "algorithm": "semi_ar", "steps": 8},
    "noise": {**BLOCKS, "steps": 16, **NOISE},
    "random remasking": {**BLOCKS, "steps": 4, "remasking": "random", **NOISE},
    "guidance": {**BLOCKS, "steps": 8, "cfg_scale": 0.5},
    "no end": {**BLOCKS, "steps": 8, "logits_eos_inf": True},
    "end last": {**BLOCKS, "steps": 8, "confidence_eos_eot_inf": True},
    "float64": {**BLOCKS, "steps": 8, "confidence_dtype": "float64"},
    "threshold": {**BLOCKS, "threshold": 0.3},
    "entropies": {**BLOCKS, "algorithm": "entropy_threshold"},
    "credit": {**BLOCKS, "algorithm": "credit", "threshold": 0.4},
    "several blocks": {**BLOCKS, "algorithm": "multi_block", **NOISE},
    "dream": {"gen_length": 16, "algorithm": "dream", "steps": 8},
    "dream, top_p": {"gen_length": 16, "algorithm": "dream", "steps": 8, "top_p": 0.8, **NOISE},
}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.8,
    "logit_bias": {7: 1.5, 12: -3.0},
}
# Fields that edit logits, together with sampling, guidance and chunks.
EDITED: dict[str, dict[str, Any]] = {
    "penalties": {**BLOCKS, "steps": 8, **PENALTIES},
    "penalties, noise, filters": {
        **BLOCKS,
        "steps": 16,
        **PENALTIES,
        **NOISE,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    "penalties, guidance": {**BLOCKS, "steps": 8, "cfg_scale": 0.5, **PENALTIES},
    "penalties, dream": {"gen_length": 16, "algorithm": "dream", "steps": 8, **PENALTIES},
    "penalties, several blocks": {**BLOCKS, "algorithm": "multi_block", **PENALTIES},
    "penalties, credit": {**BLOCKS, "algorithm": "credit", "threshold": 0.4, **PENALTIES},
    "allowed, least length": {
        **BLOCKS,
        "threshold": 0.3,
        "min_tokens": 9,
        "allowed_token_ids": [EOS_ID, *range(20, 60)],
    },
}


@dataclass(frozen=True)
class View:
    """A canvas as the engine reported it."""

    step: int
    token_ids: list[int]
    committed: list[bool]
    confidence: list[float]

    @classmethod
    def of(cls, packed: dict[str, Any]) -> View:
        return cls(
            packed["step"],
            np.frombuffer(packed["token_ids"], "<i4").tolist(),
            np.frombuffer(packed["committed"], "?").tolist(),
            np.frombuffer(packed["confidence"], "<f4").tolist(),
        )

    def row(self, prompt: list[int]) -> list[int]:
        """Return prompt and canvas as input of the next forward pass."""
        pairs = zip(self.token_ids, self.committed, strict=True)
        return [*prompt, *(token if done else MASK_ID for token, done in pairs)]


@dataclass(frozen=True)
class Watched:
    """A request from its first step to its last, with its canvases."""

    views: list[View]
    token_ids: list[int]
    logprobs: list[dict[int, Any]]
    report: dict[str, Any]


def watch(engine: Engine, ask: Request) -> Watched:
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(ask)
    params.output_kind = RequestOutputKind.DELTA
    upstream = engine.llm.llm_engine
    upstream.add_request("watched", {"prompt_token_ids": list(ask.prompt)}, params)
    views: list[View] = []
    token_ids: list[int] = []
    logprobs: list[dict[int, Any]] = []
    report: dict[str, Any] = {}
    while upstream.has_unfinished_requests():
        for output in upstream.step():
            report, completion = output.kv_transfer_params["dllm"], output.outputs[0]
            views.append(View.of(report["canvas"]))
            token_ids += completion.token_ids
            logprobs += completion.logprobs or []
    return Watched(views, token_ids, logprobs, report)


@pytest.fixture(scope="module")
def dream(checkpoint: Callable[[str], Path]) -> Iterator[tuple[Engine, Any]]:
    folder = checkpoint("dream")
    with running(folder) as engine:
        yield engine, load_reference(folder)


@pytest.fixture(scope="module")
def llada(checkpoint: Callable[[str], Path]) -> Iterator[tuple[Engine, Any]]:
    folder = checkpoint("mha")
    with running(folder) as engine:
        yield engine, load_reference(folder)


def log_probabilities(
    model: Any, row: list[int], prompt: list[int], parameters: dict[str, Any]
) -> Any:
    """Return log probabilities of the canvas positions of a row, [N, V]."""
    ids = decode.SpecialIds(mask=MASK_ID, eos=EOS_ID, eot=None)
    options = decode.Options(ids=ids, cfg_scale=parameters.get("cfg_scale", 0.0))
    known = torch.arange(len(row)) < len(prompt)
    logits = decode.guided_logits(model, torch.tensor(row), known, options)
    if parameters.get("logits_eos_inf"):
        logits[:, EOS_ID] = -torch.inf
    own = shaping.edited(logits[len(prompt) :], row, len(prompt), parameters, MASK_ID, STOP_IDS)
    return torch.log_softmax(own, dim=-1)


def replay(engine: Engine, model: Any, parameters: dict[str, Any]) -> None:
    prompt = random_prompt(PROMPT_LENGTH)
    parameters = {**parameters, "ignore_eos": True}
    extra = {**parameters, "stream_canvas": True}
    watched = watch(engine, Request(prompt, extra, {"logprobs": NUM_TOP}))
    views, canvas_length = watched.views, parameters["gen_length"]
    assert [view.step for view in views] == list(range(1, watched.report["num_forwards"] + 1))
    assert views[-1].token_ids == watched.token_ids
    assert all(views[-1].committed)
    assert len(watched.logprobs) == canvas_length
    before = View(0, [MASK_ID] * canvas_length, [False] * canvas_length, [])
    num_proposals = 0
    for view in views:
        wanted = log_probabilities(model, before.row(prompt), prompt, parameters)
        for position in range(canvas_length):
            token, confidence = view.token_ids[position], view.confidence[position]
            if before.committed[position]:
                assert view.committed[position]
                assert token == before.token_ids[position]
                assert confidence == before.confidence[position]
            elif view.committed[position]:
                actual = watched.logprobs[position]
                check_position(actual, token, wanted[position])
                if "temperature" not in parameters and parameters.get("algorithm") != "credit":
                    assert token == int(wanted[position].argmax())
                assert confidence == pytest.approx(np.exp(actual[token].logprob), rel=1e-5)
            elif not np.isnan(confidence):
                num_proposals += 1
                assert confidence == pytest.approx(float(wanted[position, token].exp()), rel=1e-3)
            else:
                assert token == MASK_ID
        before = view
    assert num_proposals


def check_position(actual: dict[int, Any], token: int, wanted: torch.Tensor) -> None:
    """Check that the committed token is first, then the most likely ones, each with its rank."""
    assert next(iter(actual)) == token
    assert NUM_TOP <= len(actual) <= NUM_TOP + 1
    top = wanted.topk(NUM_TOP)
    assert actual.keys() == {token, *top.indices.tolist()}
    for other, logprob in actual.items():
        assert logprob.logprob == pytest.approx(float(wanted[other]), rel=1e-3, abs=1e-4)
        assert logprob.rank == int((wanted > wanted[other]).sum()) + 1


@pytest.mark.parametrize("parameters", [*CASES.values(), *EDITED.values()], ids=[*CASES, *EDITED])
def test_replay(llada: tuple[Engine, Any], parameters: dict[str, Any]) -> None:
    replay(*llada, parameters)


def test_they_change_no_token(llada: tuple[Engine, Any]) -> None:
    """Requests with logprobs are sampled by separate launches and keep their tokens."""
    engine, _ = llada
    prompt = random_prompt(PROMPT_LENGTH)
    asks = [
        Request(prompt, {**parameters, "ignore_eos": True}, sampling)
        for parameters in (*CASES.values(), *EDITED.values())
        for sampling in ({}, {"logprobs": 0}, {"logprobs": 5})
    ]
    answers = [answer.token_ids for answer in engine.ask(*asks)]
    assert answers[0::3] == answers[1::3] == answers[2::3]


def test_only_those_who_ask_are_told(llada: tuple[Engine, Any]) -> None:
    engine, _ = llada
    silent = Request(random_prompt(PROMPT_LENGTH), CASES["semi_ar"])
    first, second = engine.outputs(silent, replace(silent, sampling={"logprobs": 1}))
    assert first.outputs[0].logprobs is None
    assert "canvas" not in first.kv_transfer_params["dllm"]
    message = second.outputs[0]
    assert len(message.logprobs) == len(message.token_ids)
    assert message.cumulative_logprob == pytest.approx(
        sum(
            actual[t].logprob for actual, t in zip(message.logprobs, message.token_ids, strict=True)
        )
    )


def test_the_answer_is_cut_with_its_logprobs(llada: tuple[Engine, Any]) -> None:
    engine, _ = llada
    prompt = random_prompt(PROMPT_LENGTH)
    extra = {**BLOCKS, "steps": 4, "ignore_eos": True, "stream_canvas": True}
    whole = watch(engine, Request(prompt, extra, {"logprobs": 0}))
    cut = watch(engine, Request(prompt, {**extra, "max_tokens": 5}, {"logprobs": 0}))
    assert cut.token_ids == whole.token_ids[:5]
    assert cut.logprobs == whole.logprobs[:5]


def test_a_token_that_was_never_proposed_has_no_chance(checkpoint: Callable[[str], Path]) -> None:
    """A token without a candidate gets upstream's finite number, because JSON has no NaN."""
    often = {"threshold": 0.3, "logit_bias": {SPLIT_ID: 2.5, DELETE_ID: 2.5}}
    extra = {"algorithm": "levenshtein", "gen_length": 32, "editing_threshold": 0.3, **often}
    asks = [Request(random_prompt(n), extra, {"logprobs": 1}) for n in (5, 20, 40)]
    with running(checkpoint("llada22")) as engine:
        answers = [output.outputs[0] for output in engine.outputs(*asks)]
    actual = [
        message[token].logprob
        for answer in answers
        for message, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    assert min(actual) == -np.inf and not np.isnan(actual).any()


# ---- saved forward passes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "max_tokens", "saved"),
    [
        ({"steps": 16}, 16, 0),
        ({"steps": 8}, 8, 4),  # the second block is not started
        ({"steps": 64}, 16, 48),  # steps that commit nothing are skipped
        ({"threshold": 2.0}, 16, 0),
        ({"threshold": 2.0}, 3, 1),
        ({"algorithm": "multi_block"}, 16, 0),
        ({"algorithm": "multi_block", "threshold": -1.0}, 1, 1),
    ],
)
def test_saved_forwards_are_reported(
    llada: tuple[Engine, Any], parameters: dict[str, Any], max_tokens: int, saved: int
) -> None:
    engine, _ = llada
    extra = {**BLOCKS, **parameters, "max_tokens": max_tokens, "ignore_eos": True}
    (answer,) = engine.ask(Request(random_prompt(PROMPT_LENGTH), extra))
    assert answer.report["num_forwards_saved"] == saved
    if "steps" in parameters:
        assert answer.report["num_forwards"] == parameters["steps"] - saved


def test_a_stop_string_brings_a_report(llada: tuple[Engine, Any]) -> None:
    engine, _ = llada
    ask = Request(random_prompt(PROMPT_LENGTH), {**BLOCKS, "steps": 16, "ignore_eos": True})
    (whole,) = engine.ask(ask)
    middle = len(whole.text) // 2
    stopped = Request(ask.prompt, ask.extra, {"stop": [whole.text[middle : middle + 3]]})
    (answer,) = engine.ask(stopped)
    assert answer.finish_reason == "stop"
    assert answer.report["num_forwards"] + answer.report["num_forwards_saved"] == 16


# ---- the other family; its engine starts after the first one has ended --------------------------


@pytest.mark.parametrize(
    "name", ["semi_ar", "several blocks", "dream, top_p", "penalties", "penalties, dream"]
)
def test_replay_where_logits_are_shifted(dream: tuple[Engine, Any], name: str) -> None:
    replay(*dream, {**CASES, **EDITED}[name])
