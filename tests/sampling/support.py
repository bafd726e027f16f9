# SPDX-License-Identifier: Apache-2.0
"""An output head, hidden rows, and row groups as the sampler receives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds
from vllm.diffusion.sampling import RowGroup

CONFIDENCE = CandidateScoring()
MASK, EOS, EOT = 38, 37, 36
NUM_COLUMNS = 40
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=EOT, stop=frozenset({EOS, EOT})),
    max_model_len=4096,
    vocab_size=NUM_COLUMNS,
)


class HeadModel:
    """The part of a model that sampling uses: a norm, and a head over some columns."""

    def __init__(self, weight: Tensor, vocab_start: int = 0, vocab_size: int | None = None) -> None:
        self.weight = weight
        self.vocab_start = vocab_start
        self.vocab_size = weight.shape[0] if vocab_size is None else vocab_size
        self.head_matrix: Tensor | None = None
        self.most_rows = 0

    def final_norm(self, x: Tensor, buffers: Any = None) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def compute_logits(self, hidden_states: Tensor, buffers: Any = None) -> Tensor:
        self.most_rows = max(self.most_rows, hidden_states.shape[0])
        return hidden_states @ self.weight.T


class GivenLogits:
    """A model whose hidden states are the logits of a rank's columns."""

    head_matrix = None
    vocab_size = NUM_COLUMNS

    def __init__(self, vocab_start: int = 0) -> None:
        self.vocab_start = vocab_start

    def final_norm(self, x: Tensor, buffers: Any = None) -> Tensor:
        return x

    def compute_logits(self, hidden_states: Tensor, buffers: Any = None) -> Tensor:
        return hidden_states.clone()


def head_model(seed: int = 0) -> HeadModel:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.8 * torch.randn(NUM_COLUMNS, 16, generator=generator)
    weight[[MASK, EOS, EOT]] *= 2  # tokens with special rules are often the best ones
    return HeadModel(weight)


def hidden_rows(num_rows: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(seed))


def decided(**parameters: Any) -> DiffusionParams:
    return decision.decide(fields.canonical({"seed": 77, **parameters}), MODEL, [1])


def group(
    rows: list[int],
    step: int = 0,
    forbid_mask: bool = False,
    unconditional: int | None = None,
    scoring: CandidateScoring = CONFIDENCE,
    **parameters: Any,
) -> RowGroup:
    """Return consecutive rows of one request, whose canvas positions are the rows plus 3."""
    assert rows == list(range(rows[0], rows[0] + len(rows))) if rows else True
    first = rows[0] if rows else 0
    index = torch.tensor(rows, dtype=torch.int64)
    return RowGroup(
        params=decided(**parameters),
        scoring=scoring,
        step=step,
        forbid_mask=forbid_mask,
        rows=slice(first, first + len(rows)),
        unconditional_rows=None
        if unconditional is None
        else slice(first + unconditional, first + len(rows) + unconditional),
        positions=index + 3,
    )
