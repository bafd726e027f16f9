# SPDX-License-Identifier: Apache-2.0
"""Facts about the served model for decisions about requests.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion.request.algorithms import BLOCK_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.guided.guides import Guides
    from vllm.diffusion.request.families import Family


NO_MASK = -1  # the mask token of models without one: marks positions that have no token yet


@dataclass(frozen=True)
class SpecialIds:
    """Special token ids of one checkpoint.

    Attributes:
        mask: the mask token; `NO_MASK` for families without one.
        eos: end of sequence; None if the checkpoint has none.
        eot: end of turn; None if the tokenizer has none.
        pad: the token behind the end of an answer, which the model was trained with: the padding
            token of config.json if it ends answers, else eos.
        stop: every id that ends an answer (eos, eot and the ids of generation_config.json).
        line_ends: ids that end a line, after which adablock may end a block.
        edit: the tokens that delete and insert a position, in families that have them.
        think: the tokens that begin and end thinking, in families whose thinking can be limited.
        no_think: name of the missing token if a tokenizer has only one of the two; `think` is empty
            in this case.
    """

    mask: int
    eos: int | None
    eot: int | None
    stop: frozenset[int]
    line_ends: tuple[int, ...] = ()
    edit: tuple[int, ...] = ()
    think: tuple[int, ...] = ()
    no_think: str | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        if self.pad is None:
            object.__setattr__(self, "pad", self.eos)


@dataclass(frozen=True)
class ServedModel:
    """Facts about the served model.

    Attributes:
        family: the model's family.
        ids: its special token ids.
        max_model_len: longest prompt plus canvas, in tokens.
        vocab_size: rows of the embedding; prompt ids are below it.
        dtype: name of the dtype of the model and its logits.
        unused_defaults: parameters that generation_config.json sets and that have no effect.
        default_gen_length: the server's first length of a canvas that grows, if it sets one.
        default_max_tokens: max_new_tokens of generation_config.json, if given.
        defaults: server-wide defaults by canonical name.
        default_steps: denoising steps of a request that sets none (None: one per canvas token).
        block_length: block length in the config of a block-causal checkpoint.
        block_unit: divisor of all allowed block lengths.
        fp8_from: length in positions from which attention may be fp8.
        cuts_steps: whether long steps are divided, so that other requests run in between.
        has_draft_adapter: whether rows that draft use an adapter of their own.
        guides: compiler of answer formats; None if formats are not supported.
        encode: function from a text to token ids without special tokens; None without a tokenizer.
        spans: function from a text to the first character and last + 1 of each of these tokens;
            None if the tokenizer does not report them.
    """

    family: Family
    ids: SpecialIds
    max_model_len: int
    vocab_size: int
    dtype: str = "float32"
    unused_defaults: tuple[str, ...] = ()
    default_gen_length: int | None = None
    default_max_tokens: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_steps: int | None = None
    block_length: int | None = None
    block_unit: int = 1
    fp8_from: int = 0
    cuts_steps: bool = True
    has_draft_adapter: bool = False
    guides: Guides | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    spans: Callable[[str], Sequence[tuple[int, int]]] | None = None

    @property
    def default_algorithm(self) -> str:
        """Name of the decoding algorithm of a request that names none."""
        name: str = self.defaults.get("algorithm", self.family.default_algorithm)
        return name

    def adapts_drafts(self, algorithm: str) -> bool:
        """Whether requests with an algorithm have rows that use the adapter for drafts."""
        return self.has_draft_adapter and BLOCK_ALGORITHMS[algorithm].drafts

    @property
    def is_shifted(self) -> bool:
        """Whether the row before a token's own row predicts it."""
        return self.family.logit_shift > 0
