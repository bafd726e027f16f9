# SPDX-License-Identifier: Apache-2.0
"""The decided parameters of a request.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.guided.guides import Guide  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.algorithms import AlgorithmParams
from vllm.diffusion.request.edits import Edits  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.lengths import ends_with_text
from vllm.diffusion.request.likelihood import ScoreRequest  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.request_fields import RequestFields
from vllm.diffusion.request.revision import Revision  # noqa: TC001 (read when a decision is received)
from vllm.diffusion.request.values import derived

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED_BITS = 64
# JavaScript's numbers are exact below 2^53, and answer i uses seed + i.
DRAWN_SEED_BITS = 52


def signed_seed(seed: int) -> int:
    """Return a seed as int64 with the same bits, as generators of PyTorch and kernels require."""
    return seed - 2**SEED_BITS if seed >> (SEED_BITS - 1) else seed


@dataclass(frozen=True, kw_only=True)
class DiffusionParams(RequestFields, AlgorithmParams):
    """Request fields with all defaults filled in, and values that follow from them and the model.

    `derived` declares how a value follows; the attributes with a default are set after the others
    are decided.

    The record is sent between processes as a map, and rebuilt by the types of its attributes.

    Attributes:
        stop_ids: ids that end the answer. It is empty with `ignore_eos`, which also turns off
            `early_stop`.
        logit_shift, is_block_causal, has_causal_context, is_strictly_causal, is_open,
            scores_after_filters, scores_clean, counts_masks, completes_prompts: values of the
            family.
        pad_id: the token behind the end of an answer.
        edit_ids: the tokens that delete and that insert a position.
        forbidden_ids: tokens that are never proposed.
        think_ids: the tokens that begin and end thinking.
        ends_with_text: see `lengths`.
        scores_directly: whether the algorithm reads the tokens of a text that it may replace, so
            that they are not scored in masked copies.
        longest_canvas: length up to which the canvas grows; 0 if it does not.
        fp8_attention_from: length in positions from which attention is fp8, if it is requested.
        logprobs: number of alternatives reported with every token's log probability, or None. If
            `logprob_token_ids` is set, it is their number.
        logprob_token_ids: tokens whose log probabilities are reported instead of the most likely.
        ignored: names of standard fields that were given and have no effect.
        vocab_size: rows of the embedding.
        score: set in a likelihood request, whose canvas is empty.
        revision: the text that the canvas begins with, if it begins with one.
        num_answers: number of requests with this prompt that differ only in the seed.
        guide: compiled format of the answer, if it has one.
        edits: edits of logits, if any.
        has_stop_strings: whether a stop string may end the answer after any step.
    """

    eos_id: int | None = derived(lambda r: r.model.ids.eos)
    eot_id: int | None = derived(lambda r: r.model.ids.eot)
    pad_id: int | None = derived(lambda r: r.model.ids.pad)
    stop_ids: frozenset[int] = derived(
        lambda r: frozenset() if r.values["ignore_eos"] else r.end_ids
    )
    logit_shift: int = derived(lambda r: r.model.family.logit_shift)
    is_block_causal: bool = derived(lambda r: r.model.family.is_block_causal)
    has_causal_context: bool = derived(lambda r: r.model.family.has_causal_context)
    is_strictly_causal: bool = derived(lambda r: r.model.family.is_strictly_causal)
    is_open: bool = derived(lambda r: r.model.family.is_open)
    scores_after_filters: bool = derived(lambda r: r.model.family.scores_after_filters)
    scores_clean: bool = derived(lambda r: r.model.family.scores_clean)
    counts_masks: bool = derived(lambda r: r.model.family.counts_masks)
    completes_prompts: bool = derived(lambda r: r.model.family.visibility.is_whole)
    edit_ids: tuple[int, ...] = derived(lambda r: r.model.ids.edit)
    forbidden_ids: tuple[int, ...] = derived(
        lambda r: () if r.algorithm.edits_length else r.model.ids.edit
    )
    think_ids: tuple[int, ...] = derived(lambda r: r.model.ids.think)
    longest_canvas: int = derived(lambda r: r.lengths.longest)
    ends_with_text: bool = derived(ends_with_text)
    scores_directly: bool = derived(lambda r: r.algorithm.text_rule is not None)
    fp8_attention_from: int = derived(lambda r: r.model.fp8_from)
    logprobs: int | None = derived(lambda r: len(r.logprob_token_ids) or r.logprobs)
    logprob_token_ids: tuple[int, ...] = derived(lambda r: r.logprob_token_ids)
    ignored: tuple[str, ...] = derived(lambda r: r.ignored)
    vocab_size: int = derived(lambda r: r.model.vocab_size)

    edits: Edits | None = None
    revision: Revision | None = None
    guide: Guide | None = None
    score: ScoreRequest | None = None
    num_answers: int = 1
    has_stop_strings: bool = False

    @property
    def kept_unit(self) -> int:
        """Size of the units in which exact keys and values depend on each other's tokens."""
        return 1 if self.has_causal_context else self.block_length

    @property
    def settles_late(self) -> bool:
        """Whether no position of the answer settles before the last round of a revision."""
        revision = self.revision
        return revision is not None and (revision.rounds > 1 or revision.slack > 0)

    def unit_of_cuts(self, length: int) -> int:
        """Return the granularity at which forwards with an exact cache are cut.

        While no position of the answer is settled, only keys of the prompt are cached. A part of a
        forward would then be computed and lost, so the forward is whole.

        Args:
            length: number of positions of the sequence.
        """
        return length if self.settles_late else self.block_length

    def block_offset(self, prompt_length: int) -> int:
        """Return the number of positions that the first block of the sequence lacks."""
        starts_with_answer = self.block_grid == "answer" and self.score is None
        return -prompt_length % self.block_length if starts_with_answer else 0

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
    def keeps_distributions(self) -> bool:
        """Whether drafts are compared with the distributions that they were drawn from."""
        return self.stride is not None and self.acceptance == "ratio" and self.temperature > 0

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p may restrict a distribution."""
        return self.min_p > 0 or self.top_k is not None or self.top_p is not None

    @property
    def computes_blocks(self) -> bool:
        """Whether forward passes of a block, except its first, begin at the block."""
        return self.cache in ("prefix", "dual")

    def has_fp8_attention(self, length: int) -> bool:
        """Whether attention is fp8 in forward passes over a sequence of `length` positions."""
        return self.attention_dtype == "fp8" and length >= self.fp8_attention_from

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be shorter than the others (full_attn_multi_block)."""
        return -(-self.gen_length // self.block_length)

    @property
    def num_open(self) -> int:
        """Number of canvas positions that are filled: all before the tokens that are given."""
        return self.max_tokens if self.has_fixed_end else self.gen_length

    @property
    def has_fixed_end(self) -> bool:
        """Whether the tokens behind the longest answer are given: a suffix, or end tokens."""
        return bool(self.suffix_ids) or self.revision is not None

    @property
    def can_grow(self) -> bool:
        """Whether a full canvas grows if the answer has not ended."""
        return self.gen_length < self.longest_canvas

    @property
    def next_length(self) -> int:
        """Length of the canvas after it has grown once more."""
        return min(self.gen_length + self.growth, self.longest_canvas)

    @property
    def longest_answer(self) -> int:
        """Maximum number of tokens of the answer, on the longest canvas."""
        return self.max_tokens if self.can_grow else min(self.max_tokens, self.gen_length)

    def with_canvas(self, length: int) -> DiffusionParams:
        """Return the parameters with a longer canvas, and the same steps for each block."""
        steps = None if self.steps is None else self.steps * length // self.gen_length
        return dataclasses.replace(self, gen_length=length, steps=steps)

    def answer_end(
        self, tokens: Sequence[int], num_before: int, *, continues: bool = False
    ) -> int | None:
        """Return how many of the given tokens belong to the answer; None if it continues.

        A stop token ends the answer and is its last token; the length limit is checked second.

        Args:
            tokens: tokens that became final.
            num_before: tokens of the answer before them.
            continues: whether the answer continues on a longer canvas.
        """
        room = self.max_tokens if continues else min(self.max_tokens, self.gen_length)
        room -= num_before
        for index, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                return index + 1
        return room if len(tokens) >= room else None

    def with_answers(self, num_answers: int) -> DiffusionParams:
        """Return the parameters with `num_answers`, the number of answers of the client's request.

        The engine receives each answer as a request of its own. Revisions share no first forward,
        because their first forwards only score the text.
        """
        if self.revision is not None:
            return self
        return dataclasses.replace(self, num_answers=num_answers)

    def with_seed(self, seed: int) -> DiffusionParams:
        return dataclasses.replace(self, seed=seed % 2**SEED_BITS)
