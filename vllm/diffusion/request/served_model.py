# SPDX-License-Identifier: Apache-2.0
"""Facts about the served model that decisions about requests need.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.guided.guides import Guides
    from vllm.diffusion.request.families import Family


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of one checkpoint that decoding needs.

    Attributes:
        mask: the mask token.
        eos: end of sequence; None where the checkpoint has none.
        eot: end of turn; None where the tokenizer has none.
        stop: every id that ends an answer (eos, eot and those of generation_config.json).
        line_ends: ids that end a line, after which adablock may end a block.
        edit: the tokens that delete and that insert a position, in families that have them.
        think: the tokens that begin and that end thinking, in families where it can be bounded.
        no_think: name of the one of them that a tokenizer lacks which has the other; `think` is
            empty then.
    """

    mask: int
    eos: int | None
    eot: int | None
    stop: frozenset[int]
    line_ends: tuple[int, ...] = ()
    edit: tuple[int, ...] = ()
    think: tuple[int, ...] = ()
    no_think: str | None = None


@dataclass(frozen=True)
class ServedModel:
    """Facts about the served model that decisions need.

    Attributes:
        family: the model's family.
        ids: its special token ids.
        max_model_len: longest prompt plus canvas, in tokens.
        vocab_size: rows of the embedding; prompt ids are below it.
        dtype: name of the model's dtype, which its logits have, too.
        unused_defaults: parameters that generation_config.json sets and that do not act by it.
        default_max_tokens: max_new_tokens of generation_config.json, if given.
        defaults: server-wide defaults under canonical names.
        default_steps: denoise steps of a request that gives none (None: one per canvas token).
        block_length: block length of a block-causal checkpoint's config.
        block_unit: block lengths are multiples of it.
        fp8_from: positions of a sequence from which its attention may be fp8.
        cuts_steps: whether long steps are cut, so that other requests run beside them.
        guides: compiler of answer formats; None where none can be used.
        encode: token ids of a text, without special ones; None where there is no tokenizer.
    """

    family: Family
    ids: SpecialIds
    max_model_len: int
    vocab_size: int
    dtype: str = "float32"
    unused_defaults: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_steps: int | None = None
    block_length: int | None = None
    block_unit: int = 1
    fp8_from: int = 0
    cuts_steps: bool = True
    guides: Guides | None = None
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def is_shifted(self) -> bool:
        """Whether a token is read from the row before its own."""
        return self.family.logit_shift > 0
