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


class Matrix(NamedTuple):
    """A matrix of the checkpoint and its place in the model.

    Attributes:
        product: path of the model's module that multiplies by it, alone or with other matrices.
        part: its part of that module, in the order of the module's columns: 0 for the first.
        num_rows, num_columns: its shape, [out, in].
    """

    product: str
    part: int
    num_rows: int
    num_columns: int


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
            all_matrices[self._head] = Matrix(
                HEAD, 0, architecture.num_embeddings, config.hidden_size
            )
        self._all = all_matrices

    def _of_layer(self, index: int) -> Iterator[tuple[str, Matrix]]:
        """Yield the matrices of a layer by Llama's names."""
        config = self._config
        architecture, width = config.architecture, config.hidden_size
        layer = f"model.layers.{index}"
        q_rows = config.num_attention_heads * config.head_dim
        kv_rows = config.num_key_value_heads * config.head_dim
        qkv = f"{layer}.self_attn.qkv_proj"
        if architecture.has_fused_qkv:
            yield "self_attn.qkv_proj", Matrix(qkv, 0, q_rows + 2 * kv_rows, width)
        else:
            for part, (name, rows) in enumerate((("q", q_rows), ("k", kv_rows), ("v", kv_rows))):
                yield f"self_attn.{name}_proj", Matrix(qkv, part, rows, width)
        yield "self_attn.o_proj", Matrix(f"{layer}.self_attn.o_proj", 0, width, q_rows)
        mlp, inner = "mlp", architecture.dense_width
        if index in architecture.expert_layers:
            mlp, inner = "mlp.shared_experts", architecture.shared_expert_width
        if inner:
            gate_up = f"{layer}.{mlp}.gate_up_proj"
            yield f"{mlp}.gate_proj", Matrix(gate_up, 0, inner, width)
            yield f"{mlp}.up_proj", Matrix(gate_up, 1, inner, width)
            yield f"{mlp}.down_proj", Matrix(f"{layer}.{mlp}.down_proj", 0, width, inner)

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

    def products(self) -> dict[str, list[Matrix]]:
        """Return the allowed matrices of each module that multiplies, in the order of columns."""
        products = dict[str, list[Matrix]]()
        for matrix in self.allowed.values():
            products.setdefault(matrix.product, []).append(matrix)
        return products

    def first_columns(self) -> dict[str, int]:
        """Return, by name, the first column of a matrix in the product of its module."""
        columns, ends = dict[str, int](), dict[str, int]()
        for name, matrix in self._all.items():
            columns[name] = ends.get(matrix.product, 0)
            ends[matrix.product] = columns[name] + matrix.num_rows
        return columns

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
