# SPDX-License-Identifier: Apache-2.0
"""The request fields, and the decided parameters of a request.

`DiffusionParams` is the only list of request fields: validation, aliases, defaults, HTTP schemas
and the table of docs/requests.md are derived from it (`vllm.diffusion.request.fields`). A new field
is one attribute here, or in `AlgorithmParams` if only some algorithms use it.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.guided.guides import Guide  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.algorithms import (
    ALGORITHM_NAMES,
    CACHES,
    GUIDED_CACHES,
    MAX_STEPS,
    REMASKING,
    AlgorithmParams,
)
from vllm.diffusion.request.edits import Edits  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.likelihood import ScoreRequest  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.values import derived, param

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.request.request import Request

SEED_BITS = 64
# JavaScript's numbers are exact below 2^53, and answer i uses seed + i.
DRAWN_SEED_BITS = 52
MAX_DRAFTS = 15  # drafts per forward pass
# Fields that restrict a distribution before sampling, with the values that keep all of it.
NO_FILTERS: Mapping[str, Any] = MappingProxyType({"min_p": 0.0, "top_k": None, "top_p": None})


def _cfg_scale(scale: float, request: Request) -> float:
    """Drop a server-wide default that cannot be combined with the cache."""
    return scale if request.cache in GUIDED_CACHES else 0.0


def _refused_entropy(is_requested: bool, request: Request) -> str | None:
    if is_requested and not request.given.get("return_trajectory"):
        return "wanted false, or return_trajectory: true"
    return None


def _refused_attention(dtype: str, request: Request) -> str | None:
    if dtype in ("model", request.model.defaults.get("attention_dtype")):
        return None
    return "wanted model, or a server whose --additional-config has it, too"


def _single_batch(is_alone: bool, request: Request) -> bool:
    return is_alone or (request.has_fp8_attention and not request.model.cuts_steps)


def _thinking_budget(budget: int | None, request: Request) -> int | None:
    return None if budget == -1 or not request.model.ids.think else budget


@dataclass(frozen=True, kw_only=True)
class DiffusionParams(AlgorithmParams):
    """Parameters of a request with all defaults filled in.

    `param` declares a request field; a `ClassVar` is a request field whose effect is in another
    attribute, `edits` or `algorithm`. `derived` declares a value that no request sets. The
    remaining attributes are set after the request is decided.

    The record is sent between processes as a map, and rebuilt by the types of its attributes.

    Attributes:
        steps: number of steps, None if it is unlimited.
        top_k, top_p: None if the filter is off.
        seed: None until the engine draws one.
        suffix_ids: tokens on the canvas directly after the longest answer.
        thinking_token_budget: tokens after the prompt at which thinking ends.
        priority: None if upstream's request carries it.
        timeout_s: None if there is no timeout.
        stop_ids: ids that end the answer. It is empty with `ignore_eos`, which also turns off
            `early_stop`.
        logit_shift, is_block_causal, has_causal_context, scores_after_filters, counts_masks,
            completes_prompts: values of the family.
        edit_ids: the tokens that delete and that insert a position.
        forbidden_ids: tokens that are never proposed.
        think_ids: the tokens that begin and end thinking.
        fp8_attention_from: length in positions from which attention is fp8, if it is requested.
        logprobs: number of alternatives reported with every token's log probability, or None. If
            `logprob_token_ids` is set, it is their number.
        logprob_token_ids: tokens whose log probabilities are reported instead of the most likely.
        ignored: names of standard fields that were given and have no effect.
        score: set in a likelihood request, whose canvas is empty.
        num_answers: number of requests with this prompt that differ only in the seed.
        guide: compiled format of the answer, if it has one.
        edits: edits of logits, if any.
        has_stop_strings: whether a stop string may end the answer after any step.
    """

    algorithm: str = param(
        "the decoding algorithm, which decides what a step commits",
        default_text="the model's; threshold if a full-attention model gets `threshold`",
        choices=ALGORITHM_NAMES,
        server_wide=True,
        resolve=lambda _, r: r.algorithm.name,
    )
    use_local_leap: ClassVar[bool] = param(
        "the same as algorithm: local_leap", default=False, server_wide=True
    )
    remasking: str = param(
        "score of a candidate, its probability or a random number",
        default="low_confidence",
        choices=REMASKING,
        neutral=("low_confidence",),
        server_wide=True,
        uses=lambda a: a.random_scores != "none",
        applies=lambda a, model: a.can_score_at_random(is_shifted=model.is_shifted),
    )
    cache: str = param(
        "which keys and values later steps reuse. They are exact on block-causal families, "
        "an approximation on full-attention families: frozen (the prompt's) with every algorithm, "
        "prefix and dual with algorithms that fill one block after the other, delayed with "
        "multi_block",
        default_text="none; exact for block-causal families",
        choices=CACHES,
        server_wide=True,
        resolve=lambda _, r: r.cache,
    )
    gen_length: int = param(
        "length of the canvas in tokens; the model computes this many mask tokens, so the length "
        "changes the answer and is not just a limit",
        default_text="max_tokens rounded up to whole blocks of 32, else 128",
        minimum=1,
        aliases=("output_length",),
        resolve=lambda _, r: r.lengths.canvas,
    )
    max_tokens: int = param(
        "most tokens of the answer; cuts the answer, not the canvas",
        default_text="gen_length",
        minimum=1,
        aliases=("max_new_tokens",),
        resolve=lambda _, r: r.lengths.max_tokens,
    )
    steps: int | None = param(
        "denoising steps for the whole canvas; semi_ar and block-causal families: a multiple of "
        "the number of blocks; dream: any number; other algorithms: an upper bound",
        default_text="one per canvas token; unlimited where steps is an upper bound",
        minimum=1,
        maximum=MAX_STEPS,
        aliases=("num_denoising_steps",),
        server_wide=True,
        uses=lambda a: a.pace != "rule alone",
        resolve=lambda _, r: r.lengths.steps,
    )
    block_length: int = param(
        "tokens per block; blocks are filled from left to right. Must divide the canvas, except "
        "that with full_attn_multi_block and adablock the last block may be shorter and "
        "block-causal families accept any length",
        default_text="32 if it divides the canvas, else the whole canvas; block-causal families: "
        "the value of config.json, else 32",
        minimum=1,
        aliases=("block_size", "sub_block_size"),
        server_wide=True,
        uses=lambda a: a.blocks != "none",
        resolve=lambda _, r: r.lengths.block_length,
    )
    temperature: float = param(
        "scale of the Gumbel noise; with dream and on block-causal families, divisor of the "
        "logits; 0 is greedy",
        default=0.0,
        minimum=0,
        neutral=(0.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
    )
    min_p: float = param(
        "with temperature above 0: sample from tokens whose probability is at least this share of "
        "the highest one; 0 keeps all",
        default=0.0,
        minimum=0,
        maximum=1,
        neutral=(0.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
    )
    top_k: int | None = param(
        "with temperature above 0: sample from the top_k most likely tokens, keeping ties with "
        "the last; 0 or -1 keeps all",
        default_text="off",
        minimum=-1,
        neutral=(0, -1),
        uses=lambda a: a.draws,
        in_sampling=True,
        resolve=lambda k, _: k if k is not None and k > 0 else None,
    )
    top_p: float | None = param(
        "with temperature above 0: sample from the fewest most likely tokens whose probabilities "
        "sum to at least this value",
        default_text="off",
        minimum=0,
        maximum=1,
        neutral=(1.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
        resolve=lambda p, _: None if p == 1 else p,
    )
    repetition_penalty: ClassVar[float] = param(
        "divides positive logits and multiplies negative logits of tokens in the prompt and of "
        "committed tokens of the answer",
        default=1.0,
        in_sampling=True,
    )
    presence_penalty: ClassVar[float] = param(
        "subtracted from the logits of committed tokens of the answer",
        default=0.0,
        minimum=-2,
        maximum=2,
        in_sampling=True,
    )
    frequency_penalty: ClassVar[float] = param(
        "subtracted from a token's logit once per committed occurrence in the answer",
        default=0.0,
        minimum=-2,
        maximum=2,
        in_sampling=True,
    )
    logit_bias: ClassVar[dict[int, float]] = param(
        "numbers that are added to logits, by token id; clipped to -100 to 100",
        default_text="none",
        in_sampling=True,
    )
    bad_words: ClassVar[list[str]] = param(
        "words that must not appear in the answer", default_text="none", in_sampling=True
    )
    allowed_token_ids: ClassVar[tuple[int, ...]] = param(
        "the only token ids that the answer may contain", default_text="all", in_sampling=True
    )
    cfg_scale: float = param(
        "classifier-free guidance; above 0 every step also computes a second sequence with a "
        "masked prompt",
        default=0.0,
        minimum=0,
        neutral=(0.0,),
        server_wide=True,
        uses=lambda a: not a.is_block_causal,
        resolve=_cfg_scale,
    )
    logits_eos_inf: bool = param(
        "never predict the end-of-sequence token", default=False, needs=("eos",)
    )
    confidence_eos_eot_inf: bool = param(
        "commit end-of-sequence and end-of-turn tokens only after every other candidate",
        default=False,
        neutral=(False,),
        uses=lambda a: a.score == "confidence" and not a.is_block_causal,
        needs=("eos", "eot"),
    )
    confidence_dtype: str = param(
        "precision of the scores; `logits` is that of the model's logits",
        default="float32",
        choices=("float32", "float64", "logits"),
        server_wide=True,
    )
    mask_id: int = param(
        "must be the model's mask token; any other value returns 400",
        default_text="the model's",
        resolve=lambda _, r: r.model.ids.mask,
    )
    ignore_eos: bool = param(
        "no token ends the answer; returns the whole canvas", default=False, in_sampling=True
    )
    allow_infill: bool = param("also fill mask tokens in the prompt", default=False)
    suffix_ids: tuple[int, ...] = param(
        "token ids after the canvas; the answer fills the gap between the prompt and them",
        default_text="none",
        resolve=lambda ids, _: ids or (),
    )
    min_tokens: ClassVar[int] = param(
        "fewest tokens of the answer before a token can end it",
        default=0,
        minimum=0,
        in_sampling=True,
    )
    seed: int | None = param(
        "seed of the request's random numbers",
        default_text="random",
        in_sampling=True,
        resolve=lambda *_: None,
    )
    stream_canvas: bool = param(
        "with stream: send an event with the whole canvas, proposals included, after every "
        "denoising step",
        default=False,
    )
    return_trajectory: bool = param(
        "return, for every token, the step that committed it and its log probability in that step",
        default=False,
    )
    return_entropy: bool = param(
        "with return_trajectory: also return the entropy of the distribution at each commit",
        default=False,
        refuse=_refused_entropy,
    )
    complete_blocks: bool = param(
        "end an answer only when the block of its last token is full; the tokens after that token "
        "appear only in the trajectory",
        default=False,
    )
    force_single_batch: bool = param(
        "run the request alone in its steps", default=False, server_wide=True, resolve=_single_batch
    )
    attention_dtype: str = param(
        "number format of attention in forward passes over a whole long sequence: the model's, or "
        "fp8 (e4m3) on a server started with it",
        default="model",
        choices=("model", "fp8"),
        neutral=("model",),
        server_wide=True,
        uses=lambda a: not a.is_block_causal,
        refuse=_refused_attention,
    )
    num_speculative_states: int = param(
        "most draft states per forward pass: predicted later states of the canvas, which the pass "
        "evaluates together with the current one; accepted drafts save passes and never change "
        "the answer; 0 drafts none; the default on a GPU is 7",
        default=0,
        minimum=0,
        maximum=MAX_DRAFTS,
        neutral=(0,),
        server_wide=True,
        uses=lambda a: a.speculates is not None,
        resolve=lambda number, r: 0 if r.has_fp8_attention else number,
    )
    thinking_token_budget: int | None = param(
        "most tokens of the answer before the token that ends thinking; only for models that "
        "think (nemotron); -1 is unlimited",
        default_text="none",
        minimum=-1,
        neutral=(-1,),
        server_wide=True,
        in_sampling=True,
        applies=lambda _, model: bool(model.ids.think),
        resolve=_thinking_budget,
    )
    priority: int | None = param(
        "scheduling priority; lower runs first",
        default_text="0",
        minimum=-(2**31),
        maximum=2**31 - 1,
    )
    timeout_s: float | None = param(
        "seconds after arrival at which an unfinished request ends, queued or running: "
        "finish_reason abort, or HTTP 504 if nothing was streamed",
        default_text="none",
        minimum=0.001,
        server_wide=True,
    )

    eos_id: int | None = derived(lambda r: r.model.ids.eos)
    eot_id: int | None = derived(lambda r: r.model.ids.eot)
    stop_ids: frozenset[int] = derived(
        lambda r: frozenset() if r.values["ignore_eos"] else r.end_ids
    )
    logit_shift: int = derived(lambda r: r.model.family.logit_shift)
    is_block_causal: bool = derived(lambda r: r.model.family.is_block_causal)
    has_causal_context: bool = derived(lambda r: r.model.family.has_causal_context)
    scores_after_filters: bool = derived(lambda r: r.model.family.scores_after_filters)
    counts_masks: bool = derived(lambda r: r.model.family.counts_masks)
    completes_prompts: bool = derived(lambda r: r.model.family.visibility.is_whole)
    edit_ids: tuple[int, ...] = derived(lambda r: r.model.ids.edit)
    forbidden_ids: tuple[int, ...] = derived(
        lambda r: () if r.algorithm.edits_length else r.model.ids.edit
    )
    think_ids: tuple[int, ...] = derived(lambda r: r.model.ids.think)
    fp8_attention_from: int = derived(lambda r: r.model.fp8_from)
    logprobs: int | None = derived(lambda r: len(r.logprob_token_ids) or r.logprobs)
    logprob_token_ids: tuple[int, ...] = derived(lambda r: r.logprob_token_ids)
    ignored: tuple[str, ...] = derived(lambda r: r.ignored)

    edits: Edits | None = None
    guide: Guide | None = None
    score: ScoreRequest | None = None
    num_answers: int = 1
    has_stop_strings: bool = False

    @property
    def kept_unit(self) -> int:
        """Size of the units in which exact keys and values depend on each other's tokens."""
        return 1 if self.has_causal_context else self.block_length

    @property
    def has_extras(self) -> bool:
        """Whether log probabilities of candidates are required, for any purpose."""
        return self.return_trajectory or self.num_logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to look up; None if no probability is required."""
        if self.logprobs is None and self.stream_canvas:
            return 0
        return self.logprobs

    @property
    def never_ids(self) -> tuple[int, ...]:
        """Token ids that no step may propose, in addition to the mask token."""
        if self.logits_eos_inf and self.eos_id is not None:
            return self.eos_id, *self.forbidden_ids
        return self.forbidden_ids

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p may restrict a distribution."""
        return self.min_p > 0 or self.top_k is not None or self.top_p is not None

    @property
    def computes_blocks(self) -> bool:
        """Whether forward passes of a block, except its first, compute no positions before the
        block.
        """
        return self.cache in ("prefix", "dual")

    def has_fp8_attention(self, length: int) -> bool:
        """Return whether attention is fp8 in forward passes over all `length` positions of a
        sequence.
        """
        return self.attention_dtype == "fp8" and length >= self.fp8_attention_from

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be shorter than the others (full_attn_multi_block)."""
        return -(-self.gen_length // self.block_length)

    @property
    def num_open(self) -> int:
        """Number of canvas positions that are filled, which are all positions before a suffix."""
        return self.max_tokens if self.suffix_ids else self.gen_length

    def answer_end(self, tokens: Sequence[int], num_before: int) -> int | None:
        """Return how many of the given tokens belong to the answer, or None if the answer
        continues.

        A stop token ends the answer and is its last token; the length limit is checked second.

        Args:
            tokens: tokens that became final.
            num_before: tokens of the answer before them.
        """
        room = self.max_tokens - num_before
        for index, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                return index + 1
        return room if len(tokens) >= room else None

    def with_answers(self, num_answers: int) -> DiffusionParams:
        """Return the parameters with `num_answers`, the number of answers of the client's request.

        The engine receives each answer as a request of its own.
        """
        return dataclasses.replace(self, num_answers=num_answers)

    def with_seed(self, seed: int) -> DiffusionParams:
        return dataclasses.replace(self, seed=seed % 2**SEED_BITS)
