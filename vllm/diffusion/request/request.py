# SPDX-License-Identifier: Apache-2.0
"""A request while its parameters are decided.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.guided.guides import Guide
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.lengths import Lengths
    from vllm.diffusion.request.revision import Revision
    from vllm.diffusion.request.served_model import ServedModel


@dataclass(kw_only=True)
class Request:
    """A request while it is decided: what the client set, and what has been decided already.

    Attributes:
        given: fields that the client set, by canonical name, without the ignored fields.
        values: value of every field: the given one or the default. `Field.resolve` has not been
            applied.
        model: the served model.
        algorithm: the decoding algorithm.
        prompt: token ids of the prompt.
        end_ids: ids that end an answer, unless `ignore_eos` is set.
        upstream_max_tokens: a limit that upstream may have set itself.
        logprobs, logprob_token_ids, ignored: see `DiffusionParams`.
        guide: compiled format of the answer, if it has one.
        revision: the text that the canvas begins with, if it begins with one.
        lengths: lengths of canvas, answer, blocks and steps.
        cache: kind of cache.
    """

    given: Mapping[str, Any]
    values: Mapping[str, Any]
    model: ServedModel
    algorithm: Algorithm
    prompt: Sequence[int]
    end_ids: frozenset[int]
    upstream_max_tokens: int | None
    logprobs: int | None
    logprob_token_ids: tuple[int, ...]
    ignored: tuple[str, ...]
    guide: Guide | None = None
    revision: Revision | None = None
    lengths: Lengths = field(init=False)
    cache: str = field(init=False)

    @property
    def room(self) -> int:
        """Number of tokens that fit after the prompt."""
        return self.model.max_model_len - len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Length of prompt and canvas."""
        return len(self.prompt) + self.lengths.canvas

    @property
    def has_fp8_attention(self) -> bool:
        is_fp8 = self.values["attention_dtype"] == "fp8"
        return is_fp8 and self.num_tokens >= self.model.fp8_from
