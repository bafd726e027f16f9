# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton's kernels in parallel, before steps would compile them one after another.

Triton compiles a kernel when it is first called, which takes a second or two unless its cache on
disk (`TRITON_CACHE_DIR`) has it. Other threads run while it compiles, so each call gets a thread.
"""

from __future__ import annotations

import functools
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.spans import AttentionLayout, PageTable
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.guided import joint
from vllm.diffusion.models.adapted_layers import adapted_products, feed_forward_stages
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vllm.diffusion.models.base import DiffusionModel

logger = init_logger(__name__)

# Row counts for which a kernel has different tiles. Tiles of experts change at some number of rows
# and then at double that number, or more.
_HEAD_ROWS = (16, 32, 64, 128)
_EXPERT_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Row counts for which the products of LoRA adapters have other tiles, or parts of their sums.
_ADAPTED_ROWS = (16, 160, 256, 512, 1024, 2048, 4096)
# Maximum keys of a sequence. Few keys are not split.
_ATTENDED_KEYS = (64, 4096)


def compile_ahead(model: DiffusionModel, device: torch.device) -> None:
    """Compile the Triton kernels of all steps, by calling them.

    A failure is only logged; the step that needs the kernel reports it.
    """
    calls = list(kernel_calls(model, device))
    if not calls:
        return
    # Triton builds its driver module at first use. Do it once here, not in every thread.
    _ = importlib.import_module("triton").runtime.driver.active.utils
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as threads:
        for done in [threads.submit(_run, call, device) for call in calls]:
            if (error := done.exception()) is not None:
                logger.debug("a kernel was not compiled ahead", exc_info=error)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the activation pool needs the memory that these calls used


@torch.inference_mode()
def _run(call: Callable[[], object], device: torch.device) -> None:
    with torch.cuda.device(device):  # new threads begin on the first device
        call()


def kernel_calls(model: DiffusionModel, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield calls on zeros, each of which needs Triton kernels that the other calls do not need."""
    if model.reads_pages(device):
        # Rows within one block read the same keys, so a step with such rows needs no blocks.
        grids = (False, True) if model.family.is_block_causal else (False,)
        for max_keys, is_paged, has_blocks in product(_ATTENDED_KEYS, (False, True), grids):
            variant = {"is_paged": is_paged, "has_blocks": has_blocks}
            yield functools.partial(_attend, model, device, max_keys, **variant)
    yield from joint.kernel_calls(model.vocab_size, model.dtype, device)
    zeros = functools.partial(torch.zeros, dtype=model.dtype, device=device)
    for rows in _HEAD_ROWS:
        x = zeros(rows, model.hidden_size)
        yield functools.partial(model.compute_logits, x)
        if model.head_matrix is not None and ops.samples_in_head(x, model.head_matrix):
            yield functools.partial(ops.most_likely_in_head, x, model.head_matrix, ops.Rows())
    layers = model.architecture.expert_layers
    # Several ranks sum the results, and all of them must make these calls in the same order.
    if layers and ops.tensor_parallel().num_ranks == 1:
        layer = model.layers[max(layers)]
        for rows in _EXPERT_ROWS:
            x = zeros(rows, model.hidden_size)
            for stage in feed_forward_stages(layer.mlp_stage):
                yield functools.partial(stage.feed_forward, x, FreshBuffers(device))
    if model.adapting is not None:
        yield from _adapter_calls(model)


def _adapter_calls(model: DiffusionModel) -> Iterator[Callable[[], object]]:
    """Yield calls of the products of LoRA adapters, one for each size."""
    seen = set[object]()
    for projection, is_gated in adapted_products(model):
        key = projection.sizes, is_gated
        if key not in seen:
            seen.add(key)
            for rows in _ADAPTED_ROWS:
                yield functools.partial(projection.rehearse, rows, is_gated=is_gated)


def _attend(
    model: DiffusionModel,
    device: torch.device,
    max_keys: int,
    *,
    is_paged: bool,
    has_blocks: bool,
) -> Tensor:
    """Attend to one sequence of a page; keys are split if `max_keys` is large."""
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    rows = torch.zeros(PAGE_SIZE, sum(heads), model.head_dim, dtype=model.dtype, device=device)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k, v = rows.split(heads, dim=1)
    layout = AttentionLayout(
        *(numbers(0, PAGE_SIZE), numbers(0), numbers(PAGE_SIZE)),
        max_queries=PAGE_SIZE,
        max_keys=max_keys,
        spans=None,
        pages=PageTable(numbers(0), PAGE_SIZE) if is_paged else None,
        block_lengths=numbers(PAGE_SIZE) if has_blocks else None,
        firsts=numbers(0) if has_blocks else None,
    )
    return model.layers[0].attention.kernel(q, k, v, layout)
