# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms, one record each.

Validation, lengths, caches, HTTP schemas and the table of docs/decoding.md are derived from these
records. The rules are in `vllm.diffusion.decoding`. A name may refer to one rule in full-attention
families and to another in block-causal families: each kind has its own table. `AlgorithmParams`
declares the request fields that only some algorithms use.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.values import MAX_FACTOR, MIN_TEMPERATURE, as_score, param

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.request.families import Family
    from vllm.diffusion.request.request import Request

NEVER = 10_000  # iterations; longer than any answer takes
# The schedule of dream stores a number for every step.
MAX_STEPS = 1_000_000
MIN_STRIDE, DEFAULT_STRIDE, MAX_STRIDE = 2, 4, 16
CACHES_IN_TURN = ("none", "prefix", "dual", "frozen")
GUIDED_CACHES = ("none", "frozen")  # caches that support guidance
REMASKING: tuple[str, ...] = ("low_confidence", "random")


@dataclass(frozen=True)
class Algorithm:
    """One decoding algorithm.

    Attributes:
        name: name in requests.
        rule: "module.Class" in `vllm.diffusion.decoding`.
        commits: tokens committed in each step, for documentation.
        source: number of its source in the list of docs/decoding.md.
        blocks: order in which blocks are filled: one after the other ("in turn"), several at once
            ("together"), or no blocks: the whole canvas competes ("none").
        score: criterion by which candidates are compared, for documents and checks; the rule's
            `scoring` decides which score is computed. "alg" means the request parameter `alg`.
        pace: what determines how many tokens a step commits. "steps": the number of steps. "rule":
            the rule itself; a number of steps only limits the forward passes. "rule alone": the
            rule itself; a number of steps has no meaning.
        parameters: names of the `AlgorithmParams` that it uses.
        defaults: its defaults that differ from the defaults of `AlgorithmParams`.
        shifted_defaults: defaults for families that shift their logits (Dream).
        caches: supported ways to reuse keys and values.
        random_scores: families in which a random number may replace the score (`remasking:
            random`): all, families that do not shift their logits, or none.
        draws: whether `temperature` adds noise to the choice of tokens.
        ends_short: whether the last block may be shorter than the others.
        reads_row_before: for block-causal families: True if it supports only families that shift
            their logits, whose first token of a block is predicted by the row before the block.
        edits_length: whether it requires tokens that delete and insert positions. Only such an
            algorithm may propose these tokens.
        chooses_length: whether it chooses the length of the canvas and inserts positions.
        causal_rule: its rule in families with causal context; None if it does not support them.
        text_rule: its rule for canvases that begin with a text, if it replaces tokens that it
            reads; None for other algorithms.
        drafts: for families with causal context: whether it writes tokens of a block that it may
            later reject.
        is_open: whether it is for families without a mask token, whose canvases begin as noise.
            They support no other algorithms.
        is_strict: for families with causal context: whether it is for families all of whose forward
            passes are causal, or for the other ones; None for both.
        speculates: how its next states are drafted. "chain": each state from the previous one,
            because the number of committed positions does not depend on scores. "fan": several
            states after each one, for different numbers of committed positions. "end": the state
            after the end of the block, if it ends with this step. None: not at all,
            because the algorithm keeps further state outside the rule. A wrong choice makes drafts
            useless, but never changes an answer.
    """

    name: str
    rule: str
    commits: str
    source: int
    blocks: Literal["in turn", "together", "none"] = "in turn"
    score: Literal["confidence", "entropy", "position", "alg"] = "confidence"
    pace: Literal["steps", "rule", "rule alone"] = "rule"
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shifted_defaults: Mapping[str, Any] = field(default_factory=dict)
    caches: tuple[str, ...] = CACHES_IN_TURN
    random_scores: Literal["all", "unshifted", "none"] = "none"
    draws: bool = True
    ends_short: bool = False
    reads_row_before: bool = False
    edits_length: bool = False
    chooses_length: bool = False
    causal_rule: str | None = None
    text_rule: str | None = None
    drafts: bool = False
    is_open: bool = False
    is_strict: bool | None = False
    speculates: Literal["chain", "fan", "end"] | None = "fan"

    @property
    def is_block_causal(self) -> bool:
        """Whether the algorithm is for block-causal families, whose caches are exact."""
        return "exact" in self.caches

    @property
    def moves_tokens(self) -> bool:
        """Whether tokens that are committed may move or vanish."""
        return self.edits_length or self.drafts or self.chooses_length

    @property
    def is_causal_only(self) -> bool:
        """Whether the algorithm only supports families with causal context."""
        return self.rule == self.causal_rule

    def can_score_at_random(self, *, is_shifted: bool) -> bool:
        return self.random_scores == "all" or (self.random_scores == "unshifted" and not is_shifted)


