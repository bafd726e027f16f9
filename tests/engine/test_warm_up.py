# SPDX-License-Identifier: Apache-2.0
"""The warm-up steps before the first request run without graphs and leave no state behind."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import LLaDAReference

from tests.engine.cases import SERVED
from tests.engine.harness import BLOCKS, Engine, as_request, clear_case, record, running
from vllm.diffusion.config import served_model
from vllm.diffusion.engine.step_times import ROW_BUCKETS
from vllm.diffusion.engine.worker import warm_up as warming
from vllm.diffusion.engine.worker.step_graphs import buckets_of
from vllm.diffusion.engine.worker.warm_up import warm_up
from vllm.diffusion.models.ahead import kernel_calls


def test_a_warm_engine_answers_as_before(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    rows: list[int] = []
    sampled: list[int] = []
    run_alone = warming.run_alone

    def recorded(runner: Any, requests: Any, pages: Any) -> None:
        rows.append(sum(len(new.prompt_token_ids) + new.params.gen_length for new in requests))
        sampled.append(sum(new.params.gen_length for new in requests))
        run_alone(runner, requests, pages)

    monkeypatch.setattr(warming, "run_alone", recorded)
    frozen_before = gc.get_freeze_count()
    warm_up(engine.runner, SERVED, row_budget=64, shows_progress=False)
    buckets = buckets_of(engine.runner.model.config)
    assert {*buckets.whole, *buckets.windows} == set(rows)
    assert rows == sorted(rows, reverse=True)
    # The kernels of the last layer and of the logits are warm for the same row counts.
    assert {count + 1 for count in sampled} >= {count for count in ROW_BUCKETS if count <= 256}
    assert gc.get_freeze_count() <= frozen_before
    assert engine.is_idle()
    (answer,) = engine.ask(as_request(prompt, **BLOCKS))
    assert answer.token_ids == wanted.ids


def test_a_causal_context_is_warm_as_well(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks up to 256 rows follow a prompt of one token, and longer prompts are prefilled."""
    with running(checkpoint("nemotron"), num_gpu_blocks_override=40) as engine:
        batches = record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)
        model = served_model(engine.llm.llm_engine.vllm_config)
        warm_up(engine.runner, model, row_budget=64, shows_progress=False)
        kept = [b for b in batches if b.slot_mapping.size]
        assert {b.num_rows + 1 for b in kept} >= {own for own in ROW_BUCKETS if own <= 256}
        denoised = [b for b in kept if not any(target.is_causal for target in b.targets)]
        assert {b.num_sampled + 2 for b in denoised} >= {o for o in ROW_BUCKETS if o <= 256}
        assert engine.is_idle()


def test_blocks_in_pages_are_warm_as_well(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row count runs in a forward pass with pages and in one without."""
    longer = {"max_position_embeddings": 512}
    with running(
        checkpoint("llada2"), max_model_len=512, hf_overrides=longer, num_gpu_blocks_override=40
    ) as engine:
        batches = record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)
        model = served_model(engine.llm.llm_engine.vllm_config)
        warm_up(engine.runner, model, row_budget=64, shows_progress=False)
        for is_kept in (True, False):
            rows = {b.num_rows for b in batches if (b.slot_mapping.size > 0) == is_kept}
            assert rows == {own for own in ROW_BUCKETS if own <= 512}
        assert {len(b.packing.sequences) for b in batches} == {1, 2}
        assert engine.is_idle()
        # Calls outside of forward passes, for Triton: the head, the experts and, on a GPU,
        # attention.
        with torch.inference_mode():
            results = [call() for call in kernel_calls(engine.runner.model, torch.device("cpu"))]
        heads = [result for result in results if result is not None]
        assert [len(logits) for logits in heads] == [16, 32, 64, 128]
        assert len(results) == 4 + 9 + 8  # heads, experts, joint choices
