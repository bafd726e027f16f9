# SPDX-License-Identifier: Apache-2.0
"""What a model family must provide to be trained on the facts."""

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
    "llada22": "tiny_model.llada22",
}
FAMILY_NAMES = tuple(_MODULES)


@dataclass(frozen=True)
class SpecialTokens:
    """Token strings of a family; ids follow those of the ordinary tokens, in this order."""

    bos: str | None
    eos: str  # also fills the canvas behind an answer
    mask: str
    eot: str  # ends an answer; may be `eos`
    others: tuple[str, ...] = ()
    names_mask: bool = True  # the tokenizer says which one is the mask

    def in_order(self) -> tuple[str, ...]:
        """All strings in the order of their ids."""
        first = () if self.bos is None else (self.bos,)
        return tuple(dict.fromkeys((*first, self.eos, self.mask, *self.others, self.eot)))


@dataclass(frozen=True)
class TokenIds:
    """Ids that a checkpoint's configuration and the training need."""

    vocab_size: int
    bos: int | None
    eos: int
    mask: int
    eot: int


class Network(Protocol):
    """A trainable module whose `state_dict` bears the tensor names of the released checkpoints.

    Row i of its results always speaks of token i: a family that reads position i from row i-1
    shifts its hidden states itself.

    Attributes:
        block_length: positions of a block that sees itself and the blocks before it; 0 where every
            position sees every other one.
    """

    block_length: int

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> final normed hidden states [B, T, D] fp32.

        With `clean` [B, T], the same rows without noise, a block of `ids` sees itself and the clean
        blocks before it, as it does when it is decoded behind finished ones. Networks without
        blocks leave it aside.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., embedding_size] fp32."""
        ...


@runtime_checkable
class SeededNetwork(Network, Protocol):
    """A Network whose context is causal, and of whose answers blocks begin with a known token."""

    def seeded(self, ids: Tensor, starts: Tensor, clean: Tensor | None = None) -> Tensor:
        """Final normed hidden states [B, T, D] fp32 of ids [B, T] int64.

        Rows before starts [B] see those up to themselves, and row i speaks of token i + 1. The rows
        from there on, a block, see all, and speak of themselves.

        With `clean` [B, C], rows without noise, `ids` are a noised copy of the last T of them; the
        result has the clean rows, all causal, before those of the copy, whose block sees the clean
        rows before it.
        """
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
        """Fills a canvas behind every prompt.

        prompts [B, P] int64 without `mask_id` -> rows [B, P + canvas] int64. `after_forward` is
        shown the rows after each forward.
        """
        ...


@dataclass(frozen=True)
class Family:
    """A model family: its tokens, files and network."""

    name: str
    special_tokens: SpecialTokens
    chat_template: str  # Jinja
    template_texts: tuple[str, ...]  # whose words must be single tokens, too
    config: Callable[[TokenIds], dict[str, Any]]  # -> contents of config.json
    network: Callable[[dict[str, Any]], nn.Module]  # config.json -> a module that is a Network
    decode: Decode  # the loop that the family's authors publish as its default
    lists_eot: bool = False  # generation_config.json names the end of a turn as a stop token, too


def load_family(name: str) -> Family:
    """The family called `name` (one of FAMILY_NAMES); imports torch."""
    return cast("Family", import_module(_MODULES[name]).FAMILY)