_SEVERAL_BLOCKS = (
    "threshold",
    "block_add_threshold",
    "decoded_token_threshold",
    "cache_delay_iter",
    "refresh_interval",
)

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm(
            "semi_ar",
            "semi_ar.SemiAutoregressive",
            "a fixed number of the most confident candidates of the block",
            source=1,
            pace="steps",
            random_scores="all",
            speculates="chain",
        ),
        Algorithm(
            "threshold",
            "threshold.Threshold",
            "every candidate of the block whose confidence is at least `threshold`, and always "
            "the best one",
            source=2,
            parameters=("threshold",),
            random_scores="all",
        ),
        Algorithm(
            "factor",
            "threshold.Factor",
            "the n most confident candidates of the block. n is the largest number, at least 1, "
            "for which the n-th confidence is at least 1 - `factor` / (n + 1). If only one "
            "candidate would remain, it is committed, too. `frechet_margin` replaces the "
            "condition on n",
            source=2,
            parameters=("factor", "frechet_margin"),
            random_scores="all",
        ),
        Algorithm(
            "local_leap",
            "local_leap.LocalLeap",
            "like `threshold`, but within `radius` positions of a candidate that reaches "
            "`threshold`, candidates only need to reach `relaxed_threshold`",
            source=3,
            parameters=("threshold", "relaxed_threshold", "radius", "early_stop"),
            random_scores="all",
        ),
        Algorithm(
            "entropy_threshold",
            "threshold.EntropyThreshold",
            "every candidate of the block whose distribution has an entropy below `threshold`, "
            "and always the candidate with the lowest entropy",
            source=4,
            score="entropy",
            parameters=("threshold",),
            defaults={"threshold": 0.95},
        ),
        Algorithm(
            "full_attn_multi_block",
            "full_attn_multi_block.FullAttnMultiBlock",
            "every candidate of the started blocks whose entropy is below `threshold`, and always "
            "at least one in the first unfinished block. The next block starts when the share "
            "`block_add_threshold` of the last started block is committed",
            source=4,
            blocks="together",
            score="entropy",
            parameters=_SEVERAL_BLOCKS,
            defaults={
                "threshold": 0.5,
                "block_add_threshold": 0.1,
                "decoded_token_threshold": 0.95,
            },
            shifted_defaults={"threshold": 0.4},
            caches=("none", "frozen"),
            draws=False,
            ends_short=True,
        ),
        Algorithm(
            "multi_block",
            "multi_block.MultiBlock",
            "like `full_attn_multi_block`, but at most one block starts per step. Except on Dream, "
            "the candidate with the lowest entropy of all started blocks is always committed",
            source=5,
            blocks="together",
            score="entropy",
            parameters=(*_SEVERAL_BLOCKS, "early_stop"),
            defaults={"threshold": 0.5},
            shifted_defaults={"threshold": 0.9},
            caches=("none", "delayed", "frozen"),
            random_scores="unshifted",
        ),
        Algorithm(
            "hierarchy",
            "hierarchy.Hierarchy",
            "every candidate of the block above `threshold`, and always the best candidate. Also "
            "the best candidate of each run of masked positions, if its confidence exceeds "
            "`low_threshold`",
            source=6,
            parameters=("low_threshold", "threshold"),
        ),
        Algorithm(
            "credit",
            "credit.Credit",
            "like `threshold`, with a higher confidence for tokens that were the best candidate "
            "of their position in earlier steps",
            source=6,
            parameters=("threshold",),
            speculates=None,
        ),
        Algorithm(
            "dream",
            "dream.Dream",
            "the candidates that `alg` ranks highest, anywhere on the canvas; all steps commit "
            "about the same number",
            source=7,
            blocks="none",
            score="alg",
            pace="steps",
            parameters=("alg", "alg_temp", "eps"),
            caches=("none", "frozen"),
            speculates="chain",
        ),
        Algorithm(
            "adablock",
            "adablock.AdaBlock",
            "like `threshold`, in blocks of variable length: a block ends after a token of "
            "`delimiter_ids` if its confidence is at least `delimiter_threshold`, else after "
            "`block_length` tokens",
            source=11,
            pace="rule alone",
            parameters=("threshold", "delimiter_ids", "delimiter_threshold"),
            shifted_defaults={"delimiter_threshold": 0.5},
            ends_short=True,
        ),
        Algorithm(
            "daedal",
            "daedal.Daedal",
            "every candidate of the block whose confidence exceeds `threshold`, and always the "
            "best one. The canvas begins with `initial_length` masks and grows by `expansion` "
            "masks until the model predicts enough end tokens. Later steps insert masks at "
            "positions whose confidence is below `low_threshold`",
            source=14,
            pace="rule alone",
            parameters=(
                *("threshold", "low_threshold", "initial_length", "expansion"),
                *("eos_window", "eos_threshold", "eos_expand_threshold"),
            ),
            defaults={"low_threshold": 0.1},
            caches=("none",),
            ends_short=True,
            chooses_length=True,
            speculates=None,
        ),
    )
}

