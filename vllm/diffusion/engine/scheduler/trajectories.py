# SPDX-License-Identifier: Apache-2.0
"""Trajectories in the clients' form: lists of numbers, and the parameters they depend on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.diffusion.request.algorithms import algorithms_of
from vllm.diffusion.request.edits import Edits

if TYPE_CHECKING:
    from vllm.diffusion.core.trajectory import Array, Commits, Trajectory
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.diffusion.request.params import DiffusionParams

CONTRACT_VERSION = 1
_ALWAYS = (
    *("algorithm", "cache", "gen_length", "max_tokens", "steps", "block_length", "remasking"),
    *("temperature", "min_p", "top_k", "top_p", "cfg_scale", "confidence_dtype"),
    *("logits_eos_inf", "confidence_eos_eot_inf", "ignore_eos", "allow_infill", "complete_blocks"),
    *("mask_id", "eos_id", "eot_id", "thinking_token_budget"),
)


def trajectory_of(item: RequestState, trajectory: Trajectory) -> dict[str, Any]:
    """Return the `trajectory` of an answer.

    If the scheduler has not ended the answer, the front end may still end it by a stop string.
    """
    request, params = item.request, item.params
    reason = request.get_finished_reason()
    return {
        "contract_version": CONTRACT_VERSION,
        "prompt_length": trajectory.prompt_length,
        "block_length": trajectory.block_length,
        "block_starts": trajectory.block_starts,
        "token_ids": trajectory.token_ids.tolist(),
        "commit_steps": trajectory.commit_steps.tolist(),
        "block_steps": trajectory.block_steps.tolist(),
        "logprobs": _numbers(trajectory.logprobs),
        "entropies": None if trajectory.entropies is None else _numbers(trajectory.entropies),
        "filled": trajectory.filled,
        "edits": None if trajectory.edits is None else _commits(trajectory.edits),
        "prompt": _commits(trajectory.prompt, steps="commit_steps"),
        "mask_forbidden": trajectory.mask_forbidden,
        "stop_length": request.num_output_tokens,
        "finish_reason": "stop" if reason is None else str(reason),
        "num_steps": trajectory.num_steps,
        "seed": params.seed,
        "weight_version": _label(item, trajectory),
        "weight_steps": [list(span) for span in trajectory.weight_steps],
        "adapter": None if request.lora_request is None else request.lora_request.lora_name,
        "adapter_steps": [list(span) for span in item.adapter_steps],
        "parameters": parameters_of(params),
        "replayable": _is_replayable(params),
    }


def _is_replayable(params: DiffusionParams) -> bool:
    """Whether the commits determine the input of every forward pass."""
    is_exact = params.cache in ("none", "exact") and params.algorithm != "credit"
    return is_exact and not params.is_open and params.revision is None


def parameters_of(params: DiffusionParams) -> dict[str, Any]:
    """Return the decided parameters on which an answer depends, as JSON."""
    record = algorithms_of(is_block_causal=params.is_block_causal)[params.algorithm]
    names = (*_ALWAYS, *record.parameters)
    edits = dataclasses.asdict(params.edits or Edits())
    edits["logit_bias"] = dict(edits["logit_bias"])
    parameters = {name: getattr(params, name) for name in names} | edits
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in parameters.items()},
        "stop_ids": sorted(params.stop_ids),
        "forbidden_ids": list(params.never_ids),
        "suffix_ids": list(params.suffix_ids),
    }


def _label(item: RequestState, trajectory: Trajectory) -> str | None:
    """Return the label of the weights that computed all steps; labels are valid until replaced.

    Returns None if the weights or the tensors of the adapter have changed during the answer.
    """
    (generation, _), *others = trajectory.weight_steps
    others += item.adapter_steps[1:]
    return None if others else item.labels[max(g for g in item.labels if g <= generation)]


def _commits(commits: Commits, steps: str = "steps") -> dict[str, Any]:
    return {
        steps: commits.steps.tolist(),
        "positions": commits.positions.tolist(),
        "token_ids": commits.token_ids.tolist(),
        "logprobs": _numbers(commits.logprobs),
    }


def _numbers(array: Array) -> list[float | None]:
    """Return numbers [N] as JSON, null for NaN and for probabilities of zero."""
    listed: list[float | None] = array.tolist()
    for index in (~np.isfinite(array)).nonzero()[0]:
        listed[index] = None
    return listed
