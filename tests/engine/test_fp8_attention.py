# SPDX-License-Identifier: Apache-2.0
"""Requests with fp8 attention approximate bf16 ones, and do not depend on batches or chunks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import random_prompt
from tests.engine.cases import CUT, SHORT
from tests.engine.harness import (
    Engine,
    Request,
    record,
    record_plans,
    refusal_error,
    running,
    shrink,
    tokens,
)
from tests.engine.ranks import Ranked, ranked
from vllm.diffusion.config import Settings
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.worker.row_shares import RowPartition
from vllm.diffusion.memory import StepShape
from vllm.diffusion.memory.footprint import ROUNDING_BYTES
from vllm.diffusion.memory.plan import Plan, Residency
from vllm.diffusion.parallel.groups import Ranks
from vllm.diffusion.request.families import SDAR
from vllm.diffusion.request.fields import server_defaults
from vllm.diffusion.request.params import DiffusionParams

OWN: dict[str, Any] = {"attention_dtype": "fp8", "fp8_attention_min_tokens": 40}
SETTINGS: dict[str, Any] = {"additional_config": {"dllm": {**OWN, "longest_pause_ms": 60_000}}}
READ = list(range(0, 64, 5))
SCORE = {"score": {"positions": READ, "token_ids": [[5, 6, 7]] * len(READ)}}
LONG = Request(random_prompt(64, 9), SCORE, {"max_tokens": 1})
LAYOUTS = {
    "chunks": Residency(False, fp8_attention=True),
    "head groups": Residency(False, 2, fp8_attention=True),
    "rows on the host": Residency(False, 2, True, fp8_attention=True),
}
# Bound on the change of a score by a different survey or by a product of fewer rows, unless a
# value is near the boundary of a rounding.
ALIKE = 1e-3


def scores(engine: Engine, *asks: Request) -> torch.Tensor:
    return torch.tensor([answer.report["scores"]["logprobs"] for answer in engine.ask(*asks)])


@pytest.fixture(scope="module", params=["gqa", "dream", "moe_dense_mix"])
def fp8(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint(request.param), **SETTINGS) as engine:
        yield engine


def test_fp8_scores_differ_and_follow_the_plain_ones(
    fp8: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 scores correlate with plain scores.

    The weights are scaled up and rows choose experts, so that rounding has a large effect here.
    """
    actual = scores(fp8, LONG).flatten()
    monkeypatch.setattr(DiffusionParams, "has_fp8_attention", lambda *_: False)
    wanted = scores(fp8, LONG).flatten()
    assert not torch.equal(actual, wanted)
    assert torch.corrcoef(torch.stack((actual, wanted)))[0, 1] > 0.8


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_chunks_are_equal_to_the_whole(
    fp8: Engine, layout: Residency, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scores(fp8, LONG)
    monkeypatch.setattr(fp8.runner.planner, "plan", lambda *_: Plan(layout, CUT.rows))
    assert (scores(fp8, LONG) - whole).abs().max() < ALIKE


def test_batches_are_equal_to_requests_alone(fp8: Engine) -> None:
    """Scores are equal to the bit: scales belong to a request, and its long steps run alone."""
    writes = [
        Request(random_prompt(n, n), {**SHORT, "cfg_scale": c}) for n, c in ((40, 0.0), (50, 1.0))
    ]
    short = Request(random_prompt(9, 1), SHORT)
    alone = [tokens(fp8.ask(ask)) for ask in (*writes, short)]
    together = tokens(fp8.ask(*writes, LONG, short))
    assert [*together[:2], together[3]] == [actual for (actual,) in alone]
    other = Request(random_prompt(64, 4), SCORE, LONG.sampling)
    assert torch.equal(scores(fp8, LONG, other)[0], scores(fp8, LONG)[0])


def test_kept_keys_stay_plain(fp8: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 applies to forward passes over all positions; cached keys stay plain and share steps."""
    parameters = {**SHORT, "cache": "prefix", "block_length": 8}
    kinds = record(
        monkeypatch, fp8.runner.planner, "plan", lambda plan, *_: plan.layout.fp8_attention
    )
    fp8.ask(Request(random_prompt(48, 2), parameters))
    assert kinds == [True, False, True, False]


def test_kept_keys_of_the_first_layer_are_equal(
    fp8: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fp8 attention precedes the first layer, so its stored keys do not depend on the layout."""
    request = Request(
        random_prompt(48, 2), {**SHORT, "cache": "prefix", "steps": 1, "block_length": 16}
    )
    results = []
    layouts = LAYOUTS["head groups"]._replace(fp8_attention=False), *LAYOUTS.values()
    for layout in layouts:
        with monkeypatch.context() as patch:
            patch.setattr(fp8.runner.planner, "plan", lambda *_, to=layout: Plan(to, CUT.rows))
            fp8.ask(request)
        kept = fp8.runner.caches
        results.append([part(0).clone() for part in (kept.keys, kept.values)])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one.abs().amax() > 0 and torch.allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_measured_peaks_are_the_predicted_ones(
    quantization: str | None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured peaks match the plan, from a large pool to one too small for plain attention."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    parameters = {**SHORT, "gen_length": 512, "block_length": 512, "steps": 1}
    ask, sizes = Request(random_prompt(512), parameters), {"max_model_len": 1024, **SETTINGS}
    with running(checkpoint("mha"), quantization=quantization, **sizes) as engine:
        step = StepShape(1024, 512, 1024)
        plain, least = (
            engine.runner.planner.search.smallest_bytes(step._replace(fp8_attention=is_fp8))
            for is_fp8 in (False, True)
        )
        assert least < 0.8 * plain
        for budget in (64 << 20, int(1.5 * least), int(1.1 * least)):
            shrink(engine.runner, budget)
            actual = record_plans(engine, monkeypatch)
            engine.ask(ask)
            ((plan, usage),) = actual
            assert plan.layout.fp8_attention
            assert 0.95 * plan.predicted_peak_bytes - ROUNDING_BYTES <= usage.peak_bytes
            assert usage.peak_bytes <= plan.predicted_peak_bytes <= budget


def use(layout: Residency, ranks: Ranked, monkeypatch: pytest.MonkeyPatch) -> None:
    for runner in ranks.runners:
        monkeypatch.setattr(runner.planner, "plan", lambda *_: Plan(layout, CUT.rows))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_find_the_same_scales(
    size: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey covers the rows of all ranks, which exchange fp8 values."""
    with running(checkpoint("mha"), **SETTINGS) as engine:
        alone, single = (
            scores(engine, LONG),
            tokens(engine.ask(Request(LONG.prompt[:43], SHORT))),
        )
    with ranked(checkpoint("mha"), size, **SETTINGS) as (engine, ranks):
        assert (scores(engine, LONG) - alone).abs().max() < ALIKE
        assert tokens(engine.ask(Request(LONG.prompt[:43], SHORT))) == single
        for layout in (Residency(False, shards=size), Residency(False, 1, True, shards=size)):
            use(layout._replace(fp8_attention=True), ranks, monkeypatch)
            assert (scores(engine, LONG) - alone).abs().max() < ALIKE
        assert ranks.num_exchanges > 0
        assert engine.is_idle() and ranks.are_idle()


def test_where_no_step_is_cut_a_request_runs_alone(checkpoint: Callable[[str], Path]) -> None:
    settings = {"additional_config": {"dllm": {**OWN, "longest_pause_ms": 0}}}
    asks = [Request(random_prompt(n, n), SHORT) for n in (50, 9, 44)]
    asks.append(Request(random_prompt(60, 6), {**SHORT, "num_speculative_states": 3}))
    with running(checkpoint("mha"), **settings) as engine:
        alone = [actual for ask in asks for actual in tokens(engine.ask(ask))]
        assert tokens(engine.ask(*asks)) == alone
        assert engine.is_idle()


def test_what_cannot_be_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with running(checkpoint("mha")) as engine, pytest.raises(refusal_error(), match="attention_d"):
        engine.ask(Request([5], {**SHORT, "attention_dtype": "fp8"}))
    with pytest.raises(ServerConfigError, match="sdar is block-causal"):
        server_defaults({"attention_dtype": "fp8"}, SDAR)
    with pytest.raises(ServerConfigError, match="fp8_attention_min_tokens"):
        Settings.of({"fp8_attention_min_tokens": 0})


@pytest.mark.parametrize("divided", ["sequence", "tensor"])
def test_processes_score_as_one(divided: str, checkpoint: Callable[[str], Path]) -> None:
    """Processes exchange over gloo. Tensor-parallel scales of own heads give similar scores."""
    own = {**OWN, "longest_pause_ms": 60_000}
    ranks: dict[str, Any] = {"additional_config": {"dllm": own}}
    with running(checkpoint("mha"), **ranks) as engine:
        alone = scores(engine, LONG)
    if divided == "tensor":
        ranks["tensor_parallel_size"] = 2
    else:
        own |= {"sequence_parallel_size": 2, "sequence_parallel_min_tokens": 40}
    with running(checkpoint("mha"), **ranks) as engine:
        assert (scores(engine, LONG) - alone).abs().max() < ALIKE


def test_rows_of_the_last_layer_are_of_few_sizes() -> None:
    """The last layer has whole units, each cut at the end of its chunk, and no row twice."""
    division = RowPartition(Ranks(), 9000)
    actual = division.narrowed(division.chunks(4224), np.array([4100, 5200, 8999]), unit=1024)
    ends = [(chunk.rows.start, chunk.rows.stop) for chunk in actual]
    assert ends == [(4096, 4224), (5120, 6144), (8448, 9000)]
    alone = division.narrowed(division.chunks(4224), np.array([4100, 5200, 8999]))
    assert [chunk.rows.stop - chunk.rows.start for chunk in alone] == [1, 1, 1]


@pytest.mark.gpu
def test_cudnn_follows_the_plain_scores(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 scores with cuDNN follow plain scores, whole and in chunks.

    The kernel that rotates queries and keys writes their fp8 copies.
    """
    with running(checkpoint("mha"), dtype="bfloat16", **SETTINGS) as engine:
        whole, actual = scores(engine, LONG), []
        for layout in LAYOUTS.values():
            with monkeypatch.context() as patch:
                patch.setattr(
                    engine.runner.planner, "plan", lambda *_, to=layout: Plan(to, CUT.rows)
                )
                actual.append(scores(engine, LONG))
        monkeypatch.setattr(DiffusionParams, "has_fp8_attention", lambda *_: False)
        plain = scores(engine, LONG)
    for others in (whole, *actual):
        assert torch.corrcoef(torch.stack((others.flatten(), plain.flatten())))[0, 1] > 0.8
    assert not torch.equal(whole, plain)
