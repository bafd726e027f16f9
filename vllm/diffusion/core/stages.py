# SPDX-License-Identifier: Apache-2.0
"""The buffers of every stage: layers take their memory by these, and plans sum them up.

Projections list further buffers, by kind of weights, themselves (`ops.Workspace`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.diffusion.core.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterable


# Of a stage, in the order in which it takes them: all that its layer, or the engine, may take.
Listed: TypeAlias = tuple[Buffer, ...]

# Of a step: token, position and slot of a row.
INPUTS = Buffer("inputs", (3,), torch.int64, is_temporary=True)
# Of a sample row: row and position, and what sampling finds.
RESULTS = Buffer("results", (2 + 3,), torch.float64, is_temporary=True)
NUM_STREAM_BUFFERS = 2  # chunks of rows on the device at a time when they come from the host


# Of products; projections list theirs.


def gate_up(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Gate and up, side by side."""
    return Buffer("gate and up", (num_columns,), dtype)


def projected(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Product before it is added to the residual stream."""
    return Buffer("projected", (num_columns,), dtype)


def quantised_rows(dtype: torch.dtype, *shape: int) -> Buffer:
    """Rows that were not written as quantised ones."""
    return Buffer("quantised rows", shape, dtype)


# Of the layers.


def _each(names: Iterable[str], dtype: torch.dtype, *shape: int) -> Listed:
    return tuple(Buffer(name, shape, dtype) for name in names)


def residual(dtype: torch.dtype, hidden_size: int, head_groups: int = 1) -> Listed:
    """Residual stream before a layer and, with several groups of heads, with those so far added."""
    return _each(("x", "updated x")[:head_groups], dtype, hidden_size)


def visiting(rows: Buffer) -> Listed:
    """Chunks of rows that come from the host, the next on its way while one is worked on."""
    return tuple(rows._replace(name=f"{rows.name} {i}") for i in range(NUM_STREAM_BUFFERS))


def rotary(dtype: torch.dtype, rotary_dim: int, *, scales: bool, is_read: bool = False) -> Listed:
    """Cosines and sines of a step's or a chunk's rows, or of the sample rows (`is_read`).

    Where queries have factors (`scales`), these follow.
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
    """Keys and values of one group of heads; `is_own` for a chunk's, before ranks exchange them."""
    return _each(("k", "v") if is_own else ("keys", "values"), dtype, num_heads, head_dim)


def exchanged(dtype: torch.dtype, num_heads: int, head_dim: int) -> Listed:
    """Heads that ranks give and receive in an exchange."""
    return _each(("given", "received"), dtype, num_heads, head_dim)


def normed(dtype: torch.dtype, hidden_size: int) -> Buffer:
    """Normed rows, from which keys and values are computed."""
    return Buffer("normed", (hidden_size,), dtype)


def querying(
    dtype: torch.dtype, hidden_size: int, num_heads: int, head_dim: int, *, quantises: bool
) -> Listed:
    """Queries, and the rows that they are computed from, which are given back before attention.

    If the rows take no less than the results of attention, these can have their memory.
    """
    is_apart = quantises or num_heads * head_dim > hidden_size
    rows = normed(dtype, hidden_size) if is_apart else _normed_aside(dtype, hidden_size)
    return Buffer("queries", (num_heads, head_dim), dtype), rows


def _normed_aside(dtype: torch.dtype, hidden_size: int) -> Buffer:
    """Normed rows in the memory that attention's results have later."""
    return Buffer("normed rows", (hidden_size,), dtype, is_temporary=True)


def attending(dtype: torch.dtype, num_heads: int, head_dim: int) -> Listed:
    """Results of attention, their log-sum-exp, and the results of several sequences or sources."""
    return (
        Buffer("attention", (num_heads, head_dim), dtype, is_temporary=True),
        Buffer("statistics", (num_heads,), torch.float32, is_temporary=True),
        Buffer("collected attention", (num_heads, head_dim), dtype, is_temporary=True),
    )


# Attention splits the keys of a chunk of few rows: the rows of one head times the parts are at most
# this many for each multiprocessor.
SPLIT_ROWS = 128


def split_attention(head_dim: int) -> Buffer:
    """Attention of a query to each part of its keys, with the log-sum-exp."""
    return Buffer("parts of attention", (head_dim + 1,), torch.float32, is_temporary=True)


def collected_keys(dtype: torch.dtype, num_heads: int, head_dim: int) -> Buffer:
    """Keys and values copied out of their pages."""
    return Buffer("collected keys", (2, num_heads, head_dim), dtype, is_temporary=True)


def gating(dtype: torch.dtype, hidden_size: int, width: int) -> Listed:
    """Activations silu(gate) * up, and the normed rows, given back before the second product."""
    return Buffer("activated", (width,), dtype), _normed_aside(dtype, hidden_size)


def beside_experts(dtype: torch.dtype, hidden_size: int, *, has_shared: bool) -> Listed:
    """Normed rows, and the result of a separate shared expert."""
    return _each(("normed", "shared expert")[: 1 + has_shared], dtype, hidden_size)


def read_rows(dtype: torch.dtype, hidden_size: int) -> Listed:
    """Hidden states of sample rows, and of those that another rank samples."""
    return _each(("sample rows", "given rows"), dtype, hidden_size)


def head(dtype: torch.dtype, hidden_size: int, num_columns: int) -> Listed:
    """Sample rows after the last norm, and their logits."""
    return normed(dtype, hidden_size), Buffer("logits", (num_columns,), dtype)


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
    """Buffers of `count` experts of this width, `chosen` for a row; scores may be fp32.

    Rows of fp8 experts are fp8, too: first those of all rows, then those of the chosen.
    """
    score = torch.float32.itemsize if in_fp32 else dtype.itemsize
    # scores of all; weights, slots (int32) and choices (int16) of the chosen
    routing = count * score + chosen * (score + 4 + 2)
    listed = (
        Buffer("routing", (routing,), torch.uint8, is_temporary=True),
        Buffer("activated of experts", (chosen, width), dtype, is_temporary=True),
        Buffer("terms of experts", (chosen, hidden_size), dtype, is_temporary=True),
    )
    if not quantises:
        return listed
    num_bytes = max(hidden_size + 4, chosen * (width + 4))  # a byte a number, a scale a row
    return (*listed, Buffer("quantised for experts", (num_bytes,), torch.uint8, is_temporary=True))


def device_layers(num_layers: int, host_layers: int) -> int:
    """Number of layers of kept keys and values that take memory of the device.

    Layers in host memory visit it in turn, `NUM_STREAM_BUFFERS` at a time.
    """
    return num_layers - host_layers + (NUM_STREAM_BUFFERS if host_layers else 0)
