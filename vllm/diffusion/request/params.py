# SPDX-License-Identifier: Apache-2.0
"""Records of a request's decision, its inputs and its result; no rules.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.guided.guides import Guide  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.algorithms import AlgorithmParams
from vllm.diffusion.request.edits import Edits  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.likelihood import ScoreRequest  # noqa: TC001 (read when a decision is received)

if TYPE_CHECKING:
    from collections.abc import Sequence


SEED_BITS = 64
DRAWN_SEED_BITS = 52  # JavaScript's numbers are exact below 2^53, and answer i uses seed + i


@dataclass(frozen=True, kw_only=True)
class DiffusionParams(AlgorithmParams):
    """Parameters of a request with every default filled in; names are those of the table.

    It crosses processes as a map, and is rebuilt by the types of its attributes.

    `steps` is None where no bound was asked for, `top_p` and `top_k` where they are off. `stop_ids`
    is empty and `early_stop` is false when `ignore_eos` is set. `logit_shift`, `is_block_causal`,
    `has_causal_context`, `scores_after_filters`, `counts_masks` and `completes_prompts` are the
    family's. `edit_ids` are the tokens that delete and that insert a position, `forbidden_ids` are
    never proposed; `think_ids` begin and end thinking, which is over `thinking_token_budget` tokens
    after the prompt.
    `logprob_token_ids` are tokens whose log probabilities are reported in place of the most likely
    ones; `logprobs` is their number then.
    `seed` is None until the engine draws one. `logprobs` is the number of alternatives reported
    beside every token's log probability, or None. `ignored` names the standard fields that were
    given and cannot act. `priority` is None where upstream's request has it, and `timeout_s` where
    there is no timeout. `score` is set in a likelihood request; its canvas is empty then.
    `num_answers` is the number of requests with this prompt whose parameters differ in the seed
    alone. `guide` is the language of the answer, if it has one; `edits` are the changes of logits
    that it asks for, if any. `suffix_ids` stand on the canvas, right behind the longest answer.
    `num_speculative_states` is the number of states that may be drafted for a forward.
    `has_stop_strings` says that any step's tokens may be the last ones. `fp8_attention_from` is the
    number of positions of a sequence from which attention is fp8, where that is asked for.
    """

    algorithm: str
    remasking: str
    cache: str
    gen_length: int
    max_tokens: int
    steps: int | None
    block_length: int
    temperature: float
    min_p: float
    top_k: int | None
    top_p: float | None
    cfg_scale: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    confidence_dtype: str
    ignore_eos: bool
    allow_infill: bool
    force_single_batch: bool
    attention_dtype: str
    seed: int | None
    mask_id: int
    eos_id: int | None
    eot_id: int | None
    stop_ids: frozenset[int]
    logit_shift: int
    is_block_causal: bool
    has_causal_context: bool
    scores_after_filters: bool
    counts_masks: bool
    completes_prompts: bool
    edit_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...]
    think_ids: tuple[int, ...]
    thinking_token_budget: int | None
    stream_canvas: bool
    return_trajectory: bool
    return_entropy: bool
    complete_blocks: bool
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    priority: int | None = None
    timeout_s: float | None = None
    score: ScoreRequest | None = None
    num_answers: int = 1
    guide: Guide | None = None
    edits: Edits | None = None
    suffix_ids: tuple[int, ...] = ()
    num_speculative_states: int = 0
    has_stop_strings: bool = False
    fp8_attention_from: int = 0

    @property
    def kept_unit(self) -> int:
        """Positions whose exact keys and values depend on each other's tokens."""
        return 1 if self.has_causal_context else self.block_length

    @property
    def has_extras(self) -> bool:
        """Whether log probabilities of candidates are wanted, whatever for."""
        return self.return_trajectory or self.num_logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to look up; None where no probability is wanted."""
        if self.logprobs is None and self.stream_canvas:
            return 0
        return self.logprobs

    @property
    def never_ids(self) -> tuple[int, ...]:
        """Token ids that no step may propose, besides the mask token."""
        if self.logits_eos_inf and self.eos_id is not None:
            return self.eos_id, *self.forbidden_ids
        return self.forbidden_ids

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p may cut a distribution."""
        return self.min_p > 0 or self.top_k is not None or self.top_p is not None

    @property
    def computes_blocks(self) -> bool:
        """Whether forwards of a block, except its first, compute nothing before the block."""
        return self.cache in ("prefix", "dual")

    def has_fp8_attention(self, length: int) -> bool:
        """Whether attention is fp8 in forwards of all `length` positions of a sequence."""
        return self.attention_dtype == "fp8" and length >= self.fp8_attention_from

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be shorter than the others (full_attn_multi_block)."""
        return -(-self.gen_length // self.block_length)

    @property
    def num_open(self) -> int:
        """Number of canvas positions that are filled: all before a given suffix."""
        return self.max_tokens if self.suffix_ids else self.gen_length

    def answer_end(self, tokens: Sequence[int], num_before: int) -> int | None:
        """Number of the newest final tokens that belong to the answer; None while it goes on.

        A stop token ends the answer and is its last token; the length limit comes second.

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
        """Return the parameters of a request for `num_answers` answers.

        Each answer comes to the engine as a request.
        """
        return dataclasses.replace(self, num_answers=num_answers)

    def with_seed(self, seed: int) -> DiffusionParams:
        return dataclasses.replace(self, seed=seed % 2**SEED_BITS)
