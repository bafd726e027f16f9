# SPDX-License-Identifier: Apache-2.0
"""The buffers of every stage: layers take them by these, and plans are their sums.

What projections take besides, each kind of its own, they list themselves (`ops.Workspace`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm.diffusion.buffers import Buffer


class Kind(NamedTuple):
    """What a buffer is for, see `Buffer`."""

    name: str
    is_temporary: bool = False

    def of(self, dtype: torch.dtype, *shape: int) -> Buffer:
        """Of so many numbers a row."""
        return Buffer(self.name, shape, dtype, self.is_temporary)


# Of a step
INPUTS = Kind("inputs", is_temporary=True).of(torch.int64, 3)  # token, position and slot
# Of a sample row: row and position, and what sampling finds.
RESULTS = Kind("results", is_temporary=True).of(torch.float64, 2 + 3)
X = Kind("x")  # the residual stream
UPDATED_X = Kind("updated x")  # where other groups of heads still need it as it was
QKV = Kind("qkv")  # queries, of no head or of all, keys and values, side by side
KEYS, VALUES = Kind("keys"), Kind("values")  # of one group of heads
COS, SIN = Kind("cos"), Kind("sin")
READ_COS, READ_SIN = Kind("read cos"), Kind("read sin")  # of sample rows
SAMPLED = Kind("sample rows")  # hidden states
GIVEN_ROWS = Kind("given rows")  # of these, to other ranks
LOGITS = Kind("logits")
NUM_STREAM_BUFFERS = 2  # chunks of rows on the device at a time when they come from the host

# Of a chunk
NORMED = Kind("normed")
NORMED_ASIDE = Kind("normed rows", is_temporary=True)
OWN_KEYS, OWN_VALUES = Kind("k"), Kind("v")  # before ranks exchange them
GIVEN, RECEIVED = Kind("given"), Kind("received")  # of heads that ranks exchange
QUERIES = Kind("queries")
ATTENDED = Kind("attention", is_temporary=True)
STATISTICS = Kind("statistics", is_temporary=True)  # log-sum-exp of each query and head
COLLECTED = Kind("collected attention", is_temporary=True)  # of several sequences, or sources
COLLECTED_KEYS = Kind("collected keys", is_temporary=True)  # and values, out of their pages
ACTIVATED = Kind("activated")  # silu(gate) * up
GATE_UP = Kind("gate and up")  # side by side
PROJECTED = Kind("projected")  # before it is added to the residual stream
SHARED = Kind("shared expert")  # what an expert of all rows that is apart adds


def visiting(rows: Buffer) -> tuple[Buffer, ...]:
    """Chunks of rows that come from the host, the next on its way while one is worked on."""
    return tuple(rows._replace(name=f"{rows.name} {i}") for i in range(NUM_STREAM_BUFFERS))


def normed_for_queries(
    hidden_size: int, num_columns: int, dtype: torch.dtype, *, quantises: bool
) -> Buffer:
    """What so many columns of queries are computed from.

    Where it takes no less than what attention returns, that can have its memory.
    """
    is_apart = quantises or num_columns > hidden_size
    return (NORMED if is_apart else NORMED_ASIDE).of(dtype, hidden_size)


def of_experts(
    hidden_size: int, count: int, chosen: int, width: int, dtype: torch.dtype, *, in_fp32: bool
) -> tuple[Buffer, ...]:
    """What `count` experts of this width take, `chosen` for a row; scores may be fp32."""
    score = torch.float32.itemsize if in_fp32 else dtype.itemsize
    # scores of all; weights, slots (int32) and choices (int16) of the chosen
    routing = count * score + chosen * (score + 4 + 2)
    return (
        Buffer("routing", (routing,), torch.uint8, is_temporary=True),
        Buffer("activated of experts", (chosen, width), dtype, is_temporary=True),
        Buffer("terms of experts", (chosen, hidden_size), dtype, is_temporary=True),
    )