# Block-causal families keep only final keys and values.
_KEPT_BLOCKS = ("exact", "none")

BLOCK_ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm(
            "low_confidence_dynamic",
            "block_quota.ConfidenceOrQuota",
            "every candidate of the block whose confidence exceeds `threshold`. If these are "
            "fewer than the quota of the step, it commits the most confident candidates up to "
            "the quota",
            source=8,
            pace="steps",
            parameters=("threshold", "steps_per_block"),
            defaults={"threshold": 0.95},
            caches=_KEPT_BLOCKS,
            causal_rule="seeded_block.SeededConfidence",
        ),
        Algorithm(
            "semi_ar",
            "block_quota.Quota",
            "the quota of the step, filled with the most confident candidates of the block",
            source=9,
            pace="steps",
            parameters=("steps_per_block",),
            caches=_KEPT_BLOCKS,
            causal_rule="seeded_block.SeededQuota",
            speculates="chain",
        ),
        Algorithm(
            "sequential",
            "block_quota.FirstMasked",
            "the quota of the step, filled with the first masked positions of the block",
            source=9,
            score="position",
            pace="steps",
            parameters=("steps_per_block",),
            caches=_KEPT_BLOCKS,
            speculates="chain",
        ),
        Algorithm(
            "entropy_bounded",
            "block_quota.EntropyBounded",
            "the candidates of the block with the lowest entropies, as long as the sum of these "
            "entropies is below `threshold`, and always the candidate with the lowest entropy",
            source=9,
            score="entropy",
            pace="rule alone",
            parameters=("threshold",),
            defaults={"threshold": 0.35},
            caches=_KEPT_BLOCKS,
        ),
        Algorithm(
            "joint_threshold",
            "joint_threshold.JointThreshold",
            "every candidate of the block whose confidence exceeds `threshold`, and at least "
            "`num_to_transfer` candidates. A step also replaces committed tokens of the block by "
            "other tokens whose confidence exceeds `editing_threshold`. The block ends when "
            "nothing is replaced, or `max_post_steps` steps after its last mask was filled",
            source=8,
            pace="rule alone",
            parameters=(
                "threshold",
                "editing_threshold",
                "max_post_steps",
                "num_to_transfer",
                "penalty_lambda",
            ),
            defaults={"threshold": 0.95},
            caches=_KEPT_BLOCKS,
            text_rule="repaired_text.RepairedText",
            speculates=None,
        ),
        Algorithm(
            "levenshtein",
            "levenshtein.Levenshtein",
            "every candidate of the block whose confidence exceeds `threshold`, and at least the "
            "quota of the step. A step also replaces committed tokens by other tokens whose "
            "confidence exceeds `editing_threshold`, deletes tokens, and inserts masks. The "
            "block ends when nothing changes, or `max_post_steps` steps after the last of its "
            "original masks was filled",
            source=12,
            pace="steps",
            parameters=("threshold", "editing_threshold", "max_post_steps", "steps_per_block"),
            defaults={"threshold": 0.5, "editing_threshold": 0.0},
            caches=_KEPT_BLOCKS,
            edits_length=True,
            text_rule="streamed_text.StreamedText",
            speculates=None,
        ),
        Algorithm(
            "hierarchy_block",
            "hierarchy_block.HierarchyBlock",
            "every candidate whose confidence exceeds `threshold` in the current part of the "
            "block (`sub_block_length` tokens), and always the best one",
            source=10,
            pace="rule alone",
            parameters=("threshold", "sub_block_length"),
            defaults={"threshold": 1.0},
            caches=_KEPT_BLOCKS,
            reads_row_before=True,
        ),
        Algorithm(
            "self_speculation",
            "self_speculation.SelfSpeculation",
            "the tokens of `autoregressive`, in fewer forward passes. Denoising drafts a block: "
            "each pass fills every candidate whose confidence reaches `threshold`. Then one causal "
            "pass verifies the draft, and commits the verified tokens and the token after them",
            source=13,
            pace="rule alone",
            parameters=("threshold",),
            defaults={"threshold": 0.0},
            caches=_KEPT_BLOCKS,
            causal_rule="self_speculation.SelfSpeculation",
            drafts=True,
            speculates=None,
        ),
        Algorithm(
            "autoregressive",
            "self_speculation.Autoregressive",
            "the next token",
            source=13,
            blocks="none",
            pace="rule alone",
            caches=_KEPT_BLOCKS,
            causal_rule="self_speculation.Autoregressive",
            is_strict=None,
            speculates=None,
        ),
        Algorithm(
            "introspective",
            "introspective.Introspective",
            "the tokens of `autoregressive`, in fewer forward passes. Each pass verifies the "
            "drafts of the previous pass, and drafts the next `stride` - 1 tokens. It commits all "
            "drafts before the first wrong draft, and the token after them",
            source=16,
            blocks="none",
            pace="rule alone",
            parameters=("stride", "acceptance", "draft_branches"),
            caches=_KEPT_BLOCKS,
            causal_rule="introspective.Introspective",
            drafts=True,
            is_strict=True,
            speculates=None,
        ),
        Algorithm(
            "entropy_bound",
            "entropy_bound.EntropyBound",
            "the whole canvas, as soon as its most likely tokens stay the same for "
            "`stability_threshold` steps and their mean entropy is below `confidence_threshold`, "
            "or after `steps_per_block` steps. Each earlier step samples all tokens, keeps the "
            "tokens with the lowest entropies (`entropy_bound` limits their sum), and replaces "
            "all other tokens by noise",
            source=15,
            score="entropy",
            pace="steps",
            parameters=(
                *("steps_per_block", "t_min", "t_max", "entropy_bound", "stability_threshold"),
                "confidence_threshold",
            ),
            caches=_KEPT_BLOCKS,
            causal_rule="entropy_bound.EntropyBound",
            is_open=True,
            speculates="end",
        ),
    )
}


