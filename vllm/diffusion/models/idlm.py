# SPDX-License-Identifier: Apache-2.0
"""I-DLM (introspective strided decoding, 2026), 8B and 32B.

SDAR's keys and tensors with a causal mask: a Qwen3 transformer whose row at a position predicts the
token at the next position, at mask tokens too. So the k-th mask after the latest token drafts the
token after it. Source: https://github.com/togethercomputer/introspective-dlm.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.diffusion.models.sdar import SDARConfig
from vllm.diffusion.request.families import REGULAR_CAUSAL


class IDLMConfig(SDARConfig):
    """config.json of I-DLM; see `StandardConfig`.

    `block_size`, the block length of SDAR, is the number of masks of a forward pass.
    """

    HARMLESS: ClassVar[tuple[str, ...]] = (*SDARConfig.HARMLESS, REGULAR_CAUSAL, "noise")
