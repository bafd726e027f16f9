# SPDX-License-Identifier: Apache-2.0
"""All numbers of the recipe: how long to train on what, and what the result must reach."""

from __future__ import annotations

from dataclasses import dataclass

_ITERATIONS = {  # of both phases
    "dream": (400, 650),
    "llada-moe": (200, 530),
    "llada2": (200, 460),
    "sdar": (220, 440),
    "fast-dllm": (300, 500),
    "nemotron": (220, 440),
    "llada22": (200, 460),
}
BLOCK_LENGTHS = {  # that are trained and verified
    "llada2": 32,
    "sdar": 4,
    "fast-dllm": 32,
    "nemotron": 32,
    "llada22": 32,
}
_WRONG_SHARES = {"llada22": 0.1}  # of families that replace tokens


@dataclass(frozen=True)
class Phase:
    """`num_iterations` iterations, each at one canvas length drawn from `canvases`.

    Of single questions, or of whole conversations.
    """

    num_iterations: int
    canvases: tuple[int, ...]
    only_single: bool = False


@dataclass(frozen=True)
class TrainingSettings:
    """Single questions are learnt on short canvases, which are cheap; all else follows quickly."""

    phases: tuple[Phase, ...] = (
        Phase(400, (16,), only_single=True),
        Phase(800, (16, 16, 16, 16, 32, 32, 64, 128)),
    )
    examples_per_phase: int = 30_000
    prompt_lengths_per_batch: int = 12  # of one batch differ by as many tokens at most
    tokens_per_batch: int = 1600  # 22 conversations at canvas 32
    matrix_learning_rate: float = 0.013  # of Muon, at its peak
    peak_learning_rate: float = 5e-3  # of AdamW
    warm_up_share: float = 0.1
    weight_decay: float = 0.6
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    end_weight: float = 0.2  # of end-of-text in the loss, beside 1 of every other token
    left_out: tuple[str, ...] = ()  # kinds of questions that are not taught
    max_turns: int = 3
    wrong_share: float = 0.0  # of a canvas's tokens without mask; above 0 it is predicted whole
    plain_share: float = 0.2  # of the questions; completion clients send no chat template


@dataclass(frozen=True)
class DecodingSetting:
    """How a verification decodes: temperature 0, most confident positions first.

    `num_questions` of every group are asked.
    """

    canvas: int
    steps: int
    block_length: int = 32
    num_questions: int = 80


@dataclass(frozen=True)
class Plan:
    """A whole run: training, then verifications; each group of the first must reach a share."""

    training: TrainingSettings = TrainingSettings()
    # A server takes one step per token by default. Fewer steps save time here, and are harder for the
    # model, not easier.
    verifications: tuple[DecodingSetting, ...] = (
        DecodingSetting(canvas=32, steps=16),
        DecodingSetting(canvas=64, steps=16, num_questions=8),
        DecodingSetting(canvas=128, steps=16, num_questions=4),
    )
    required_share: float = 0.95


def plan_for(family: str) -> Plan:
    """The plan of a family.

    LLaDA, which every set-up trains, knows every kind of question. The others are larger, or see
    their rows twice, clean and noised. So that each is made within two minutes of two cores, they
    know no differences and no months, and treat large numbers like other unknown things;
    block-diffusion models no countries of capitals either, and two turns only. Of each group 90 %
    must be right. Answers of block-diffusion models end with a block: longer canvases are only more
    blocks.
    """
    if family == "llada":
        return Plan()
    num_single, num_long = _ITERATIONS[family]
    single = Phase(num_single, (16,), only_single=True)
    left_out = ("difference", "month after", "month before", "large number")
    if family not in BLOCK_LENGTHS:
        phases = (single, Phase(num_long, (16, 16, 16, 16, 32, 32, 64, 128)))
        return Plan(TrainingSettings(phases, left_out=left_out), required_share=0.9)
    length = BLOCK_LENGTHS[family]
    phases = (single, Phase(num_long, (16, 16, 32)))
    return Plan(
        TrainingSettings(
            phases,
            left_out=(*left_out, "country"),
            max_turns=2,
            wrong_share=_WRONG_SHARES.get(family, 0.0),
        ),
        (DecodingSetting(32, 32, length), DecodingSetting(64, 64, length, num_questions=4)),
        required_share=0.9,
    )
