# SPDX-License-Identifier: Apache-2.0
"""The buffers of every stage: layers allocate them, and plans sum their sizes.

Projections declare further buffers themselves, by kind of weight (`ops.Workspace`). The memory of
buffers comes from a pool or from PyTorch (`Buffers`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor


class Buffer(NamedTuple):
    """Scratch memory that a stage takes for each of its rows.

    Attributes:
        name: name, unique within a step.
        is_temporary: whether PyTorch allocates the buffer and the pool only counts it; otherwise
            the pool allocates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_temporary: bool = False

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def quantised(self) -> tuple[Buffer, Buffer]:
        """Buffers of equally shaped fp8 rows: the numbers, and a scale for each row."""
        scales = Buffer(f"scales of {self.name}", (), torch.float32, self.is_temporary)
        return self._replace(dtype=torch.float8_e4m3fn), scales

    def take(self, buffers: Buffers, num_rows: int) -> Tensor:
        """Return an uninitialised tensor [num_rows, *shape]."""
        return buffers.take(self.name, (num_rows, *self.shape), self.dtype)

    def expect(self, buffers: Buffers, num_rows: int) -> None:
        """Announce that PyTorch itself will allocate `num_rows` rows."""
        buffers.expect(self.name, num_rows * self.row_bytes)


def row_bytes(buffers: Iterable[Buffer], *, is_temporary: bool | None = None) -> int:
    """Sum the bytes of a row over the buffers, or over one kind if `is_temporary` is given."""
    return sum(b.row_bytes for b in buffers if is_temporary in (None, b.is_temporary))


class Buffers(Protocol):
    """Named scratch memory; buffers taken within a scope are released at its end."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous tensor."""

    def expect(self, name: str, num_bytes: int) -> None:
        """Announce that PyTorch itself will allocate `num_bytes` before the scope ends."""

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        """Return the context of a stage, or of a part of a stage."""


