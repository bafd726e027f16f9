# SPDX-License-Identifier: Apache-2.0
"""Visibility in families with causal context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.diffusion.request.visibility import FULL, BlockCausal, Visibility

if TYPE_CHECKING:
    from vllm.diffusion.request.visibility import Forward, WindowPart

_CAUSAL = BlockCausal(1)


@dataclass(frozen=True)
class CausalContext(Visibility):
    """Visibility with a causal context, all of which the block being denoised attends to.

    A key of the context depends only on the tokens before it, whatever the blocks. So it is final
    once a causal forward pass over final tokens has computed it. Keys of the block being denoised
    are never final. Blocks may begin anywhere after the prompt, so the sequence has room for a
    whole block after the last position of an answer.

    Attributes:
        is_open: whether all positions of a block change until the block is finished. Then the last
            finished block, or the prompt, is computed together with the first forward pass of the
            block behind it, and rows of a block are marked (`WindowPart.block_start`).
        is_strict: whether every forward pass is causal, so that a block is only the room of the
            rows that follow the latest token.
    """

    block_length: int = 32
    is_open: bool = False
    is_strict: bool = False

    @property
    def kept_unit(self) -> int:
        return 1

    def with_blocks_of(self, block_length: int, offset: int = 0) -> Visibility:
        return replace(self, block_length=block_length)

    def in_whole_blocks(self, length: int) -> int:
        return length + self.block_length - 1

    def first_end(self, prompt_length: int) -> int:
        return prompt_length + self.block_length if self.is_open else prompt_length

    def parts(self, forward: Forward) -> tuple[WindowPart, ...]:
        window = forward.window
        if forward.is_causal:
            return (_CAUSAL.part(forward, window),)
        start = max(window.stop - self.block_length, window.start)
        block = FULL.part(forward, range(start, window.stop))
        if self.is_open:
            block = block._replace(block_start=start)
        context = range(window.start, start)
        return (_CAUSAL.part(forward, context), block) if context else (block,)

    def final(self, forward: Forward) -> range:
        if forward.is_causal:
            return _CAUSAL.final(forward)
        window = forward.window
        context = range(window.start, max(window.start, window.stop - self.block_length))
        return _CAUSAL.final(forward._replace(window=context)) if self.is_open else range(0)
