# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give the logits of one."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import (
    assert_same_logits,
    engine_config,
    join_world,
    load,
    logits,
    visibility_of,
)
from tests.models.support import staged_logits as staged
from tests.server.fork_server import ForkServer

NUM_RANKS = 2
CASES = ["gqa", "one_kv_head", "odd_vocab_tied", "all_biases"]
CASES += [
    "dream",
    "dream_odd_tied",
    "moe",
    "moe_fused_mix",
    "moe_partial_clipped",
    "dream_wide_heads",
    *("diffullama", "sdar", "fast_dllm", "fast_dllm_tied", "nemotron"),
    *("sdar_moe", "sdar_moe_mix", "llada2", "llada2_dense_first"),
]
# Ranks quantise their own columns, so that only the distance to plain weights is compared.
QUANTISED = ["gqa fp8", "gqa int4", "dream nf4", "moe fp8", "llada2 fp8", "moe int4", "llada2 nf4"]
QUANTISED += ["odd_vocab fp8 head"]
IDS = torch.arange(3, 250, 13)


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of the engine for one of `QUANTISED`."""
    _, kind, *head = name.split()
    return {"quantization": kind, "additional_config": {"dllm": {"fp8_head": bool(head)}}}


def run_rank(rank: int, folder: Path, paths: dict[str, str]) -> None:
    """Load every checkpoint as one of the ranks, and save this rank's logits."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, path in paths.items():
        settings = settings_of(name) if name in QUANTISED else {}
        config = engine_config(Path(path), tensor_parallel_size=NUM_RANKS, **settings)
        join_world(config, folder / "init", rank, NUM_RANKS)
        model = load(config)
        sees = visibility_of(model)
        (chunked,) = staged(model, [IDS], rows=7, keep_queries=False, visibility=sees)
        results[name] = (model.vocab_start, logits(model, IDS), chunked)
    torch.save(results, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, case_path: Callable[[str], Path]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    cases = {name: str(case_path(name.split()[0])) for name in (*CASES, *QUANTISED)}
    paths = json.dumps(cases)
    logs = [folder / f"rank{rank}.log" for rank in range(NUM_RANKS)]
    processes = [
        ForkServer(["-m", __name__, str(rank), str(folder), paths], log, os.environ)
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(300) == 0, log.read_text()
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


@pytest.mark.parametrize("name", QUANTISED)
def test_two_ranks_quantise_as_well_as_one(
    name: str,
    ranks: list[dict[str, Any]],
    case_model: Callable[[str], Any],
    case_path: Callable[[str], Path],
    load_model: Callable[..., Any],
) -> None:
    case = name.split()[0]
    plain = logits(case_model(case), IDS)
    one = logits(load_model(case_path(case), **settings_of(name)), IDS)
    for part in (1, 2):  # the whole forward pass, and chunks
        two = torch.cat([rank[name][part] for rank in ranks], dim=1)
        assert 0 < (two - plain).norm() < 1.5 * (one - plain).norm()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
