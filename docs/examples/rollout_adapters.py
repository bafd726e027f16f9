# SPDX-License-Identifier: Apache-2.0
"""Trajectories in the forms that trainers of diffusion models read.

`trajectory` is an entry of `trajectory` in an answer of /generate, of `diffusion.trajectories` on
the OpenAI routes, or `output.kv_transfer_params["dllm"]["trajectory"]` of `LLM`. Nothing is
imported: a trainer may copy the function that it needs.
"""

from __future__ import annotations

from typing import Any

Trajectory = dict[str, Any]


def dare_contract(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of contract 1 that DARE replays SDAR and LLaDA2 by.

    Ask with `complete_blocks: true`: the replay ends with the block of the answer's last token, so
    that prompt and replay are whole blocks. Step maps count from 1 in every block.
    """
    length, tokens = trajectory["stop_length"], trajectory["token_ids"]
    ends = [*trajectory["block_starts"][1:], len(tokens)]
    end = next(end for end in ends if end >= length)
    steps = trajectory["block_steps"][:end]
    if min(steps, default=1) < 1:
        raise ValueError("complete_blocks: given false; wanted true, for blocks without gaps")
    return {
        "dllm_replay_contract_version": trajectory["contract_version"],
        "dllm_replay_token_ids": tokens[:end],
        "dllm_replay_step_maps": steps,
        "dllm_stop_length": length,
        "step_maps": steps[:length],
    }


def dare_history(prompt: list[int], trajectory: Trajectory) -> list[list[int]]:
    """Return prompt and canvas before each step and after the last, as DARE's loops keep them.

    For LLaDA and Dream, whose trainer decodes by itself today.
    """
    mask_id = trajectory["parameters"]["mask_id"]
    missing = trajectory["parameters"]["gen_length"] - len(trajectory["token_ids"])
    tokens = [*trajectory["token_ids"], *[mask_id] * missing]
    steps = [*trajectory["commit_steps"], *[-1] * missing]
    return [
        [
            *prompt,
            *(t if 0 <= s <= done else mask_id for t, s in zip(tokens, steps, strict=True)),
        ]
        for done in range(trajectory["num_steps"] + 1)
    ]


def reveal_steps(trajectory: Trajectory) -> dict[str, Any]:
    """Return what NeMo-RL's dLLM fork reads: reveal steps from 0 in every block, and two columns.

    All is cut behind the last committed token. Entropies stand as the log probabilities of the mask
    token, the second column; ask with `return_entropy: true`.
    """
    steps = trajectory["block_steps"]
    end = max((i + 1 for i, step in enumerate(steps) if step >= 0), default=0)
    return {
        "token_ids": trajectory["token_ids"][:end],
        "reveal_steps": [step - 1 for step in steps[:end]],
        "logprobs": trajectory["logprobs"][:end],
        "entropies": (trajectory["entropies"] or [])[:end],
    }


def first_unmask_times(trajectory: Trajectory) -> list[int]:
    """Return the step, from 1, at which each position was first filled: TraceRL's.

    Rules that replace tokens fill a position more than once.
    """
    times = list(trajectory["commit_steps"])
    edits = trajectory["edits"]
    if edits is not None:
        mask_id = trajectory["parameters"]["mask_id"]
        placed = zip(edits["steps"], edits["positions"], edits["token_ids"], strict=True)
        for step, position, token in reversed(list(placed)):
            if 0 <= position < len(times) and token != mask_id:
                times[position] = step
    return times
