# SPDX-License-Identifier: Apache-2.0
"""The most likely token by the head: the fused product chooses as the stored logits do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm.diffusion.ops import head
from vllm.diffusion.ops import sampling as ops_sampling
from vllm.diffusion.ops.head import most_likely_by_head

if TYPE_CHECKING:
    from torch import Tensor

NUM_COLUMNS, PADDED, DEPTH = 40, 48, 16


def head_of(weight: Tensor) -> Any:
    return SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight, bias=None)


@pytest.fixture
def case() -> tuple[Tensor, Tensor]:
    """Rows and a head with padding columns that would win, and ties between columns 3 and 30."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(7, DEPTH, generator=generator)
    weight = torch.randn(PADDED, DEPTH, generator=generator)
    weight[NUM_COLUMNS:] = 1e3
    weight[30] = weight[3] = 4 * x[0]
    return x, weight


@pytest.fixture(params=[False, True], ids=["stored", "fused"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(head, "is_top_faster", lambda *_: request.param)
    return bool(request.param)


def wanted(x: Tensor, weight: Tensor, excluded: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    logits = (x @ weight[:NUM_COLUMNS].t()).double()
    token = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
    logits[:, list(excluded)] = -torch.inf
    return token, logits.softmax(dim=-1).gather(1, token[:, None])[:, 0]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("excluded", [(), (3, 7)])
@pytest.mark.parametrize("rows", [None, [4, 0, 0]])
def test_token_and_probability(
    case: tuple[Tensor, Tensor], excluded: tuple[int, ...], rows: list[int] | None
) -> None:
    x, weight = case
    token, probability = most_likely_by_head(
        x,
        head_of(weight),
        num_columns=NUM_COLUMNS,
        first_column=0,
        whole_rows=True,
        excluded=excluded,
        rows=None if rows is None else torch.tensor(rows),
    )
    best, chosen = wanted(x if rows is None else x[rows], weight, excluded)
    assert torch.equal(token, best)
    torch.testing.assert_close(probability.double(), chosen, rtol=1e-5, atol=1e-12)
    assert token[0 if rows is None else 1] == 3  # of the equals, the lowest


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("boundary", [20, 31])
def test_two_ranks_choose_as_one(
    case: tuple[Tensor, Tensor], boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that wait for each other at every exchange."""
    x, weight = case
    sent: dict[int, Tensor] = {}
    meeting = threading.Barrier(2, timeout=20)
    rank = threading.local()

    def gather(mine: Tensor, dim: int = -1) -> Tensor:
        sent[rank.number] = mine
        meeting.wait()
        whole = torch.cat([sent[0], sent[1]], dim=dim)
        meeting.wait()
        return whole

    def choose(number: int) -> tuple[Tensor, Tensor]:
        rank.number = number
        first, last = ((0, boundary), (boundary, NUM_COLUMNS))[number]
        return most_likely_by_head(
            x,
            head_of(weight[first:last]),
            num_columns=last - first,
            first_column=first,
            whole_rows=False,
            excluded=(3, 35),
        )

    for module in (head, ops_sampling):
        monkeypatch.setattr(module, "tensor_model_parallel_all_gather", gather)
    best, chosen = wanted(x, weight, (3, 35))
    with ThreadPoolExecutor(2) as ranks:
        for token, probability in ranks.map(choose, range(2)):
            assert torch.equal(token, best)
            torch.testing.assert_close(probability.double(), chosen, rtol=1e-5, atol=1e-12)
