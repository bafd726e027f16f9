# SPDX-License-Identifier: Apache-2.0
"""Trajectories agree with a replay on plain networks, for every family, algorithm and option."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference

from tests import golden
from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.cases import ADABLOCK, DREAM, MULTI
from tests.engine.harness import (
    BLOCKS,
    MAX_MODEL_LEN,
    NOISY,
    Engine,
    Request,
    refusal_error,
    running,
)
from tests.programs import ROOT
from vllm.diffusion.request.algorithms import algorithms_for

sys.path.append(str(ROOT / "scripts"))
from replay_trajectory import main, replay

ASKED = {"return_trajectory": True, "return_entropy": True}
OF_LOOPS = ("moe_dense_mix", "moe_bias", "mha", "dream", "moe", "sdar", "llada2", "fast_dllm")
OF_LOOPS = (*OF_LOOPS, "diffullama")
PLAIN = {"gen_length": 48, "block_length": 16, "return_trajectory": True}
STOPS = {"stop_token_ids": list(range(0, 240, 9))}
SEVERAL = {"threshold": 1.0, "block_add_threshold": 1.0, "decoded_token_threshold": 1.0}
HOLES = [5, MASK_ID, 7, MASK_ID, MASK_ID, 9]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2}
GRID = {"gen_length": 13, "block_length": 4, "temperature": 1.0, "seed": 3}
SHORT_DREAM = {**DREAM, "gen_length": 12}
# Options that no published loop has: a prompt or its length, and parameters.
OPTIONS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "mha": [
        (9, {**NOISY, "temperature": 0.8, "top_p": 0.8, "min_p": 0.01, "top_k": 30}),
        (11, {**NOISY, **PENALTIES, "logit_bias": {"250": 2.0, "7": -5.0}}),
        (7, {**NOISY, "min_tokens": 9, "allowed_token_ids": [1, 7, 160, 250], "cfg_scale": 0.5}),
        (8, {**NOISY, "suffix_ids": [3, 4, 5], "max_tokens": 12}),
        (HOLES, {**NOISY, "allow_infill": True}),
        (6, {**MULTI, "gen_length": 16, "early_stop": True, "threshold": 2.0, "ignore_eos": False}),
        (5, {"algorithm": "local_leap", **NOISY, "early_stop": True, "ignore_eos": False}),
        (12, {**ADABLOCK, "gen_length": 16, "block_length": 8}),
        (10, {**NOISY, "structured_outputs": {"regex": "[a-c]{4}"}}),
    ],
    "dream": [
        (9, {**SHORT_DREAM, "temperature": 0.7, "top_p": 0.9, "seed": 4}),
        (HOLES, {**SHORT_DREAM, "allow_infill": True, "logits_eos_inf": True}),
        (7, {**SHORT_DREAM, **PENALTIES}),
    ],
    "sdar": [(9, GRID), (13, {**GRID, "top_p": 0.8, "complete_blocks": True, **PENALTIES})],
    "llada2": [
        (9, {**GRID, "algorithm": "joint_threshold", "threshold": 0.4, "editing_threshold": 0.2}),
    ],
    "llada22": [
        (9, {**GRID, "block_length": 8}),
        (5, {**GRID, "block_length": 8, "temperature": 0}),
    ],
    "stable_diffcoder": [
        (9, {**GRID, "top_p": 0.8}),
        (5, {**GRID, "algorithm": "semi_ar", "steps_per_block": 3, "temperature": 0}),
    ],
    "nemotron": [
        (9, {**GRID, "thinking_token_budget": 4}),
        (7, {**GRID, "algorithm": "self_speculation"}),
        (8, {**GRID, "algorithm": "autoregressive", "block_length": None}),
    ],
    "idlm": [
        (9, {**GRID, "block_length": None}),
        (7, {**GRID, "block_length": None, "stride": 2, "allowed_token_ids": [5, 6, 7]}),
        (8, {**GRID, "block_length": None, **PENALTIES, "allowed_token_ids": [5, 6, 7, 8]}),
        (6, {**GRID, "block_length": None, "acceptance": "ratio", "allowed_token_ids": [5, 6]}),
        (8, {**GRID, "algorithm": "autoregressive", "block_length": None}),
    ],
}


def of_loops(name: str) -> Iterator[tuple[Request, dict[str, Any]]]:
    """Yield requests and recorded runs whose states a plain forward pass can follow.

    For each parameter of an algorithm, the first recorded run represents all numeric values.
    """
    replayed = set[tuple[Any, ...]]()
    for key, actual in golden.STORE.runs.items():
        parameters = json.loads(key)
        is_plain = (
            parameters.get("cache", "none") == "none" and parameters.get("algorithm") != "credit"
        )
        if parameters.pop("model") != name or not is_plain or "early_stop_ids" in parameters:
            continue
        parameters.pop("first_seed", None)
        length = parameters.pop("prompt_length", 0)
        prompt = parameters.pop("prompt", None) or random_prompt(length, actual["prompt_seed"])
        kinds = {
            (parameters.get("algorithm"), name, value if isinstance(value, str | bool) else None)
            for name, value in parameters.items()
        }
        if kinds - replayed and len(prompt) + parameters["gen_length"] <= MAX_MODEL_LEN:
            replayed |= kinds
            more = {
                "ignore_eos": not parameters.get("early_stop"),
                "allow_infill": MASK_ID in prompt,
            }
            yield Request(prompt, {**more, **parameters, **ASKED}), actual


@pytest.mark.parametrize("family", OF_LOOPS)
def test_every_written_run_is_replayed(family: str, checkpoint: Callable[[str], Path]) -> None:
    """A replay gives the log probabilities, entropies, tokens and commit steps of each run."""
    folder = checkpoint(family)
    model = load_reference(folder, torch.float64)
    asks, runs = zip(*of_loops(golden.name_of(load_reference(folder))), strict=True)
    with running(folder) as engine:
        answers = engine.ask(*asks)
    for ask, answer, wanted in zip(asks, answers, runs, strict=True):
        actual = answer.report["trajectory"]
        is_grid = "answer" in wanted
        assert actual["replayable"], ask
        assert (replayed := replay(model, ask.prompt, actual, runs_loop=is_grid)).agrees, replayed
        assert replayed.num_commits or actual["filled"]
        if is_grid:
            assert replayed.differences == []
        elif wanted["is_clear"]:
            filled = set(actual["filled"])
            steps = [step + 1 for step in wanted["decided_at"]]
            for position, step in enumerate(actual["commit_steps"]):
                assert position in filled or step == steps[position], ask
            assert actual["token_ids"] == wanted["ids"]


@pytest.mark.parametrize("family", OPTIONS)
def test_options_are_replayed(family: str, checkpoint: Callable[[str], Path]) -> None:
    """A replay agrees, and samples depend neither on other requests of the batch nor on drafts."""
    model = load_reference(checkpoint(family), torch.float64)
    asks = []
    for given, parameters in OPTIONS[family]:
        prompt = random_prompt(given) if isinstance(given, int) else given
        asks.append(Request(prompt, {"ignore_eos": True, "seed": 5, **parameters, **ASKED}))
    guessing = {"num_speculative_states": 3}
    able = [family == "mha" and "structured_outputs" not in ask.extra for ask in asks]
    with running(checkpoint(family)) as engine:
        answers, again = engine.ask(*asks), []
        for ask, drafts in zip(asks, able, strict=True):
            try:
                again += engine.ask(replace(ask, extra=ask.extra | (guessing if drafts else {})))
            except refusal_error():  # the algorithm supports no drafts
                again += engine.ask(ask)
    for ask, answer, alone in zip(asks, answers, again, strict=True):
        actual, same = answer.report["trajectory"], alone.report["trajectory"]
        for name in ("token_ids", "commit_steps", "block_steps", "block_starts", "prompt"):
            assert name == "prompt" or actual[name] == same[name]
        replayed = replay(model, ask.prompt, actual, runs_loop=family == "stable_diffcoder")
        assert replayed.agrees, (ask.extra, replayed)
        for step, logprob in zip(actual["commit_steps"], actual["logprobs"], strict=True):
            assert step > 0 or logprob is None


@pytest.mark.parametrize(
    "family",
    [
        *("mha", "predicts_mask", "dream", "sdar", "llada2", "llada22", "fast_dllm", "nemotron"),
        "idlm",
    ],
)
def test_every_token_of_an_answer_has_its_step(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Tokens have a commit step with every algorithm, greedy or sampled, also at an early stop."""
    parameters = {"gen_length": 24, "block_length": 8, "return_trajectory": True}
    ways: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, STOPS),
        ({"ignore_eos": True}, {}),
        ({"max_tokens": 19}, {}),
        ({"complete_blocks": True}, STOPS),
    )
    with running(checkpoint(family)) as engine:
        asks = [
            Request(
                random_prompt(5 + number, number),
                {**parameters, **(SEVERAL if name == "multi_block" else {})}
                | {**way, "temperature": float(is_drawn), "seed": number, "algorithm": name},
                stops,
            )
            for place, (name, record) in enumerate(
                algorithms_for(engine.runner.model.family).items()
            )
            for number, (way, stops) in enumerate(ways)
            for is_drawn in ((place + number) % 2 == 1,)
            if not (record.chooses_length or (record.drafts and "complete_blocks" in way))
        ]
        answers = engine.ask(*asks)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for ask, answer in zip(asks, answers, strict=True):
        actual, own = answer.report["trajectory"], range(len(answer.token_ids))
        assert actual["token_ids"][: own.stop] == answer.token_ids, ask.extra
        assert all(actual["commit_steps"][index] > 0 for index in own), ask.extra
        has_none = {index for index in own if actual["logprobs"][index] is None}
        if ask.extra["algorithm"] != "levenshtein":  # its tokens move
            assert has_none <= {*actual["filled"]}, ask.extra