ALL_ALGORITHMS = (*ALGORITHMS.values(), *BLOCK_ALGORITHMS.values())
# Names in requests: a kind of remasking refers to an algorithm of the served model.
ALGORITHM_NAMES = tuple(dict.fromkeys((*ALGORITHMS, *BLOCK_ALGORITHMS, *REMASKING)))
CACHES = tuple(dict.fromkeys(cache for a in ALL_ALGORITHMS for cache in a.caches))


def algorithms_of(*, is_block_causal: bool) -> Mapping[str, Algorithm]:
    """Return the algorithms of block-causal or of full-attention families, by name."""
    return BLOCK_ALGORITHMS if is_block_causal else ALGORITHMS


def algorithms_for(family: Family) -> dict[str, Algorithm]:
    """Return the algorithms that are available to requests for a model of a family."""
    table = algorithms_of(is_block_causal=family.is_block_causal)
    is_shifted = family.logit_shift > 0
    if family.has_causal_context:
        causal = {name: a for name, a in table.items() if a.causal_rule is not None}
        causal = {name: a for name, a in causal.items() if a.is_open == family.is_open}
        kinds = (None, family.is_strictly_causal)
        causal = {name: a for name, a in causal.items() if a.is_strict in kinds}
        return {
            name: a if a.is_open else dataclasses.replace(a, speculates=None)
            for name, a in causal.items()
        }
    return {
        name: algorithm
        for name, algorithm in table.items()
        if (not family.is_block_causal or algorithm.reads_row_before == is_shifted)
        and (family.edit_tokens or not algorithm.edits_length)
        and not algorithm.is_causal_only
    }


