# SPDX-License-Identifier: Apache-2.0
"""All numbers of the recipe: how long to train on which lessons, and the required result."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiny_model.forms import FORM_NAMES

# Training iterations of the two phases, by family.
_ITERATIONS = {
    "dream": (400, 650),
    "llada-moe": (200, 530),
    "llada2": (200, 460),
    "sdar": (220, 440),
    "fast-dllm": (300, 500),
    "nemotron": (220, 440),
    "llada21": (240, 800),
    "llada22": (240, 1400),
    "idlm": (220, 440),
    "diffusion-gemma": (220, 440),
}
# Block lengths for training and verification, by family; for idlm the stride.
BLOCK_LENGTHS = {
    "llada2": 32,
    "sdar": 4,
    "fast-dllm": 32,
    "nemotron": 32,
    "llada21": 32,
    "llada22": 32,
    "idlm": 4,
    "diffusion-gemma": 32,
}
# Share of wrong tokens, for families that replace tokens
_WRONG_SHARES = {"llada21": 0.1, "llada22": 0.1}
_TEXT_SHARE = 0.5  # share of the blocks that are nearly whole answers, in these families
# Share of missing and added tokens, for families that insert and delete tokens
_MOVED_SHARES = {"llada22": 0.1}


@dataclass(frozen=True)
class Phase:
    """`num_iterations` training iterations, each at one canvas length drawn from `canvases`.

    The examples are single questions if `only_single`, else whole conversations.
    """

    num_iterations: int
    canvases: tuple[int, ...]
    only_single: bool = False


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training.

    Single questions are trained on short canvases, which are cheap; everything else is learnt
    quickly afterwards.
    """

    phases: tuple[Phase, ...] = (
        Phase(420, (16,), only_single=True),
        Phase(850, (16, 16, 16, 16, 32, 32, 64, 128)),
    )
    examples_per_phase: int = 30_000
    prompt_lengths_per_batch: int = 12  # largest difference of prompt lengths in a batch, in tokens
    tokens_per_batch: int = 1600  # 22 conversations at canvas 32
    matrix_learning_rate: float = 0.013  # peak learning rate of Muon
    peak_learning_rate: float = 5e-3  # peak learning rate of AdamW
    warm_up_share: float = 0.1
    weight_decay: float = 0.6
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    end_weight: float = 0.2  # weight of end-of-text in the loss; every other token has weight 1
    left_out: tuple[str, ...] = ()  # kinds of questions that are not taught
    max_turns: int = 3
    # Share of a canvas's unmasked tokens that are wrong; above 0 the whole canvas is predicted.
    wrong_share: float = 0.0
    # Share of the blocks that are answers with few masks, where tokens may be wrong
    text_share: float = 0.0
    moved_share: float = 0.0  # share of missing and added tokens in these blocks
    # Share of questions without a chat template, as completion clients send them
    plain_share: float = 0.2


@dataclass(frozen=True)
class DecodingSetting:
    """Setting of a verification: temperature 0, most confident positions first.

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
    # A server takes one step per token by default. Fewer steps save time here, and are harder for
    # the model, not easier.
    verifications: tuple[DecodingSetting, ...] = (
        DecodingSetting(canvas=32, steps=16),
        DecodingSetting(canvas=64, steps=16, num_questions=8),
        DecodingSetting(canvas=128, steps=16, num_questions=4),
    )
    # The same recipe gives 91 % to 100 % of each group on different machines.
    required_share: float = 0.9
    # JSON is harder than sentences, and its group is small.
    required_json_share: float = 0.85

    def required(self, group: str) -> float:
        """Return the share of right answers that a group must reach."""
        is_json = group == "JSON"
        return (
            min(self.required_share, self.required_json_share) if is_json else self.required_share
        )


def plan_for(family: str, wrong_share: float | None = None) -> Plan:
    """Return the plan of a family, with another share of wrong tokens if it is given."""
    plan = _plan_for(family)
    if wrong_share is None:
        return plan
    # Few such blocks, because the number of iterations is the one that masks need.
    text_share = (plan.training.text_share or 0.2) if wrong_share else 0.0
    training = replace(plan.training, wrong_share=wrong_share, text_share=text_share)
    return replace(plan, training=training)


def _plan_for(family: str) -> Plan:
    """Return the plan of a family.

    LLaDA, which every set-up trains, learns every kind of question. The other families are larger,
    or process their rows twice, clean and noised. To be made within two minutes on two cores, they
    learn no differences, no months and no JSON, and do not distinguish large numbers from other
    unknown things. LLaDA2.1 and LLaDA2.2 also learn to repair texts, which takes about ten minutes.
    Block-diffusion models also learn no countries of capitals, and only two turns. Their answers
    end with a block, so longer canvases only add blocks.
    """
    if family == "llada":
        return Plan()
    num_single, num_long = _ITERATIONS[family]
    single = Phase(num_single, (16,), only_single=True)
    left_out = ("difference", "month after", "month before", "large number", *FORM_NAMES)
    if family not in BLOCK_LENGTHS:
        phases = (single, Phase(num_long, (16, 16, 16, 16, 32, 32, 64, 128)))
        return Plan(TrainingSettings(phases, left_out=left_out))
    length = BLOCK_LENGTHS[family]
    phases = (single, Phase(num_long, (16, 16, 32)))
    return Plan(
        TrainingSettings(
            phases,
            left_out=(*left_out, "country"),
            max_turns=2,
            wrong_share=_WRONG_SHARES.get(family, 0.0),
            text_share=_TEXT_SHARE if family in _WRONG_SHARES else 0.0,
            moved_share=_MOVED_SHARES.get(family, 0.0),
        ),
        (DecodingSetting(32, 32, length), DecodingSetting(64, 64, length, num_questions=4)),
    )
