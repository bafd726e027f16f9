# SPDX-License-Identifier: Apache-2.0
"""Trajectories in the formats that trainers read (docs/examples/rollout_adapters.py)."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.models import load_reference

from tests import golden
from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import BLOCKS, Request, running
from tests.programs import ROOT

ADAPTERS: Any = runpy.run_path(str(ROOT / "docs" / "examples" / "rollout_adapters.py"))
ASKED = {"return_trajectory": True, "return_entropy": True}
GRID = {"gen_length": 29, "block_length": 8, "temperature": 1.0, **ASKED}
STOPS = {"stop_token_ids": list(range(0, 240, 9))}


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_dares_contract(family: str, checkpoint: Callable[[str], Path]) -> None:
    """DARE gets whole blocks after any prompt, steps counted from 1, and the answer's length."""
    prompts = [random_prompt(length) for length in (5, 8, 13)]
    with running(checkpoint(family)) as engine:
        asks = [Request(p, {**GRID, "seed": 2, "complete_blocks": True}, STOPS) for p in prompts]
        answers = engine.ask(*asks)
        (cut,) = engine.ask(Request(prompts[0], {**GRID, "seed": 2}, STOPS))
    for prompt, answer in zip(prompts, answers, strict=True):
        actual = ADAPTERS["dare_contract"](answer.report["trajectory"])
        replayed, steps = actual["dllm_replay_token_ids"], actual["dllm_replay_step_maps"]
        assert (len(prompt) + len(replayed)) % 8 == 0
        assert len(replayed) - actual["dllm_stop_length"] < 8
        assert replayed[: actual["dllm_stop_length"]] == answer.token_ids
        assert MASK_ID not in replayed and min(steps) >= 1 and len(steps) == len(replayed)
        assert actual["step_maps"] == steps[: len(answer.token_ids)]
        assert actual["dllm_replay_contract_version"] == 1
    if -1 in cut.report["trajectory"]["commit_steps"]:
        with pytest.raises(ValueError, match="complete_blocks: given false; wanted true"):
            ADAPTERS["dare_contract"](cut.report["trajectory"])


def test_histories_and_times(checkpoint: Callable[[str], Path]) -> None:
    """Histories are the states of the published loop."""
    prompt = random_prompt(20, 3)
    model = load_reference(checkpoint("mha"))
    decoded = golden.reference(model, prompt, **BLOCKS)
    with running(checkpoint("mha")) as engine:
        (answer,) = engine.ask(Request(prompt, {**BLOCKS, **ASKED, "ignore_eos": True}))
    actual = answer.report["trajectory"]
    states = ADAPTERS["dare_history"](prompt, actual)
    assert [tuple(state) for state in states[:-1]] == [step.row for step in decoded.trace]
    assert states[-1] == [*prompt, *decoded.ids]
    revealed = ADAPTERS["reveal_steps"](actual)
    assert revealed["reveal_steps"] == [step - 1 for step in actual["block_steps"]]
    assert len(revealed["entropies"]) == len(revealed["logprobs"]) == 32
    assert ADAPTERS["first_unmask_times"](actual) == actual["commit_steps"]


def test_first_times_of_a_rule_that_edits(checkpoint: Callable[[str], Path]) -> None:
    parameters = {**GRID, "temperature": 0.0, "algorithm": "joint_threshold", "threshold": 0.3}
    with running(checkpoint("llada2")) as engine:
        (answer,) = engine.ask(Request(random_prompt(9), {**parameters, "editing_threshold": 0.1}))
    actual = answer.report["trajectory"]
    times = ADAPTERS["first_unmask_times"](actual)
    assert all(0 < first <= last for first, last in zip(times, actual["commit_steps"], strict=True))
    assert times != actual["commit_steps"]
