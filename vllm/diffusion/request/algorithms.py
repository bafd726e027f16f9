# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms, one record each.

Validation, lengths, caches, HTTP schemas and the table of docs/decoding.md follow from these
records; their rules are in `vllm.diffusion.decoding`. A name may mean one rule on full-attention
families and another on block-causal ones: each kind has its own table. A parameter that only some
algorithms use is declared here as well, with its range and its type.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vllm.diffusion.request.values import Field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.diffusion.request.families import Family

NEVER = 10_000  # iterations: longer than any answer takes
MAX_STEPS = 1_000_000  # dream's schedule has a number for every step
CACHES_IN_TURN = ("none", "prefix", "dual", "frozen")
GUIDED_CACHES = ("none", "frozen")  # those that guidance may stand beside


@dataclass(frozen=True)
class Algorithm:
    """One decoding algorithm.

    Attributes:
        name: name in requests.
        rule: "module.Class" in `vllm.diffusion.decoding`.
        commits: tokens committed in each step, for documentation.
        source: number of its source in the list of docs/decoding.md.
        blocks: filled one after the other ("in turn"), several at once ("together"), or none: all
            of the canvas competes.
        score: criterion by which candidates are compared; "alg": as the parameter of that name
            gives.
        pace: what determines how many are committed: the number of steps; or the rule itself, where
            a number of steps is only a bound on the forwards ("rule"), or has no meaning ("rule
            alone").
        parameters: the `PARAMETERS` that it uses.
        defaults: its defaults where they differ from those of `PARAMETERS`.
        shifted_defaults: defaults for families that shift their logits (Dream).
        caches: kinds of reuse of keys and values that it allows.
        random_scores: families in which a random number may replace the score (`remasking:
            random`): all, those that do not shift their logits, or none.
        draws: whether `temperature` adds noise to the choice of tokens.
        ends_short: whether the last block may be shorter than the others.
        reads_row_before: in block-causal families: whether it is for those that shift their logits,
            whose block begins with a token that the row before it predicts.
        edits_length: whether it is for families with tokens that delete and insert, which it alone
            may propose.
        causal_rule: its rule in families whose context is causal; None where it is not for them.
        drafts: in those families: whether it writes tokens of a block and takes some back.
        speculates: how its next states are drafted: one from another, as the number of positions
            that a step commits does not depend on scores ("chain"), or several of each, by that
            number ("fan"); None where its state is not the rule's alone.
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
    causal_rule: str | None = None
    drafts: bool = False
    speculates: Literal["chain", "fan"] | None = "fan"

    @property
    def is_block_causal(self) -> bool:
        """Whether it is for block-causal families, whose caches are exact."""
        return "exact" in self.caches

    @property
    def is_causal_only(self) -> bool:
        """Whether it is for no other families than those whose context is causal."""
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
            "a fixed number of the most confident candidates, block after block",
            source=1,
            pace="steps",
            random_scores="all",
            speculates="chain",
        ),
        Algorithm(
            "threshold",
            "threshold.Threshold",
            "every candidate of the block whose confidence reaches `threshold`, and always the "
            "best one",
            source=2,
            parameters=("threshold",),
            random_scores="all",
        ),
        Algorithm(
            "factor",
            "threshold.Factor",
            "the n best candidates, n as large as the n-th best confidence stays at or above "
            "1 - `factor` / (n + 1)",
            source=2,
            parameters=("factor",),
            random_scores="all",
        ),
        Algorithm(
            "local_leap",
            "local_leap.LocalLeap",
            "as `threshold`, but `relaxed_threshold` suffices within `radius` positions of a "
            "candidate that reaches `threshold`",
            source=3,
            parameters=("threshold", "relaxed_threshold", "radius", "early_stop"),
            random_scores="all",
        ),
        Algorithm(
            "entropy_threshold",
            "threshold.EntropyThreshold",
            "every candidate of the block whose distribution has an entropy below `threshold`, "
            "and always the lowest",
            source=4,
            score="entropy",
            parameters=("threshold",),
            defaults={"threshold": 0.95},
        ),
        Algorithm(
            "full_attn_multi_block",
            "full_attn_multi_block.FullAttnMultiBlock",
            "candidates of several blocks at once whose entropy is below `threshold`; a block "
            "starts when `block_add_threshold` of the one before is decoded, and is sure of one "
            "commit a step from `decoded_token_threshold` on",
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
            "the same idea with one commit a step guaranteed over all blocks (on Dream: in the "
            "first unfinished block), and with the delayed cache",
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
            "the best candidate of each run of masked positions if its confidence exceeds "
            "`low_threshold`, every candidate above `threshold`, and always the best one",
            source=6,
            parameters=("low_threshold", "threshold"),
        ),
        Algorithm(
            "credit",
            "credit.Credit",
            "as `threshold`, with confidences raised for tokens that were the best candidate of "
            "their position in the steps before",
            source=6,
            parameters=("threshold",),
            speculates=None,
        ),
        Algorithm(
            "dream",
            "dream.Dream",
            "as many candidates of the whole canvas as a schedule of noise levels says, chosen by "
            "`alg`",
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
            "as `threshold`, in blocks that end after a line or another delimiter, where the model "
            "is sure of one (`delimiter_ids`, `delimiter_threshold`), else after `block_length`",
            source=11,
            pace="rule alone",
            parameters=("threshold", "delimiter_ids", "delimiter_threshold"),
            shifted_defaults={"delimiter_threshold": 0.5},
            ends_short=True,
        ),
    )
}

_KEPT_BLOCKS = ("exact", "none")  # caches of block-causal families: what is kept is final

BLOCK_ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm(
            "low_confidence_dynamic",
            "block_quota.ConfidenceOrQuota",
            "every candidate of the block whose confidence exceeds `threshold` if they are as many "
            "as the quota of the step, else the most confident as many",
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
            "the quota of the step: the most confident candidates of the block",
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
            "the quota of the step: the first masked positions of the block",
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
            "the lowest entropies of the block as long as their sum stays below `threshold`, and "
            "always the lowest",
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
            "every candidate of the block whose confidence exceeds `threshold`, at least "
            "`num_to_transfer`; and committed tokens of the block are replaced by others whose "
            "confidence exceeds `editing_threshold`, until none is or `max_post_steps` have passed "
            "since the last mask was filled",
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
            speculates=None,
        ),
        Algorithm(
            "levenshtein",
            "levenshtein.Levenshtein",
            "every candidate of the block whose confidence exceeds `threshold`, at least the quota "
            "of the step; and committed tokens of the block are replaced where another exceeds "
            "`editing_threshold`, deleted, or moved to insert one, until nothing changes or "
            "`max_post_steps` have passed since the last of the first masks was filled",
            source=12,
            pace="steps",
            parameters=("threshold", "editing_threshold", "max_post_steps", "steps_per_block"),
            defaults={"threshold": 0.5, "editing_threshold": 0.0},
            caches=_KEPT_BLOCKS,
            edits_length=True,
            speculates=None,
        ),
        Algorithm(
            "hierarchy_block",
            "hierarchy_block.HierarchyBlock",
            "every candidate of a part of the block, `sub_block_length` tokens, whose confidence "
            "exceeds `threshold`, and always the best one",
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
            "the answer of `autoregressive`, in fewer forwards: a block is drafted, in a forward "
            "every candidate whose confidence reaches `threshold`; what a causal forward confirms "
            "is committed, and the token that follows",
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
            "the token that follows those so far",
            source=13,
            blocks="none",
            pace="rule alone",
            caches=_KEPT_BLOCKS,
            causal_rule="self_speculation.Autoregressive",
            speculates=None,
        ),
    )
}


def algorithms_of(*, is_block_causal: bool) -> Mapping[str, Algorithm]:
    """Return the algorithms of a kind of family, by name."""
    return BLOCK_ALGORITHMS if is_block_causal else ALGORITHMS


def algorithms_for(family: Family) -> dict[str, Algorithm]:
    """Return the algorithms that requests to a model of a family may name."""
    table = algorithms_of(is_block_causal=family.is_block_causal)
    is_shifted = family.logit_shift > 0
    if family.has_causal_context:
        own = {name: a for name, a in table.items() if a.causal_rule is not None}
        return {name: dataclasses.replace(a, speculates=None) for name, a in own.items()}
    return {
        name: algorithm
        for name, algorithm in table.items()
        if (not family.is_block_causal or algorithm.reads_row_before == is_shifted)
        and (family.edit_tokens or not algorithm.edits_length)
        and not algorithm.is_causal_only
    }


@dataclass(frozen=True, kw_only=True)
class AlgorithmParams:
    """Values of `PARAMETERS` in a request.

    `steps_per_block` is None where the algorithm has no steps.
    """

    threshold: float
    factor: float
    relaxed_threshold: float
    radius: int
    low_threshold: float
    block_add_threshold: float
    decoded_token_threshold: float
    cache_delay_iter: int
    refresh_interval: int
    early_stop: bool
    alg: str
    alg_temp: float
    eps: float
    steps_per_block: int | None
    editing_threshold: float
    max_post_steps: int
    num_to_transfer: int
    penalty_lambda: float
    sub_block_length: int
    delimiter_ids: tuple[int, ...]
    delimiter_threshold: float


def users(uses: Callable[[Algorithm], bool]) -> dict[str, Any]:
    """Return the algorithms whose records satisfy `uses`, as attributes of a `Field`."""
    tables = {"algorithms": ALGORITHMS, "block_algorithms": BLOCK_ALGORITHMS}
    return {
        attribute: tuple(name for name, algorithm in table.items() if uses(algorithm))
        for attribute, table in tables.items()
    }


def _of_algorithms(spec: Field) -> Field:
    """Return `spec` completed from the algorithms' records."""
    records = (*ALGORITHMS.values(), *BLOCK_ALGORITHMS.values())
    return dataclasses.replace(
        spec,
        defaults=_named(spec.name, {a.name: a.defaults for a in records}),
        shifted_defaults=_named(spec.name, {a.name: a.shifted_defaults for a in records}),
        **users(lambda a: spec.name in a.parameters),
    )


