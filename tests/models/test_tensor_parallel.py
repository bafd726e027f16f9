# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks compute what one does."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import multiprocessing

from tests.models.support import assert_same_logits, engine_config, join_world, load, logits
from tests.models.support import staged_logits as staged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_RANKS = 2
CASES = ["gqa", "one_kv_head", "odd_vocab_tied", "all_biases"]
CASES += [
    "dream",
    "dream_odd_tied",
    "moe",
    "moe_fused_mix",
    "moe_partial_clipped",
    "dream_wide_heads",
    *("diffullama", "sdar", "fast_dllm", "fast_dllm_tied"),
    *("sdar_moe", "sdar_moe_mix", "llada2", "llada2_dense_first"),
]
IDS = torch.arange(3, 250, 13)


def run_rank(rank: int, folder: Path, paths: dict[str, Path]) -> None:
    """Load every checkpoint as one of the ranks, and save this rank's logits."""
    torch.set_num_threads(1)
    gc.freeze()  # as in the fixture of this process
    results: dict[str, Any] = {}
    for name, path in paths.items():
        config = engine_config(path, tensor_parallel_size=NUM_RANKS)
        join_world(config, folder / "init", rank, NUM_RANKS)
        model = load(config)
        visibility = model.family.visibility.with_blocks_of(model.config.block_length)
        (chunked,) = staged(model, [IDS], rows=7, keep_queries=False, visibility=visibility)
        results[name] = (model.vocab_start, logits(model, IDS), chunked)
    torch.save(results, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, case_path: Callable[[str], Path]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    paths = {name: case_path(name) for name in CASES}
    multiprocessing.spawn(run_rank, (folder, paths), nprocs=NUM_RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(
    name: str, ranks: list[dict[str, Any]], case_model: Callable[[str], Any]
) -> None:
    model = case_model(name)
    wanted = logits(model, IDS)
    columns = 0
    for rank in ranks:
        assert rank[name][0] == columns
        columns += rank[name][1].shape[1]
    assert columns == model.vocab_size
    assert_same_logits(torch.cat([rank[name][1] for rank in ranks], dim=1), wanted)
    assert_same_logits(torch.cat([rank[name][2] for rank in ranks], dim=1), wanted)
