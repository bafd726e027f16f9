# SPDX-License-Identifier: Apache-2.0
"""The decoding loops of Nemotron-Labs-Diffusion and I-DLM, one sequence at a time, written plainly.

They are written from the behaviour of the release, and not from its text. Every forward pass
computes the whole sequence, without a cache. The context is causal, and its rows predict the next
token. The rows of a block that is denoised attend to each other and predict their own tokens.

- `diffusion`: blocks of a seed and masks.
- `autoregressive`: one token per forward pass.
- `self_speculation`: a block is drafted, and a causal forward pass accepts a prefix of it.
- `introspective` (I-DLM): a causal forward pass accepts drafts, and makes the next ones at masks.

All return the answer up to and including its first stop token, cut at `gen_length`. Deviations from
the source: the mask token is never proposed as a seed, a draft or a confirmation. A seed that is a
stop token ends the answer. No forward pass is made for positions after the answer. In
self-speculation, thinking ends at the same position of the answer as in `autoregressive`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference.block_loops import Decoded, NoEnd, most_confident, quotas

# (logits [V] without the mask token, index in the answer) -> token
Choose = Callable[[Tensor, int], int]
# (tokens of positions 0..T-1, number of leading positions that are causal) -> logits [T, V]
LogitsOf = Callable[[Sequence[int], int], Tensor]


class Thinking(NamedTuple):
    """The tokens that begin and end thinking, and its maximum number of tokens in the answer."""

    begin: int
    end: int
    budget: int

    def place(self, prompt: Sequence[int], answer: Sequence[int], end: int) -> int | None:
        """Return the position in the answer, before `end`, at which thinking is ended, or None."""
        latest = [token for token in prompt if token in (self.begin, self.end)][-1:]
        has_ended = self.end in answer or (latest == [self.end] and self.begin in prompt)
        return None if has_ended or self.budget >= end else max(self.budget, len(answer))


def most_likely(logits: Tensor, place: int) -> int:
    return int(logits.argmax())


class _Text:
    """Prompt and answer so far, and the number of forward passes so far."""

    def __init__(
        self,
        logits_of: LogitsOf,
        prompt: Sequence[int],
        mask_id: int,
        stop_ids: Collection[int],
        choose: Choose = most_likely,
    ) -> None:
        self.choose = choose
        self.logits_of, self.prompt = logits_of, list(prompt)
        self.mask_id, self.stop_ids = mask_id, frozenset(stop_ids)
        self.answer: list[int] = []
        self.forwards = 0
        self.history: list[list[int]] = []

    def following(self, block: Sequence[int] = (), *, is_pass: bool = True) -> list[int]:
        """Return the causal predictions after the latest token and after each token of `block`.

        `is_pass` is false for rows that another forward pass computes in addition.
        """
        tokens = [*self.prompt, *self.answer, *block]
        self.forwards += is_pass
        logits = self.logits_of(tokens, len(tokens))[-1 - len(block) :].clone()
        logits[:, self.mask_id] = -torch.inf
        return [self.choose(row, len(self.answer) + i) for i, row in enumerate(logits)]

    def denoised(self, block: Sequence[int], *, forbids_mask: bool) -> dict[int, tuple[int, float]]:
        """Return token and confidence of the masks of a block after the answer, by index in it."""
        start = len(self.prompt) + len(self.answer)
        self.forwards += 1
        logits = self.logits_of([*self.prompt, *self.answer, *block], start)[start:].clone()
        if forbids_mask:
            logits[:, self.mask_id] = -torch.inf
        probabilities = torch.softmax(logits, dim=-1)
        best = probabilities.argmax(dim=-1).tolist()
        masked = [i for i, token in enumerate(block) if token == self.mask_id]
        return {i: (best[i], float(probabilities[i, best[i]])) for i in masked}

    def result(self, gen_length: int) -> Decoded:
        answer = self.answer[:gen_length]
        stops = [i for i, token in enumerate(answer) if token in self.stop_ids]
        answer = answer[: stops[0] + 1] if stops else answer
        if self.mask_id in answer:
            raise NoEnd
        return Decoded(answer, self.forwards, self.history)


def diffusion(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 32,
    threshold: float | None = None,
    steps: int | None = None,
    stop_ids: Collection[int] = (),
    thinking: Thinking | None = None,
) -> Decoded:
    """Run `generate` of the release: commit the best and all above the threshold, or a share."""
    text = _Text(logits_of, prompt, mask_id, stop_ids)
    while len(text.answer) < gen_length:
        (seed,) = text.following()
        block = [seed, *[mask_id] * (block_length - 1)]
        if thinking is not None and seed != thinking.end:
            end = thinking.place(prompt, text.answer, len(text.answer) + block_length)
            if end is not None:
                block[end - len(text.answer)] = thinking.end
        text.history.append([*text.answer, *block])
        schedule = iter(quotas(block.count(mask_id), steps or block_length))
        while mask_id in block and not _ends(text, block):
            proposals = text.denoised(block, forbids_mask=False)
            confidence = {i: c for i, (_, c) in proposals.items()}
            if threshold is None:
                chosen = set(most_confident(confidence, next(schedule)))
            else:
                chosen = {i for i, c in confidence.items() if c >= threshold}
                chosen |= set(most_confident(confidence, 1))
            if all(proposals[i][0] == mask_id for i in chosen):
                raise NoEnd
            for i in chosen:
                block[i] = proposals[i][0]
            text.history.append([*text.answer, *block])
        text.answer += block
        if _ends(text, block):
            text.answer = text.answer[: len(text.answer) - len(block) + _before_mask(text, block)]
            break
    return text.result(gen_length)


def _before_mask(text: _Text, block: Sequence[int]) -> int:
    return block.index(text.mask_id) if text.mask_id in block else len(block)


def _ends(text: _Text, block: Sequence[int]) -> bool:
    """Return whether a stop token has no mask before it."""
    return not text.stop_ids.isdisjoint(block[: _before_mask(text, block)])


def autoregressive(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 1,
    stop_ids: Collection[int] = (),
    thinking: Thinking | None = None,
    choose: Choose = most_likely,
) -> Decoded:
    """Decode one token per forward pass."""
    text = _Text(logits_of, prompt, mask_id, stop_ids, choose)
    while len(text.answer) < gen_length:
        (token,) = text.following()
        place = None
        if thinking is not None:
            place = thinking.place(prompt, text.answer, len(text.answer) + 1)
        text.answer.append(token if thinking is None or place is None else thinking.end)
        text.history.append(list(text.answer))
        if text.answer[-1] in text.stop_ids:
            break
    return text.result(gen_length)


def self_speculation(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 32,
    threshold: float = 0.0,
    stop_ids: Collection[int] = (),
    draft: LogitsOf | None = None,
) -> Decoded:
    """Run `linear_spec_generate` of the release; `draft` may compute the logits of drafts."""
    text = _Text(logits_of, prompt, mask_id, stop_ids)
    text.answer = text.following()
    while len(text.answer) < gen_length and text.stop_ids.isdisjoint(text.answer):
        seed = text.answer.pop()
        block = [seed, *[mask_id] * (block_length - 1)]
        while mask_id in block:
            text.logits_of = draft or logits_of
            proposals = text.denoised(block, forbids_mask=True)
            confidence = {i: c for i, (_, c) in proposals.items()}
            chosen = {i for i, c in confidence.items() if c >= threshold}
            for i in chosen | set(most_confident(confidence, 1)):
                block[i] = proposals[i][0]
        text.logits_of = logits_of
        confirmed = text.following(block)[1:]
        wrong = [i for i in range(block_length - 1) if confirmed[i] != block[i + 1]]
        text.answer += [seed, *confirmed[: wrong[0] + 1 if wrong else block_length]]
        text.history.append(list(text.answer))
    return text.result(gen_length)


def introspective(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    stride: int = 4,
    has_branches: bool = False,
    stop_ids: Collection[int] = (),
    choose: Choose = most_likely,
) -> Decoded:
    """Run I-DLM's loop: verify drafts and make the next ones in the same forward pass.

    Without drafts, which is the case after the first token and after a wrong draft, a pass commits
    one token. A draft is right if the choice at its position, after the tokens before it, is the
    draft. With `has_branches`, which is our own, a pass also has masks after each of its drafts, so
    that there are drafts after a wrong one.
    """
    text = _Text(logits_of, prompt, mask_id, stop_ids, choose)
    text.answer = text.following()
    drafts: list[int] = []
    while len(text.answer) < gen_length and text.stop_ids.isdisjoint(text.answer):
        text.history.append(list(text.answer))
        seed = text.answer.pop()
        masks = [mask_id] * (stride - 1)
        chosen = text.following([seed, *drafts, *masks])[1:]
        verified, following = chosen[: len(drafts) + 1], chosen[len(drafts) + 1 :]
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == verified[num_right]:
            num_right += 1
        if num_right < len(drafts):
            following = []
            if has_branches:
                branch = [seed, *drafts[:num_right], *masks]
                following = text.following(branch, is_pass=False)[num_right + 2 :]
        text.answer += [seed, *verified[: num_right + 1]]
        drafts = following
    return text.result(gen_length)