def _named(name: str, defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {algorithm: own[name] for algorithm, own in defaults.items() if name in own}


PARAMETERS: tuple[Field, ...] = tuple(
    _of_algorithms(spec)
    for spec in (
        Field(
            "threshold",
            float,
            "confidence from which a candidate is committed, or entropy up to which "
            "(entropy_threshold, full_attn_multi_block, multi_block), or sum of the entropies "
            "(entropy_bounded)",
            default=0.9,
            server_wide=True,
        ),
        Field(
            "factor",
            float,
            "n candidates are committed while the n-th best reaches 1 - factor / (n + 1)",
            default=1.0,
            minimum=0,
            server_wide=True,
        ),
        Field(
            "relaxed_threshold",
            float,
            "threshold of candidates near one that reaches `threshold`",
            default=0.75,
            server_wide=True,
        ),
        Field("radius", int, "how many positions are near", default=4, minimum=0, server_wide=True),
        Field(
            "low_threshold",
            float,
            "confidence above which the best of each run of masked positions is committed",
            default=0.4,
            server_wide=True,
        ),
        Field(
            "block_add_threshold",
            float,
            "share of the last block that must be decoded before the next one starts",
            default=0.5,
            aliases=("block_add",),
            server_wide=True,
        ),
        Field(
            "decoded_token_threshold",
            float,
            "share of a block that must be decoded before the next one gets a token in every step",
            default=0.5,
            aliases=("decoded_thresh",),
            server_wide=True,
        ),
        Field(
            "cache_delay_iter",
            int,
            "steps after its completion at which a block's keys and values are kept; below "
            f"{NEVER} it chooses cache: delayed for multi_block (full_attn_multi_block accepts it "
            "and keeps nothing)",
            default=NEVER,
            minimum=0,
            neutral=(NEVER,),
            server_wide=True,
        ),
        Field(
            "refresh_interval",
            int,
            "with cache: delayed, every such step computes the whole sequence again "
            "(full_attn_multi_block accepts it and always does)",
            default=NEVER,
            minimum=1,
            neutral=(NEVER,),
            server_wide=True,
        ),
        Field(
            "early_stop",
            bool,
            "multi_block: fill everything after the first end-of-sequence token with it in every "
            "step; local_leap: end after a block that holds one",
            default=False,
            neutral=(False,),
            server_wide=True,
        ),
        Field(
            "alg",
            str,
            "dream: score of a candidate (probability, difference of the two best, negative "
            "entropy), or origin: positions at random",
            default="entropy",
            choices=("entropy", "maskgit_plus", "topk_margin", "origin"),
            server_wide=True,
        ),
        Field(
            "alg_temp",
            float,
            "dream: draw the positions by their scores at this temperature; 0 takes the best",
            default=0.0,
            minimum=0,
            neutral=(0.0,),
            server_wide=True,
        ),
        Field(
            "eps",
            float,
            "dream: end of the schedule, which falls from 1 to it",
            default=1e-3,
            minimum=0,
            maximum=1,
            server_wide=True,
        ),
        Field(
            "steps_per_block",
            int,
            "denoise steps of a block of a block-causal family; steps is the same times the number "
            "of blocks, ceil(gen_length / block_length)",
            default_text="one per position of the block",
            minimum=1,
            maximum=MAX_STEPS,
            server_wide=True,
        ),
        Field(
            "editing_threshold",
            float,
            "confidence above which a token that was committed is replaced by "
            "another (joint_threshold, levenshtein); 0 replaces whenever another is more likely",
            default=0.9,
            server_wide=True,
        ),
        Field(
            "max_post_steps",
            int,
            "steps of a block after its last mask is filled (joint_threshold, levenshtein)",
            default=16,
            minimum=0,
            server_wide=True,
        ),
        Field(
            "num_to_transfer",
            int,
            "joint_threshold: masks that are filled in a step although fewer reach the threshold",
            default=1,
            minimum=1,
            server_wide=True,
        ),
        Field(
            "penalty_lambda",
            float,
            "joint_threshold: taken from the logit of the token that stands before a position",
            default=0.0,
            minimum=0,
            server_wide=True,
        ),
        Field(
            "sub_block_length",
            int,
            "hierarchy_block: tokens per part of a block, filled from left to right; divides "
            "block_length",
            default=8,
            minimum=1,
            server_wide=True,
        ),
        Field(
            "delimiter_ids",
            tuple,
            "adablock: token ids after which a block may end",
            default_text="line ends of the tokenizer",
            server_wide=True,
        ),
        Field(
            "delimiter_threshold",
            float,
            "adablock: confidence from which a block ends after a delimiter",
            default=0.3,
            server_wide=True,
        ),
    )
)