def _score_threshold(value: float, request: Request) -> float:
    """Round a threshold in the same way as the scores that are compared with it."""
    if request.values["confidence_dtype"] != "logits":
        return value
    return as_score(value, request.model.dtype)


def _early_stop(value: bool, request: Request) -> bool:
    if request.values["ignore_eos"] or request.model.ids.eos is None:
        return False
    # early_stop would end the whole canvas at once, including the suffix and a given text.
    return value and not request.values["suffix_ids"] and request.revision is None


def _frechet_margin(margin: float | None, request: Request) -> float | None:
    if margin is not None and "factor" in request.given:
        wanted = "wanted factor or frechet_margin, not both"
        raise InvalidParameterError("frechet_margin", margin, wanted)
    return margin


def _sub_block_length(length: int, request: Request) -> int:
    """Return a divisor of the block length; replace an unsuitable default by the whole block."""
    name, block_length = "sub_block_length", request.lengths.block_length
    if block_length % length == 0 or name not in request.algorithm.parameters:
        return length
    if name in request.given:
        wanted = f"wanted a divisor of block_length, {block_length}"
        raise InvalidParameterError(name, length, wanted)
    return block_length


def stride_of(request: Request) -> int:
    """Return the given stride, or that of the checkpoint if it is supported.

    config.json has the number of masks, which is one less.
    """
    given: int | None = request.values["stride"]
    checkpoints = (request.model.block_length or 0) + 1
    return given or (checkpoints if MIN_STRIDE <= checkpoints <= MAX_STRIDE else DEFAULT_STRIDE)


def _stride(_: int | None, request: Request) -> int | None:
    return stride_of(request) if "stride" in request.algorithm.parameters else None


def _draft_branches(branches: str, request: Request) -> str:
    # The distributions of drafts in branches are not kept.
    is_plain = request.values["acceptance"] == "coupled" or request.values["temperature"] == 0
    is_used = "draft_branches" in request.algorithm.parameters
    is_plain &= not {"predicted_text", "predicted_token_ids"} & request.given.keys()
    return branches if is_plain and is_used else "last"


def _delimiter_ids(ids: tuple[int, ...] | None, request: Request) -> tuple[int, ...]:
    model = request.model
    if ids is None:
        return model.ids.line_ends
    if max(ids) >= model.vocab_size:
        wanted = f"wanted token ids from 0 to {model.vocab_size - 1}"
        raise InvalidParameterError("delimiter_ids", ids, wanted)
    return tuple(dict.fromkeys(ids))


def _t_max(t_max: float, request: Request) -> float:
    t_min = request.values["t_min"]
    if request.algorithm.is_open and t_max <= t_min:
        raise InvalidParameterError("t_max", t_max, f"wanted more than t_min, {t_min:g}")
    return t_max


# A server may set every field of single algorithms.
algorithm_param = partial(param, server_wide=True)


