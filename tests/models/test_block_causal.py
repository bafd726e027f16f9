# SPDX-License-Identifier: Apache-2.0
"""Forward passes of block-causal families give the logits of the plain references."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference

from tests.checkpoints import BLOCK_CASES, VOCAB_SIZE, make_checkpoint
from tests.models.support import assert_same_logits, check_bf16, logits, some_ids, staged_logits
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.request.visibility import BlockCausal

PathOf = Callable[[str], Path]
ModelOf = Callable[[str], DiffusionModel]
NAMES = list(BLOCK_CASES)


@pytest.mark.parametrize("length", [1, 8, 23])
@pytest.mark.parametrize("name", NAMES)
def test_the_forward_has_the_blocks_of_the_configuration(
    name: str, length: int, case_path: PathOf, case_model: ModelOf
) -> None:
    model, ids = case_model(name), some_ids(length)
    blocks = 1 if model.family.has_causal_context else model.config.block_length
    wanted = load_reference(case_path(name)).logits(ids[None], blocks)[0]
    assert_same_logits(logits(model, ids), wanted)


@pytest.mark.parametrize("blocks", [1, 4, 7, 32])
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_equal_the_reference(
    name: str, blocks: int, case_path: PathOf, case_model: ModelOf
) -> None:
    """Sequences run whole and in chunks.

    Chunks are whole windows if experts are chosen by windows.
    """
    unit = case_model(name).architecture.scoring.window
    lengths, block_length, chunk = (1, 17, 4, 30), blocks, 5
    if unit:
        lengths, block_length, chunk = (unit, 4 * unit, 2 * unit), unit * (1 + blocks % 3), unit
    sequences = [some_ids(length, seed=length) for length in lengths]
    visibility, reference = BlockCausal(block_length), load_reference(case_path(name))
    wanted = torch.cat([reference.logits(ids[None], block_length)[0] for ids in sequences])
    for rows in (None, chunk):
        given = staged_logits(case_model(name), sequences, rows=rows, visibility=visibility)
        assert_same_logits(torch.cat(given), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_facts_for_the_engine(name: str, case_path: PathOf, case_model: ModelOf) -> None:
    model = case_model(name)
    given = json.loads((case_path(name) / "config.json").read_text())
    assert model.family.logit_shift == load_reference(case_path(name)).logit_shift
    assert model.family.is_block_causal
    usual = 4 if given["model_type"] == "llama" else 32
    assert model.config.block_length == given.get("block_size", given.get("bd_size", usual))
    assert (model.num_heads, model.num_kv_heads) == (4, 2)
    assert (model.vocab_size, model.num_columns) == (VOCAB_SIZE, VOCAB_SIZE)


@pytest.mark.parametrize("family", sorted({case.family for case in BLOCK_CASES.values()}))
def test_bf16_rounds_where_the_reference_rounds(
    family: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, family=family, seed=30, gain=1.0, dtype=torch.bfloat16)
    model = load_model(path, "bfloat16")
    length = 1 if model.family.has_causal_context else model.config.block_length
    check_bf16(
        model, torch.bfloat16, lambda ids, dtype: load_reference(path, dtype).logits(ids, length)[0]
    )