@pytest.mark.parametrize("family", ["mha", "moe"])
def test_what_an_early_stop_fills_is_recorded(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Filled tokens are recorded even if the step that ends the answer precedes the fill."""
    parameters = {**PLAIN, **SEVERAL, "algorithm": "multi_block", "early_stop": True}
    asks = [
        Request(random_prompt(5 + seed, seed), {**parameters, "logit_bias": {str(EOS_ID): bias}})
        for seed in range(4)
        for bias in (0.5, 2.0, 4.0)
    ]
    with running(checkpoint(family)) as engine:
        answers = engine.ask(*asks)
    early = [answer for answer in answers if answer.token_ids[-1] == EOS_ID]
    assert early
    for answer in early:
        actual, end = answer.report["trajectory"], len(answer.token_ids)
        assert actual["token_ids"] == [*answer.token_ids, *[EOS_ID] * (48 - end)]
        assert min(actual["commit_steps"]) > 0


def complete(actual: dict[str, Any], start: int, stop: int) -> bool:
    return MASK_ID not in actual["token_ids"][start:stop]


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("mha", {**BLOCKS, "temperature": 1.0}),
        ("dream", {**DREAM, "temperature": 1.0}),
        ("mha", {**ADABLOCK, "gen_length": 16, "block_length": 8, "temperature": 1.0}),
        ("sdar", GRID),
        ("sdar", {**GRID, "cache": "none"}),
        ("llada2", {**GRID, "algorithm": "joint_threshold", "threshold": 0.4}),
        ("fast_dllm", {**GRID, "block_length": 8, "sub_block_length": 2}),
    ],
    ids=["blocks", "whole canvas", "sized", "exact", "none", "edited", "parts of blocks"],
)
def test_blocks_are_completed(
    family: str, parameters: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    """The block of the stop token is completed, and the answer does not change."""
    model = load_reference(checkpoint(family), torch.float64)
    prompt, num_longer = random_prompt(13), 0
    asks = [
        Request(prompt, {**parameters, **ASKED, "seed": seed, "complete_blocks": completes}, STOPS)
        for seed in range(3)
        for completes in (False, True)
    ]
    with running(checkpoint(family)) as engine:
        answers = engine.ask(*asks)
        for short, whole in zip(answers[::2], answers[1::2], strict=True):
            assert whole.token_ids == short.token_ids
            assert whole.finish_reason == short.finish_reason
            before, actual = (answer.report["trajectory"] for answer in (short, whole))
            num_longer += actual["num_steps"] > before["num_steps"]
            length = actual["stop_length"]
            assert length == len(whole.token_ids)
            starts = [*actual["block_starts"], len(actual["token_ids"])]
            end = next(start for start in starts if start >= length)
            assert complete(actual, 0, end)
            if engine.runner.model.family.is_block_causal:
                assert (len(prompt) + end) % actual["block_length"] == 0
            assert actual["finish_reason"] == whole.finish_reason
            assert replay(model, prompt, actual, runs_loop=False).agrees
    # Rules with edits always end with a whole block.
    assert num_longer or actual["edits"]


def test_block_steps_count_from_the_first_step_of_their_block(engine: Engine) -> None:
    (answer,) = engine.ask(Request(random_prompt(9, 1), {**BLOCKS, **ASKED, "ignore_eos": True}))
    actual = answer.report["trajectory"]
    assert actual["block_starts"] == [0, 8, 16, 24]
    assert actual["num_steps"] >= 16  # the last step fills positions predicted as masks
    for index, (step, own) in enumerate(
        zip(actual["commit_steps"], actual["block_steps"], strict=True)
    ):
        assert own == step - 4 * (index // 8)
    assert sorted(actual["commit_steps"])[::2][:14] == list(range(1, 15))


def test_others_that_want_more_leave_and_it_stays(engine: Engine) -> None:
    """A step has the batch's maximum of logprobs per row, which falls when that request ends."""
    traced = Request(random_prompt(9, 1), {**BLOCKS, **ASKED, "ignore_eos": True})
    alone = engine.ask(traced)[0].report["trajectory"]
    shorter = {"gen_length": 8, "steps": 4, "ignore_eos": True}
    other = Request(random_prompt(7, 2), shorter, {"logprobs": 5})
    answer = engine.ask(traced, other)[0].report["trajectory"]
    assert answer["commit_steps"] == alone["commit_steps"]
    for numbers in ("logprobs", "entropies"):
        assert answer[numbers] == pytest.approx(alone[numbers], abs=1e-4)


def test_every_answer_has_its_own_and_stop_strings_end_one(engine: Engine) -> None:
    """Each answer has its own trajectory, a likelihood has none, and entropies require one."""
    parameters = {**BLOCKS, "return_trajectory": True}
    whole, cut, plain = engine.outputs(
        Request(random_prompt(6), parameters, {"detokenize": True}),
        Request(random_prompt(6), parameters, {"stop": ["Q"], "detokenize": True}),
        Request(random_prompt(6), BLOCKS),
    )
    text = whole.outputs[0].text
    assert "trajectory" not in plain.kv_transfer_params["dllm"]
    first, second = (o.kv_transfer_params["dllm"]["trajectory"] for o in (whole, cut))
    assert first["entropies"] is None and first["edits"] is None
    assert second["stop_length"] == len(cut.outputs[0].token_ids)
    assert second["finish_reason"] == cut.outputs[0].finish_reason
    assert ("Q" in text) == (second["finish_reason"] == "stop")
    with pytest.raises(refusal_error(), match="return_entropy: given True; wanted false, or"):
        engine.ask(Request([1], {"return_entropy": True}))
    score = {"positions": [0], "token_ids": [[1]]}
    with pytest.raises(refusal_error(), match="score"):
        engine.ask(Request([1], {"return_trajectory": True, "score": score}))


def test_the_script_says_whether_files_of_answers_agree(
    engine: Engine,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt, file = random_prompt(8), tmp_path / "answers.jsonl"
    cases = [{**BLOCKS, **ASKED}, {**BLOCKS, **ASKED, "cache": "dual"}]
    answers = engine.ask(*(Request(prompt, own) for own in cases))
    actual = [answer.report["trajectory"] for answer in answers]

    def run() -> int:
        lines = [json.dumps({"prompt_token_ids": prompt, "trajectory": t}) for t in actual]
        file.write_text("\n".join(lines))
        monkeypatch.setattr(sys, "argv", ["replay", str(checkpoint("mha")), str(file)])
        return main()

    assert run() == 0
    output = capsys.readouterr().out.splitlines()
    assert "log probabilities within" in output[0] and "cannot be replayed" in output[1]
    actual[0]["logprobs"][3] -= 0.01
    assert run() == 1
