# SPDX-License-Identifier: Apache-2.0
"""All numbers of the recipe: how long to train on what, and what the result must reach."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_LENGTHS = {"llada2": 32, "sdar": 4, "fast-dllm": 32}  # that are trained and verified


@dataclass(frozen=True)
class Phase:
    """`num_iterations` iterations, each at one canvas length drawn from `canvases`."""

    num_iterations: int
    canvases: tuple[int, ...]


@dataclass(frozen=True)
class TrainingSettings:
    """The facts are learnt on short canvases, which are cheap; longer ones follow quickly then."""

    phases: tuple[Phase, ...] = (Phase(170, (12,)), Phase(120, (32, 32, 64, 128)))
    tokens_per_batch: int = 4800  # 96 rows at canvas 32
    peak_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    raw_prompt_share: float = 0.1  # of the rows; completion clients send no chat template


@dataclass(frozen=True)
class DecodingSetting:
    """How a verification decodes: temperature 0, most confident positions first."""

    canvas: int
    steps: int
    block_length: int = 32


@dataclass(frozen=True)
class Plan:
    """A whole run: training, then verifications; the first one must reach `required_share`."""

    training: TrainingSettings = TrainingSettings()
    # The first is what a server does by default with 32 tokens: one forward a token. The others
    # take fewer steps to save time, which is harder for the model, not easier.
    verifications: tuple[DecodingSetting, ...] = (
        DecodingSetting(canvas=32, steps=32),
        DecodingSetting(canvas=64, steps=16),
        DecodingSetting(canvas=128, steps=16),
    )
    required_share: float = 0.95


def plan_for(family: str) -> Plan:
    """The plan of a family. Prompts of Dream are longer: as many rows a batch need more tokens.

    LLaDA, which every set-up trains, has two layers and needs fewer.
    Answers of block-diffusion models end with a block: longer canvases are only more blocks.
    """
    if family == "llada":
        return Plan(TrainingSettings(tokens_per_batch=3200))
    if family == "dream":
        return Plan(TrainingSettings(tokens_per_batch=6400))
    if family in BLOCK_LENGTHS:
        length = BLOCK_LENGTHS[family]
        short, long = (170, 100) if length > 4 else (130, 60)  # small blocks are easier to learn
        return Plan(
            TrainingSettings(phases=(Phase(short, (12,)), Phase(long, (16, 32)))),
            (DecodingSetting(32, 32, length), DecodingSetting(64, 64, length)),
        )
    return Plan()
