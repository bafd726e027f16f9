# SPDX-License-Identifier: Apache-2.0
"""Visibility where the context is causal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.diffusion.request.visibility import FULL, BlockCausal, Visibility

if TYPE_CHECKING:
    from vllm.diffusion.request.visibility import Forward, WindowPart

_CAUSAL = BlockCausal(1)


@dataclass(frozen=True)
class CausalContext(Visibility):
    """Visibility in which the context is causal, and a block that is denoised sees all of it.

    So a key of the context depends on the tokens before it alone, whatever blocks they came in: it
    is final where a causal forward has seen final tokens. Keys of a block that is denoised never
    are. Blocks begin anywhere behind the prompt, so there is room for a whole one behind the last
    position of an answer.
    """

    block_length: int = 32

    @property
    def kept_unit(self) -> int:
        return 1

    def with_blocks_of(self, block_length: int) -> Visibility:
        return replace(self, block_length=block_length)

    def in_whole_blocks(self, length: int) -> int:
        return length + self.block_length - 1

    def first_end(self, prompt_length: int) -> int:
        return prompt_length

    def parts(self, forward: Forward) -> tuple[WindowPart, ...]:
        window = forward.window
        if forward.is_causal:
            return (_CAUSAL.part(forward, window),)
        start = max(window.stop - self.block_length, window.start)
        block = FULL.part(forward, range(start, window.stop))
        context = range(window.start, start)
        return (_CAUSAL.part(forward, context), block) if context else (block,)

    def final(self, forward: Forward) -> range:
        return _CAUSAL.final(forward) if forward.is_causal else range(0)
