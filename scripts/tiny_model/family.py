# SPDX-License-Identifier: Apache-2.0
"""The interface of a model family that can be trained on the facts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from tiny_model.settings import DecodingSetting

_MODULES = {
    "llada": "tiny_model.llada",
    "dream": "tiny_model.dream",
    "llada-moe": "tiny_model.llada_moe",
    "llada2": "tiny_model.llada2",
    "sdar": "tiny_model.sdar",
    "fast-dllm": "tiny_model.fast_dllm",
    "nemotron": "tiny_model.nemotron",
    "llada21": "tiny_model.llada21",
    "llada22": "tiny_model.llada22",
    "idlm": "tiny_model.idlm",
    "diffusion-gemma": "tiny_model.diffusion_gemma",
}
FAMILY_NAMES = tuple(_MODULES)


@dataclass(frozen=True)
class SpecialTokens:
    """Token strings of a family; their ids follow the ordinary tokens, in this order."""

    bos: str | None
    eos: str  # also fills the canvas after an answer
    mask: str
    eot: str  # ends an answer; may be `eos`
    others: tuple[str, ...] = ()
    names_mask: bool = True  # whether the tokenizer names the mask token

    def in_order(self) -> tuple[str, ...]:
        """Return all strings in the order of their ids."""
        first = () if self.bos is None else (self.bos,)
        return tuple(dict.fromkeys((*first, self.eos, self.mask, *self.others, self.eot)))


@dataclass(frozen=True)
class TokenIds:
    """Token ids that a checkpoint's configuration and the training need."""

    vocab_size: int
    bos: int | None
    eos: int
    mask: int
    eot: int

    @property
    def delete(self) -> int:
        """Token that deletes, in families that edit; it has no name in the tokenizer."""
        return self.vocab_size

    @property
    def split(self) -> int:
        """Token that inserts a mask, in families that edit; it has no name in the tokenizer."""
        return self.vocab_size + 1


class Network(Protocol):
    """A trainable module whose `state_dict` has the tensor names of the released checkpoints.

    Row i of its results always predicts token i: a family that predicts position i with row i-1
    shifts its hidden states itself.

    Attributes:
        block_length: positions per block, where a block attends to itself and the blocks before it;
            0 if every position attends to every other one.
    """

    block_length: int

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """Map ids [B, T] int64 to final normed hidden states [B, T, D] fp32.

        With `clean` [B, T], the same rows without noise, a block of `ids` attends to itself and the
        clean blocks before it, as when it is decoded after finished blocks. Networks without blocks
        ignore `clean`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., D] to logits [..., embedding_size] fp32."""
        ...


@runtime_checkable
class SeededNetwork(Network, Protocol):
    """A Network with a causal context, in whose answers blocks begin with a known token."""

    def seeded(self, ids: Tensor, starts: Tensor, clean: Tensor | None = None) -> Tensor:
        """Return final normed hidden states [B, T, D] fp32 of ids [B, T] int64.

        Rows before starts [B] attend to the rows up to themselves, and row i predicts token i + 1.
        The rows from `starts` on form a block. They attend to all rows, and each predicts its own
        token.

        With `clean` [B, C], rows without noise, `ids` are a noised copy of their last T tokens. The
        result has the clean rows, all causal, before the rows of the copy, whose block attends to
        the clean rows before it.
        """
        ...


@runtime_checkable
class OpenNetwork(Network, Protocol):
    """A Network with a causal context, whose canvases have random tokens instead of masks.

    Attributes:
        num_tokens: number of tokens that the random ones are drawn from.
    """

    num_tokens: int

    def denoised(self, ids: Tensor, starts: Tensor, soft: Tensor | None) -> Tensor:
        """Return final normed hidden states [B, T, D] fp32 of ids [B, T] int64.

        Rows before starts [B] attend to the rows up to themselves. The rows from `starts` on form a
        canvas: they attend to all rows, and each predicts its own token. `soft` [B, T, D] are the
        embeddings that they expect after the previous step; None in the first step.
        """
        ...

    def expected(self, logits: Tensor) -> Tensor:
        """Map logits [..., V] to the embeddings [..., D] that their distributions expect."""
        ...


class Decode(Protocol):
    """A decoding loop."""

    def __call__(
        self,
        network: Network,
        prompts: Tensor,
        mask_id: int,
        setting: DecodingSetting,
        after_forward: Callable[[Tensor], object],
    ) -> Tensor:
        """Fill a canvas behind every prompt.

        prompts [B, P] int64 without `mask_id` give rows [B, P + canvas] int64. `after_forward` is
        called with the rows after each forward.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its tokens, files and network."""

    name: str
    special_tokens: SpecialTokens
    chat_template: str  # Jinja template
    template_texts: tuple[str, ...]  # texts whose words must be single tokens, too
    config: Callable[[TokenIds], dict[str, Any]]  # returns the contents of config.json
    # Maps the contents of config.json to a module that is a Network
    network: Callable[[dict[str, Any]], nn.Module]
    decode: Decode  # the loop that the family's authors publish as their default
    lists_eot: bool = False  # generation_config.json also lists the end of a turn as a stop token


def load_family(name: str) -> Family:
    """Return the family called `name` (one of FAMILY_NAMES); imports torch."""
    return cast("Family", import_module(_MODULES[name]).FAMILY)
