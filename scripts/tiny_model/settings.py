# SPDX-License-Identifier: Apache-2.0
"""All numbers of the recipe: how long to train on what, and what the result must reach."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_LENGTHS = {"llada2": 32, "sdar": 4, "fast-dllm": 32}  # that are trained and verified


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
        Phase(450, (16,), only_single=True),
        Phase(800, (16, 16, 16, 16, 32, 32, 64, 128)),
    )
    examples_per_phase: int = 12_000
    prompt_lengths_per_batch: int = 12  # of one batch differ by as many tokens at most
    tokens_per_batch: int = 1600  # 22 conversations at canvas 32
    matrix_learning_rate: float = 0.02  # of Muon, at its peak
    peak_learning_rate: float = 7e-3  # of AdamW
    warm_up_share: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    end_weight: float = 0.2  # of end-of-text in the loss, beside 1 of every other token
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
    # The first is what a server does by default with 32 tokens: one forward a token. The others
    # take fewer steps to save time, which is harder for the model, not easier.
    verifications: tuple[DecodingSetting, ...] = (
        DecodingSetting(canvas=32, steps=32),
        DecodingSetting(canvas=64, steps=16, num_questions=16),
        DecodingSetting(canvas=128, steps=16, num_questions=8),
    )
    required_share: float = 0.95


def plan_for(family: str) -> Plan:
    """The plan of a family. Prompts of Dream are longer: as many rows a batch need more tokens.

    Answers of block-diffusion models end with a block: longer canvases are only more blocks.
    """
    if family in BLOCK_LENGTHS:
        length = BLOCK_LENGTHS[family]
        return Plan(
            TrainingSettings(
                phases=(Phase(500, (16,), only_single=True), Phase(500, (16, 16, 32)))
            ),
            (DecodingSetting(32, 32, length), DecodingSetting(64, 64, length, num_questions=8)),
        )
    return Plan()
