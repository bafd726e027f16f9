# SPDX-License-Identifier: Apache-2.0
"""Trajectories as clients see them: lists of numbers, with the parameters that they depend on."""

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


def trajectory_of(item: RequestState, found: Trajectory) -> dict[str, Any]:
    """Return the `trajectory` of an answer.

    Where the scheduler has not ended it, the front end may, by a stop string.
    """
    request, params = item.request, item.params
    reason = request.get_finished_reason()
    return {
        "contract_version": CONTRACT_VERSION,
        "prompt_length": found.prompt_length,
        "block_length": found.block_length,
        "block_starts": found.block_starts,
        "token_ids": found.token_ids.tolist(),
        "commit_steps": found.commit_steps.tolist(),
        "block_steps": found.block_steps.tolist(),
        "logprobs": _numbers(found.logprobs),
        "entropies": None if found.entropies is None else _numbers(found.entropies),
        "filled": found.filled,
        "edits": None if found.edits is None else _commits(found.edits),
        "prompt": _commits(found.prompt, steps="commit_steps"),
        "mask_forbidden": found.mask_forbidden,
        "stop_length": request.num_output_tokens,
        "finish_reason": "stop" if reason is None else str(reason),
        "num_steps": found.num_steps,
        "seed": params.seed,
        "weight_version": _label(item, found),
        "weight_steps": [list(span) for span in found.weight_steps],
        "parameters": parameters_of(params),
        "replayable": params.cache in ("none", "exact") and params.algorithm != "credit",
    }


def parameters_of(params: DiffusionParams) -> dict[str, Any]:
    """Return the decided parameters on which an answer depends, as JSON."""
    record = algorithms_of(is_block_causal=params.is_block_causal)[params.algorithm]
    names = (*_ALWAYS, *record.parameters)
    edits = dataclasses.asdict(params.edits or Edits())
    edits["logit_bias"] = dict(edits["logit_bias"])
    found = {name: getattr(params, name) for name in names} | edits
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in found.items()},
        "stop_ids": sorted(params.stop_ids),
        "forbidden_ids": list(params.never_ids),
        "suffix_ids": list(params.suffix_ids),
    }


def _label(item: RequestState, found: Trajectory) -> str | None:
    """Return the label of the weights that computed all steps; it stays until another is given."""
    (generation, _), *others = found.weight_steps
    return None if others else item.labels[max(g for g in item.labels if g <= generation)]


def _commits(found: Commits, steps: str = "steps") -> dict[str, Any]:
    return {
        steps: found.steps.tolist(),
        "positions": found.positions.tolist(),
        "token_ids": found.token_ids.tolist(),
        "logprobs": _numbers(found.logprobs),
    }


def _numbers(found: Array) -> list[float | None]:
    """Return numbers [N] as JSON, null for NaN and for probabilities of zero."""
    listed: list[float | None] = found.tolist()
    for index in (~np.isfinite(found)).nonzero()[0]:
        listed[index] = None
    return listed