class FreshBuffers:
    """Allocates a new tensor for every buffer, which PyTorch frees when it is unused.

    Args:
        device: device of the tensors.
        counted: buffers to which their bytes are announced; None announces nothing. A pool on
            virtual memory counts them together with attention's results, which are also outside its
            buffers.
    """

    def __init__(self, device: torch.device, counted: Buffers | None = None) -> None:
        self._device, self._counted = device, counted

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.expect(name, math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def expect(self, name: str, num_bytes: int) -> None:
        if self._counted is not None:
            self._counted.expect(name, num_bytes)

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        return nullcontext()


# All buffers that the layer or the engine may take in a stage, in the order in which it takes
# them.
Listed: TypeAlias = tuple[Buffer, ...]

# Buffer of a step: token, position and slot of each row.
INPUTS = Buffer("inputs", (3,), torch.int64, is_temporary=True)
# Buffer of sample rows: row, position, and the results of sampling.
RESULTS = Buffer("results", (2 + 3,), torch.float64, is_temporary=True)
# Chunks of rows on the device at a time when rows are streamed from the host.
NUM_STREAM_BUFFERS = 2


# Buffers of products; projections declare their own in addition.


def gate_up(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Gate and up values, side by side."""
    return Buffer("gate and up", (num_columns,), dtype)


def projected(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Product before it is added to the residual stream."""
    return Buffer("projected", (num_columns,), dtype)


def low_rank(num_ranks: int) -> Buffer:
    """Products with the first matrices of LoRA adapters."""
    return Buffer("low rank", (num_ranks,), torch.float32)


def low_rank_by_slot(dtype: torch.dtype, num_numbers: int) -> Buffer:
    """Products with the first matrices of a row's adapter, and zeros for all other slots."""
    return Buffer("low rank by slot", (num_numbers,), dtype)


def joined_product(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Product whose last columns are products with the first matrices of all adapters."""
    return Buffer("joined product", (num_columns,), dtype)


def plain_rows(dtype: torch.dtype, *shape: int) -> Buffer:
    """Rows in the model dtype that are quantised later, or were before."""
    return Buffer("plain rows", shape, dtype)


def quantised_rows(dtype: torch.dtype, *shape: int) -> Buffer:
    """Quantised copy of rows that their kernel did not write in fp8."""
    return Buffer("quantised rows", shape, dtype)


# Buffers of the layers.


def _each(names: Iterable[str], dtype: torch.dtype, *shape: int) -> Listed:
    return tuple(Buffer(name, shape, dtype) for name in names)


def residual(dtype: torch.dtype, hidden_size: int, head_groups: int = 1) -> Listed:
    """Residual stream before a layer; with several head groups, also with earlier groups added."""
    return _each(("x", "updated x")[:head_groups], dtype, hidden_size)


def visiting(rows: Buffer) -> Listed:
    """Chunks of rows streamed from the host; one is copied while another is processed."""
    return tuple(rows._replace(name=f"{rows.name} {i}") for i in range(NUM_STREAM_BUFFERS))


def rotary(dtype: torch.dtype, rotary_dim: int, *, scales: bool, is_read: bool = False) -> Listed:
    """Cosines and sines of a step's or a chunk's rows, or of the sample rows (`is_read`).

    If queries have factors (`scales`), these follow.
    """
    kind = "read " if is_read else ""
    tables = _each((f"{kind}cos", f"{kind}sin"), dtype, rotary_dim)
    return (*tables, Buffer(f"{kind}query factors", (), dtype)) if scales else tables


def fused_heads(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> Buffer:
    """Queries (of all heads, or of none), keys and values, side by side."""
    return Buffer("qkv", ((num_heads + 2 * num_kv_heads) * head_dim,), dtype)


def keys_values(
    dtype: torch.dtype, num_heads: int, head_dim: int, *, is_own: bool = False
) -> Listed:
    """Keys and values of a group of heads; with `is_own`, a chunk's, before ranks exchange them."""
    return _each(("k", "v") if is_own else ("keys", "values"), dtype, num_heads, head_dim)


def exchanged(dtype: torch.dtype, num_heads: int, head_dim: int) -> Listed:
    """Heads that ranks send and receive in an exchange."""
    return _each(("given", "received"), dtype, num_heads, head_dim)


def normed(dtype: torch.dtype, hidden_size: int) -> Buffer:
    """Normalised rows, from which keys and values are computed."""
    return Buffer("normed", (hidden_size,), dtype)


def querying(
    dtype: torch.dtype, hidden_size: int, num_heads: int, head_dim: int, *, quantises: bool
) -> Listed:
    """Queries, and the rows from which they are computed, which are released before attention.

    If the rows are at least as large as the results of attention, both can share memory.
    """
    is_apart = quantises or num_heads * head_dim > hidden_size
    rows = normed(dtype, hidden_size) if is_apart else _normed_aside(dtype, hidden_size)
    return Buffer("queries", (num_heads, head_dim), dtype), rows


def _normed_aside(dtype: torch.dtype, hidden_size: int) -> Buffer:
    """Normalised rows in the memory that attention's results use later."""
    return Buffer("normed rows", (hidden_size,), dtype, is_temporary=True)


def attending(dtype: torch.dtype, num_heads: int, head_dim: int) -> Listed:
    """Results of attention, their log-sum-exp, and the combined results of several sources."""
    return (
        Buffer("attention", (num_heads, head_dim), dtype, is_temporary=True),
        Buffer("statistics", (num_heads,), torch.float32, is_temporary=True),
        Buffer("collected attention", (num_heads, head_dim), dtype, is_temporary=True),
    )


# Attention splits the keys of a chunk with few rows. The rows of one head times the number of
# parts is at most this number per multiprocessor.
SPLIT_ROWS = 128
# The same for parts of a fixed number of keys, which do not depend on the number of rows.
FIXED_PART_ROWS = 16 * SPLIT_ROWS


def split_attention(head_dim: int) -> Buffer:
    """Attention of a query to each part of its keys, with the log-sum-exp."""
    return Buffer("parts of attention", (head_dim + 1,), torch.float32, is_temporary=True)


def collected_keys(dtype: torch.dtype, num_heads: int, head_dim: int) -> Buffer:
    """Keys and values copied out of their pages."""
    return Buffer("collected keys", (2, num_heads, head_dim), dtype, is_temporary=True)


def gating(dtype: torch.dtype, hidden_size: int, width: int) -> Listed:
    """Activations silu(gate) * up, and the normalised rows, released before the second product."""
    return Buffer("activated", (width,), dtype), _normed_aside(dtype, hidden_size)


def beside_experts(dtype: torch.dtype, hidden_size: int, *, has_shared: bool) -> Listed:
    """Normalised rows, and the result of a separate shared expert."""
    return _each(("normed", "shared expert")[: 1 + has_shared], dtype, hidden_size)


def read_rows(dtype: torch.dtype, hidden_size: int) -> Listed:
    """Hidden states of sample rows, and of rows that another rank samples."""
    return _each(("sample rows", "given rows"), dtype, hidden_size)


def head(dtype: torch.dtype, hidden_size: int, num_columns: int) -> Listed:
    """Sample rows after the last norm, and their logits."""
    return normed(dtype, hidden_size), Buffer("logits", (num_columns,), dtype)


def capped(dtype: torch.dtype, num_columns: int) -> Listed:
    """Logits with a soft cap in fp32, and rounded with their softmax."""
    return (
        Buffer("capped logits", (num_columns,), torch.float32, is_temporary=True),
        Buffer("rounded logits", (2, num_columns), dtype, is_temporary=True),
    )


def of_experts(
    hidden_size: int,
    count: int,
    chosen: int,
    width: int,
    dtype: torch.dtype,
    *,
    in_fp32: bool,
    quantises: bool,
) -> Listed:
    """Buffers of `count` experts of this width, `chosen` per row; scores may be fp32.

    The rows of fp8 experts are fp8, too: first all rows, then the rows of the chosen experts.
    """
    score = torch.float32.itemsize if in_fp32 else dtype.itemsize
    # Scores of all experts; weights, slots (int32) and choices (int16) of the chosen experts.
    routing = count * score + chosen * (score + 4 + 2)
    listed = (
        Buffer("routing", (routing,), torch.uint8, is_temporary=True),
        Buffer("activated of experts", (chosen, width), dtype, is_temporary=True),
        Buffer("terms of experts", (chosen, hidden_size), dtype, is_temporary=True),
    )
    if not quantises:
        return listed
    # One byte per number, and one fp32 scale per row.
    num_bytes = max(hidden_size + 4, chosen * (width + 4))
    return (*listed, Buffer("quantised for experts", (num_bytes,), torch.uint8, is_temporary=True))


def device_layers(num_layers: int, host_layers: int) -> int:
    """Return the number of layers of kept keys and values that take device memory.

    Layers in host memory are copied to the device in turn, `NUM_STREAM_BUFFERS` at a time.
    """
    return num_layers - host_layers + (NUM_STREAM_BUFFERS if host_layers else 0)