@dataclass(frozen=True, kw_only=True)
class AlgorithmParams:
    """Fields that only the algorithms use whose records list them in `parameters`.

    Attributes:
        steps_per_block: None if the algorithm has no steps.
        stride: None if the algorithm has none.
    """

    threshold: float = algorithm_param(
        "lowest confidence at which a candidate is committed. entropy_threshold, "
        "full_attn_multi_block and multi_block: the highest entropy. entropy_bounded: the "
        "highest sum of entropies. Some families have another default",
        default=0.9,
        resolve=_score_threshold,
    )
    factor: float = algorithm_param(
        "factor: the n most confident candidates are committed. n is the largest number for "
        "which the n-th confidence is at least 1 - factor / (n + 1)",
        default=1.0,
        minimum=0,
    )
    frechet_margin: float | None = algorithm_param(
        "factor: replaces `factor`. The n most confident candidates are committed. n is the "
        "largest number for which L - U > frechet_margin; L is the sum of the n confidences "
        "minus n - 1, and U is 1 minus the n-th confidence",
        default_text="none: factor decides",
        minimum=0,
        maximum=1,
        resolve=_frechet_margin,
    )
    relaxed_threshold: float = algorithm_param(
        "local_leap: the threshold for candidates within `radius` positions of a candidate that "
        "reaches `threshold`",
        default=0.75,
        resolve=_score_threshold,
    )
    radius: int = algorithm_param(
        "local_leap: distance in tokens within which `relaxed_threshold` applies",
        default=4,
        minimum=0,
    )
    low_threshold: float = algorithm_param(
        "hierarchy: the best candidate of each run of masked positions is committed if its "
        "confidence is above this value. daedal: masks may be inserted at a position whose "
        "confidence is below this value",
        default=0.4,
        resolve=_score_threshold,
    )
    block_add_threshold: float = algorithm_param(
        "share of the last started block that must be committed before the next block starts",
        default=0.5,
        aliases=("block_add",),
    )
    decoded_token_threshold: float = algorithm_param(
        "share of a block that must be committed before the next block may become the block that "
        "gets at least one token in every step. This is always the first unfinished block, so "
        "values up to 1 do not change the answer",
        default=0.5,
        aliases=("decoded_thresh",),
    )
    cache_delay_iter: int = algorithm_param(
        "cache: delayed: number of steps from the completion of a block until its keys and "
        f"values are cached. multi_block: a value below {NEVER} selects cache: delayed. "
        "full_attn_multi_block accepts the field and caches nothing",
        default=NEVER,
        minimum=0,
        neutral=(NEVER,),
    )
    refresh_interval: int = algorithm_param(
        "cache: delayed: number of steps after which the whole sequence is computed again. "
        "full_attn_multi_block accepts the field and computes the whole sequence in every step",
        default=NEVER,
        minimum=1,
        neutral=(NEVER,),
    )
    early_stop: bool = algorithm_param(
        "multi_block: every step fills all positions after the first end-of-sequence token with "
        "this token. local_leap: the answer ends after a block that contains an end-of-sequence "
        "token",
        default=False,
        neutral=(False,),
        needs=("eos",),
        resolve=_early_stop,
    )
    alg: str = algorithm_param(
        "dream: score of a candidate: its negative entropy (entropy), its probability "
        "(maskgit_plus), the difference of the two highest probabilities (topk_margin), or no "
        "score, which takes random positions (origin)",
        default="entropy",
        choices=("entropy", "maskgit_plus", "topk_margin", "origin"),
    )
    alg_temp: float = algorithm_param(
        "dream: temperature at which positions are sampled by their scores; 0 takes the "
        "positions with the highest scores",
        default=0.0,
        minimum=0,
        neutral=(0.0,),
    )
    eps: float = algorithm_param(
        "dream: the noise level falls from 1 to this value in equal steps. A step from level t "
        "to level s commits the share 1 - s / t of the masked positions",
        default=1e-3,
        minimum=0,
        maximum=1,
    )
    steps_per_block: int | None = algorithm_param(
        "block-causal families: number of denoising steps per block. It has the same effect as "
        "`steps` divided by the number of blocks, ceil(gen_length / block_length)",
        default_text="one per token of the block",
        minimum=1,
        maximum=MAX_STEPS,
        resolve=lambda _, r: r.lengths.steps_per_block,
    )
    editing_threshold: float = algorithm_param(
        "joint_threshold, levenshtein: confidence above which another token replaces a committed "
        "token. 0 replaces a token whenever another token is more likely",
        default=0.9,
        resolve=_score_threshold,
    )
    max_post_steps: int = algorithm_param(
        "joint_threshold, levenshtein: maximum number of steps of a block after its last mask is "
        "filled",
        default=16,
        minimum=0,
    )
    num_to_transfer: int = algorithm_param(
        "joint_threshold: minimum number of masks that a step fills, even if fewer candidates "
        "reach `threshold`",
        default=1,
        minimum=1,
    )
    penalty_lambda: float = algorithm_param(
        "joint_threshold: penalty against repetitions. At every position it is subtracted from "
        "the logit of the token that is immediately before the position",
        default=0.0,
        minimum=0,
    )
    sub_block_length: int = algorithm_param(
        "hierarchy_block: tokens per part of a block; parts are filled from left to right. It "
        "must divide block_length",
        default=8,
        minimum=1,
        resolve=_sub_block_length,
    )
    delimiter_ids: tuple[int, ...] = algorithm_param(
        "adablock: token ids after which a block may end",
        default_text="line ends of the tokenizer",
        resolve=_delimiter_ids,
    )
    delimiter_threshold: float = algorithm_param(
        "adablock: lowest confidence at which a block ends after a delimiter",
        default=0.3,
        resolve=_score_threshold,
    )
    t_min: float = algorithm_param(
        "entropy_bound: the temperature of the logits falls in equal steps from t_max towards "
        "this value, without reaching it",
        default=0.4,
        minimum=0,
    )
    t_max: float = algorithm_param(
        "entropy_bound: temperature of the logits in the first step of a canvas; must be above "
        "`t_min`",
        default=0.8,
        minimum=MIN_TEMPERATURE,
        maximum=MAX_FACTOR,
        resolve=_t_max,
    )
    entropy_bound: float = algorithm_param(
        "entropy_bound: a step keeps a sampled token if the entropies of all positions with a "
        "lower entropy sum to at most this value",
        default=0.1,
        minimum=1e-9,
    )
    stability_threshold: int = algorithm_param(
        "entropy_bound: a canvas ends early only if its most likely tokens are the same as in "
        "this number of previous steps",
        default=1,
        minimum=0,
    )
    confidence_threshold: float = algorithm_param(
        "entropy_bound: a canvas ends early only if its mean entropy is below this value; with 0 "
        "it never does",
        default=0.005,
        minimum=0,
    )
    initial_length: int = algorithm_param(
        "daedal: length of the first canvas in tokens, unless gen_length is given",
        default=64,
        minimum=1,
    )
    expansion: int = algorithm_param(
        "daedal: number of masks by which the first canvas grows at a time, and number of masks "
        "that replace an uncertain position",
        default=8,
        minimum=1,
    )
    eos_window: int = algorithm_param(
        "daedal: number of end tokens at which the certainty of the end is 1. When the first "
        "canvas has its length, eos_window / 2 end tokens are added",
        default=32,
        minimum=1,
    )
    eos_threshold: float = algorithm_param(
        "daedal: the first canvas grows until the certainty of the end reaches this value",
        default=0.5,
        minimum=0,
    )
    eos_expand_threshold: float = algorithm_param(
        "daedal: masks may be inserted while the certainty of the end is below this value",
        default=0.9,
        minimum=0,
    )
    stride: int | None = algorithm_param(
        "introspective: maximum number of tokens that a forward pass commits; the pass drafts "
        "stride - 1 tokens. This changes the speed but not the answer, except with acceptance: "
        "ratio",
        default_text=f"block_size of config.json plus 1, else {DEFAULT_STRIDE}",
        minimum=MIN_STRIDE,
        maximum=MAX_STRIDE,
        resolve=_stride,
    )
    acceptance: str = algorithm_param(
        "introspective: when a draft is accepted. coupled: if autoregressive samples the same "
        "token with the same seed, so the answer is the same. ratio: with a probability that "
        "keeps the distribution of autoregressive",
        default="coupled",
        choices=("coupled", "ratio"),
    )
    draft_branches: str = algorithm_param(
        "introspective: where a forward pass drafts. last: only after the last draft. all: after "
        "every draft, in steps of at most 128 rows. This changes the speed but not the answer",
        default="last",
        choices=("last", "all"),
        resolve=_draft_branches,
    )
