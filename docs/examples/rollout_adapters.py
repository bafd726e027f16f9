# SPDX-License-Identifier: Apache-2.0
"""Convert trajectories to the input of several trainers of diffusion models.

`trajectory` is an entry of `trajectory` in an answer of /generate, of `diffusion.trajectories` on
the OpenAI routes, or `output.kv_transfer_params["dllm"]["trajectory"]` of `LLM`. The functions
depend on no package, so a trainer can copy the function that it needs.
"""

from __future__ import annotations

from typing import Any

Trajectory = dict[str, Any]


def dare_contract(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of DARE's contract 1, for replays of SDAR and LLaDA2.

    Requests must have `complete_blocks: true`. The replay ends with the block of the answer's last
    token, so that prompt and replay are whole blocks. Step maps count from 1 in every block.
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
    """Return the prompt and the canvas before each step, and after the last step.

    DARE's trainers of LLaDA and Dream decode by themselves, and record this list.
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
    """Return the columns that NeMo-RL's fork for diffusion models reads.

    All columns end with the last committed token. Reveal steps count from 0 in every block. The
    fork stores entropies as the log probabilities of the mask token. Requests must have
    `return_entropy: true`.
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
    """Return the step, from 1, that first filled each position, as TraceRL requires.

    Some decoding rules replace tokens, and so fill a position more than once.
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
