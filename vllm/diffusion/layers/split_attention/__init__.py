# SPDX-License-Identifier: Apache-2.0
"""Attention that splits the keys among programs if there are few queries.

With few queries, one program per tile of queries would leave most of the GPU idle. So each program
computes a part of the keys, and a second kernel merges the parts by their sums of exponentials, as
Flash-Decoding does (Dao, Haziza, Massa, Sizov, 2023).

Letters as in `attention_backends`: R query rows, N key rows, S sequences, H and KV heads, hd width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core import stages
from vllm.diffusion.core.devices import capability, num_multiprocessors, overlaps
from vllm.diffusion.core.pages import HEAD_DIMS
from vllm.diffusion.core.triton_kernels import IS_INTERPRETED, load_kernels, on_device_of

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout

MAX_SPLITS = 64  # the second kernel holds one row of each part at once
# Keys of a part, if results must not depend on other rows (`part_keys`).
FIXED_PART_KEYS = 512
# Minimum steps of a program over its keys; shorter programs would mostly start and merge.
_MIN_STEPS = 4


@dataclass(frozen=True)
class SplitConfig:
    """Tile of one program, and its launch resources.

    Attributes:
        rows: queries times the query heads per key/value head.
        keys: keys of one step.
        programs: number of programs per multiprocessor to reach by splitting.
        num_warps, num_stages: Triton's launch options.
    """

    rows: int
    keys: int
    programs: int
    num_warps: int
    num_stages: int


# The fastest of the tiles of 16 to 128 rows and 32 or 64 keys on an H200, or within 10 % of it:
# with one sequence and with many, with grouped heads and without (bench_attention.py --tiles).
# Loads by tensor descriptors gain 4 % with tiles of 128 rows and many sequences, and lose more
# elsewhere.
CONFIG = SplitConfig(64, 64, programs=2, num_warps=4, num_stages=3)
# Wide heads leave room for fewer stages.
WIDE_CONFIGS = {
    256: SplitConfig(128, 32, programs=1, num_warps=8, num_stages=3),
    512: SplitConfig(64, 32, programs=1, num_warps=8, num_stages=2),
}
_WIDE_CAPABILITIES = (9, 10)  # major versions of GPUs whose shared memory holds these tiles


def choose_splits(num_programs: int, max_keys: int, config: SplitConfig, device_size: int) -> int:
    """Return the number of parts to split the keys into, from numbers on the host.

    Args:
        num_programs: number of programs without splitting.
        max_keys: upper bound of the keys of every sequence.
        device_size: number of multiprocessors of the GPU.
    """
    wanted = config.programs * device_size // max(1, num_programs)
    max_splits = -(-max_keys // (_MIN_STEPS * config.keys))
    return max(1, min(wanted, max_splits, MAX_SPLITS))


def can_split(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether `split_attention` accepts such tensors: 16-bit, on Ampere or later, with Triton.

    Under Triton's interpreter it accepts fp16 and fp32 on the CPU, for tests.
    """
    if IS_INTERPRETED:
        # The interpreter's products treat the bit patterns of bf16 as integers.
        is_taken = dtype in (torch.float16, torch.float32)
    else:
        is_taken = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        is_taken = is_taken and capability(device) >= (8, 0)
        if head_dim in WIDE_CONFIGS:
            is_taken = is_taken and capability(device)[0] in _WIDE_CAPABILITIES
    return is_taken and head_dim in HEAD_DIMS and _kernels() is not None


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout[Tensor],
    out: Tensor | None = None,
    config: SplitConfig | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    part_keys: int = 0,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(hd)) v of every sequence; sums and statistics in fp32.

    Nothing is read back to the host, and the size of the launches depends only on shapes and
    bounds, so a CUDA graph can contain them. Between its kernels it keeps at most `config.programs`
    tiles of fp32 rows per multiprocessor.

    Args:
        q: [R, H, hd] that `can_split`; hd is contiguous, other strides are free.
        k, v: [N, KV, hd] of q's dtype, with free strides too; query head h reads key/value head h
            // (H / KV).
        layout: the sequences; host spans are not needed. Its tensors and pages are read while the
            previous kernel still runs, so the previous kernel must not write them.
        out: [R, H, hd] contiguous, of the dtype of q; allocated if not given.
        config: tiles to use instead of the measured ones.
        scale: factor of q k^T instead of 1 / sqrt(hd).
        window: number of keys that a row on a grid reads, its own included. The rows of a sequence
            without a grid read, in addition to their block, the `window` - 1 keys before
            `Span.first`, where the block begins. 0 for all keys. The layout must have `firsts`.
        part_keys: number of keys of every part, counted from a sequence's first key, a multiple of
            `config.keys`. The parts are then merged in their order, so that a row's result does not
            depend on other rows, nor on the number of keys that it does not read. 0: parts that
            keep the GPU busy. Not with a window.

    Returns:
        [R, H, hd] contiguous.

    Raises:
        ValueError: the tensors are not of a kind that `can_split`, pages or parts are not whole
            tiles, or a window lacks `firsts` or comes with `part_keys`.
    """
    config = config or WIDE_CONFIGS.get(q.shape[2], CONFIG)
    _check(q, layout, config, window, part_keys)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] and len(layout.key_counts):
        scale = q.shape[2] ** -0.5 if scale is None else scale
        _launch((q, k, v, out), layout, config, scale=scale, window=window, part_keys=part_keys)
    return out


def _launch(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: AttentionLayout[Tensor],
    config: SplitConfig,
    *,
    scale: float,
    window: int,
    part_keys: int,
) -> None:
    """Launch the kernels; `heads` contains q, k, v and out."""
    q, k, *_ = heads
    num_rows, num_heads, _ = q.shape
    num_kv_heads, num_sequences = k.shape[1], len(layout.key_counts)
    group = num_heads // num_kv_heads
    kernels = _kernels()
    assert kernels is not None
    with on_device_of(q):
        kernels.launch(
            heads,
            (*layout[:3], layout.block_lengths, layout.firsts),
            None if layout.pages is None else layout.pages.rows,
            page_size=0 if layout.pages is None else layout.pages.size,
            window=window,
            scale=math.log2(math.e) * scale,
            num_tiles=_max_tiles(num_rows, num_sequences, layout.max_queries, group, config.rows),
            num_splits=_num_splits(q, num_kv_heads, layout, config, window, part_keys),
            min_keys=_MIN_STEPS * config.keys,
            part_keys=part_keys,
            max_splits=MAX_SPLITS,
            config=config,
            overlaps=overlaps(q.device),
        )


def _num_splits(
    q: Tensor,
    num_kv_heads: int,
    layout: AttentionLayout[Tensor],
    config: SplitConfig,
    window: int,
    part_keys: int,
) -> int:
    """Return the number of parts to split the keys into; arguments as for `split_attention`."""
    num_rows, num_heads, _ = q.shape
    tiles = -(-num_rows * (num_heads // num_kv_heads) // config.rows)
    # Lower bound of the tiles with rows. The last sequence of a graph may have only padding rows.
    num_filled = max(tiles, len(layout.key_counts) - 1)
    max_keys = min(layout.max_keys, window + layout.max_queries) if window else layout.max_keys
    if part_keys:
        num_parts = -(-max_keys // part_keys)
        is_apart = choose_splits(
            num_filled * num_kv_heads, max_keys, config, num_multiprocessors(q.device)
        )
        most = stages.FIXED_PART_ROWS * num_multiprocessors(q.device)
        return num_parts if is_apart > 1 and num_rows * num_heads * num_parts <= most else 1
    return choose_splits(num_filled * num_kv_heads, max_keys, config, num_multiprocessors(q.device))


def _check(
    q: Tensor, layout: AttentionLayout[Tensor], config: SplitConfig, window: int, part_keys: int
) -> None:
    pages = layout.pages
    if part_keys % config.keys or (window and part_keys):
        wanted = "0 with a window" if window else f"a multiple of {config.keys}"
        raise ValueError(f"split_attention: part_keys: wanted {wanted}, given {part_keys}")
    if window and layout.firsts is None:
        raise ValueError("split_attention: layout.firsts: wanted with a window, given None")
    if not can_split(q.dtype, q.shape[2], q.device):
        raise ValueError(
            f"split_attention: wanted 16-bit heads of a width in {HEAD_DIMS} on a GPU with Triton,"
            f" given {q.dtype} heads of width {q.shape[2]} on {q.device}"
        )
    if pages is not None and (pages.size < 1 or pages.size % config.keys):
        raise ValueError(
            f"split_attention: page size: wanted a multiple of {config.keys}, given {pages.size}"
        )


def _max_tiles(
    num_rows: int, num_sequences: int, max_queries: int, group: int, tile_rows: int
) -> int:
    """Return an upper bound of the tiles of all sequences, for any division of the rows."""
    of_all = (num_rows * group + num_sequences * (tile_rows - 1)) // tile_rows
    return min(of_all, num_sequences * -(-max_queries * group // tile_rows))


def _kernels() -> ModuleType | None:
    return load_kernels(f"{__name__}.split_kernel")
