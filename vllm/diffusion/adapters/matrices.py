# SPDX-License-Identifier: Apache-2.0
"""The matrices of a checkpoint that an adapter may change, by the checkpoint's names."""

from __future__ import annotations

import difflib
import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

HEAD = "lm_head"
# Modules whose rows several experts share, or that choose the experts.
_OF_EXPERTS = re.compile(r"\.experts(\.|$)|\.mlp\.gate$")


class Section(NamedTuple):
    """Rows of a matrix that ranks divide evenly by units.

    Attributes:
        num_rows: number of rows.
        num_units: number of units, such as heads, that ranks never cut. Several ranks share a unit
            if there are more ranks than units. 0 for the rows of the vocabulary.
    """

    num_rows: int
    num_units: int


class Matrix(NamedTuple):
    """A matrix of the checkpoint and its place in the model.

    Attributes:
        product: path of the model's module that multiplies by it, alone or with other matrices.
        num_rows, num_columns: its shape, [out, in].
        sections: its rows, in order, as ranks divide them; empty if ranks divide its columns.
    """

    product: str
    num_rows: int
    num_columns: int
    sections: tuple[Section, ...] = ()


class Shard(NamedTuple):
    """The part of every matrix that a tensor-parallel rank has.

    Attributes:
        rank, size: this rank, and the number of ranks.
        vocabulary: rows of the head.
    """

    rank: int
    size: int
    vocabulary: slice

    def rows(self, matrix: Matrix) -> list[slice]:
        """Return the rows of a matrix on this rank."""
        if not matrix.sections:
            return [slice(0, matrix.num_rows)]
        rows, start = list[slice](), 0
        for num_rows, num_units in matrix.sections:
            part = self.vocabulary
            if num_units:
                width, count = num_rows // num_units, max(num_units // self.size, 1)
                first = self.rank * num_units // self.size
                part = slice(first * width, (first + count) * width)
            rows.append(slice(start + part.start, start + part.stop))
            start += num_rows
        return rows

    def columns(self, matrix: Matrix) -> slice:
        """Return the columns of a matrix on this rank."""
        if matrix.sections:
            return slice(0, matrix.num_columns)
        width = matrix.num_columns // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


class Matrices:
    """All matrices of a checkpoint that adapters may change.

    Args:
        config: the checkpoint's configuration, a `DiffusionConfig`.
        targets: last parts of the names of the allowed matrices; None allows all.
    """

    def __init__(self, config: Any, targets: Collection[str] | None = None) -> None:
        self._config, self._targets = config, None if targets is None else frozenset(targets)
        architecture = config.architecture
        names, all_matrices = architecture.module_names, dict[str, Matrix]()
        for index, stored in enumerate(architecture.layer_names):
            for name, matrix in self._of_layer(index):
                all_matrices[f"{stored}.{names.get(name, name)}"] = matrix
        self._head = names.get(HEAD, HEAD)
        if not config.tie_word_embeddings:
            size = architecture.num_embeddings
            all_matrices[self._head] = Matrix(HEAD, size, config.hidden_size, (Section(size, 0),))
        self._all = all_matrices

    def _of_layer(self, index: int) -> Iterator[tuple[str, Matrix]]:
        """Yield the matrices of a layer by Llama's names."""
        config = self._config
        architecture, width = config.architecture, config.hidden_size
        layer = f"model.layers.{index}"
        q_rows = config.num_attention_heads * config.head_dim
        kv_rows = config.num_key_value_heads * config.head_dim
        q = Section(q_rows, config.num_attention_heads)
        kv = Section(kv_rows, config.num_key_value_heads)
        qkv = f"{layer}.self_attn.qkv_proj"
        if architecture.has_fused_qkv:
            num_rows = q_rows + 2 * kv_rows
            yield "self_attn.qkv_proj", Matrix(qkv, num_rows, width, (q, kv, kv))
        else:
            for name, section in (("q", q), ("k", kv), ("v", kv)):
                matrix = Matrix(qkv, section.num_rows, width, (section,))
                yield f"self_attn.{name}_proj", matrix
        yield "self_attn.o_proj", Matrix(f"{layer}.self_attn.o_proj", width, q_rows)
        mlp, inner = "mlp", architecture.dense_width
        if index in architecture.expert_layers:
            mlp, inner = "mlp.shared_experts", architecture.shared_expert_width
        if inner:
            gate_up = Matrix(f"{layer}.{mlp}.gate_up_proj", inner, width, (Section(inner, inner),))
            yield f"{mlp}.gate_proj", gate_up
            yield f"{mlp}.up_proj", gate_up
            yield f"{mlp}.down_proj", Matrix(f"{layer}.{mlp}.down_proj", width, inner)

    @property
    def all(self) -> Mapping[str, Matrix]:
        """Every matrix that some adapter could change, by its name in the checkpoint."""
        return self._all

    @cached_property
    def allowed(self) -> dict[str, Matrix]:
        """The matrices that adapters of this server may change."""
        return {name: matrix for name, matrix in self._all.items() if self._is_allowed(name)}

    @cached_property
    def last_names(self) -> tuple[str, ...]:
        """The last parts of all names, each once, in the order of a layer."""
        return tuple(dict.fromkeys(last_name(name) for name in self._all))

    def _is_allowed(self, name: str) -> bool:
        return self._targets is None or last_name(name) in self._targets

    def find(self, name: str) -> Matrix:
        """Return the matrix of a name in the checkpoint.

        Raises:
            AdapterError: no adapter may change it.
        """
        matrix = self.allowed.get(name)
        if matrix is not None:
            return matrix
        if name in self._all:
            allowed = ", ".join(sorted(self._targets or ()))
            raise AdapterError(f"{last_name(name)}: wanted one of lora_target_modules {allowed}")
        if _OF_EXPERTS.search(name):
            raise AdapterError(
                f"{name}: experts and their router take no adapters; "
                "wanted attention, dense and shared MLPs"
            )
        if name == self._head:
            raise AdapterError(
                f"{last_name(name)}: it is the embedding's matrix; wanted an adapter without it"
            )
        near = difflib.get_close_matches(name, self._all, n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AdapterError(f"{name}: wanted one of the checkpoint's modules{hint}")


def last_name(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]
