# SPDX-License-Identifier: Apache-2.0
"""Which requests may share a step, and how stages are cut into chunks."""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.memory.support import BF16, LLADA_8B, in_place
from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.stages import Buffer, row_bytes
from vllm.diffusion.engine.scheduler.turns import take_turns
from vllm.diffusion.memory import (
    Admission,
    Demand,
    Experts,
    HostBuffers,
    LinearBuffers,
    ModelShape,
    Plan,
    Planner,
    StepShape,
    chunks,
)
from vllm.diffusion.memory.footprint import ROUNDING_BYTES, Footprint
from vllm.diffusion.memory.plan import Residency
from vllm.diffusion.ops.fp8 import Fp8Projection
from vllm.diffusion.ops.packed import PackedProjection
from vllm.diffusion.ops.projection import PlainProjection, Projection

CPU = torch.device("cpu")

GIB = 1 << 30
KIB = 1 << 10


def upstreams(columns: int) -> tuple[Buffer, ...]:
    """Return the buffers of one of upstream's methods."""
    return (Buffer("quantised product", (columns,), BF16, is_temporary=True),)


def listed(buffers: tuple[Buffer, ...]) -> dict[str, int]:
    """Return bytes per row by the name of the buffer."""
    return {buffer.name: buffer.row_bytes for buffer in buffers}


DREAM_7B = ModelShape(
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    mlp_width=18944,
    num_columns=152064,
    dtype=BF16,
    rotary_dim=128,
    rotary_dtype=BF16,
    products=in_place(18944),
)
LLADA_MOE = ModelShape(
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    mlp_width=0,
    num_columns=157184,
    dtype=BF16,
    rotary_dim=128,
    rotary_dtype=BF16,
    products=in_place(0),
    experts=Experts(count=64, chosen=8, width=1024),
)
QUANTISED = replace(
    LLADA_8B,
    products=(
        LinearBuffers(
            project=upstreams(3 * 4096), gated=upstreams(6 * 4096), add_to=upstreams(4096)
        ),
        *LLADA_8B.products,  # the layers that the checkpoint does not quantise
    ),
    can_group_heads=False,
)
FUSED = replace(LLADA_8B, products=in_place(12288, most_gated_rows=1544))
TINY = ModelShape(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_width=128,
    num_columns=256,
    dtype=torch.float32,
    rotary_dim=16,
    rotary_dtype=torch.float32,
    products=(
        LinearBuffers(
            (), (stages.gate_up(torch.float32, 2 * 128),), (stages.projected(torch.float32, 64),)
        ),
    ),
)
SHAPES = {
    "llada-8b": LLADA_8B,
    "dream-7b": DREAM_7B,
    "llada-moe": LLADA_MOE,
    "quantised": QUANTISED,
    "fused": FUSED,
    "tiny": TINY,
}


def half_masked(length: int) -> StepShape:
    """Return a step of one sequence, the second half of which is sampled."""
    return StepShape(rows=length, sample_rows=length // 2, longest=length)


# ---- bytes ----


def test_resident_bytes_of_a_token_are_those_of_the_residual_and_one_layers_keys_and_values() -> (
    None
):
    footprint = Footprint(LLADA_8B)
    floor = footprint.resident(Residency(keep_queries=False))
    assert listed(floor) == {"inputs": 24, "x": 8 * KIB, "qkv": 16 * KIB}
    grouped = footprint.resident(Residency(False, head_groups=4))
    assert row_bytes(grouped) == 24 + 4 * KIB + 2 * 8 * KIB
    assert row_bytes(footprint.resident(Residency(False, 4, host_residual=True))) == 24 + 4 * KIB
    kept = footprint.resident(Residency(keep_queries=True))
    assert row_bytes(kept) == row_bytes(floor) + 8 * KIB + 1 * KIB


def test_bytes_of_a_row_of_every_stage() -> None:
    footprint, layout = Footprint(LLADA_8B), Residency(keep_queries=True)
    assert tuple(map(listed, footprint.keys_values(layout))) == ({"normed": 8 * KIB},)
    attending = {"attention": 8 * KIB, "statistics": 128}
    assert tuple(map(listed, footprint.attend(layout, is_packed=False))) == (attending,)
    (packed,) = map(listed, footprint.attend(layout, is_packed=True))
    assert packed["collected attention"] == 8 * KIB
    gating = {"normed rows": 8 * KIB, "gate and up": 48 * KIB, "activated": 24 * KIB}
    fed = tuple(map(listed, footprint.feed_forward(layout)))
    assert fed == (gating, {"activated": 24 * KIB})
    *_, logits = footprint.logits(layout, is_packed=False)
    tables = {"cos": KIB // 2, "sin": KIB // 2}
    rows = {"sample rows": 8 * KIB, "normed": 8 * KIB}
    assert listed(logits) == rows | tables | {"logits": 2 * 126464}


def test_long_chunks_store_no_gate_and_up_where_one_kernel_computes_their_product() -> None:
    footprint, layout = Footprint(FUSED), Residency(keep_queries=True)
    fed = {"normed rows": 8 * KIB, "activated": 24 * KIB}
    assert listed(footprint.feed_forward(layout, is_long=True)[0]) == fed
    resident = row_bytes(footprint.resident(layout))

    def peak_of(rows: int) -> int:
        planner = Planner(FUSED, 100 * GIB, row_budget=1)
        plan = planner.plan(StepShape(rows=rows, sample_rows=0, longest=rows))
        assert plan.is_whole(rows)
        return plan.predicted_peak_bytes - rows * resident - ROUNDING_BYTES

    assert peak_of(1544) == 1544 * 80 * KIB
    assert peak_of(2048) == 1544 * 80 * KIB  # the peak of the last, shorter chunk of several
    assert peak_of(8192) == 8192 * 32 * KIB


def test_what_computes_the_queries_is_gone_when_they_attend() -> None:
    layout = Residency(keep_queries=False)
    projecting, attending = map(listed, Footprint(LLADA_8B).attend(layout, is_packed=False))
    queries = {"cos": KIB // 2, "sin": KIB // 2, "queries": 8 * KIB}
    assert projecting == queries | {"normed rows": 8 * KIB}
    assert attending == queries | {"attention": 8 * KIB, "statistics": 128}


def test_few_heads_at_a_time_take_their_share() -> None:
    footprint = Footprint(LLADA_8B)
    (_, one), (projecting, four) = (
        map(listed, footprint.attend(Residency(False, groups), is_packed=False))
        for groups in (1, 4)
    )
    assert one["attention"] == one["queries"] == 4 * four["queries"]
    assert projecting["normed rows"] == 8 * KIB  # more than a quarter of the heads' attention
    visiting, _ = footprint.attend(Residency(False, 4, host_residual=True), is_packed=False)
    names = ("x 0", "x 1", "updated x 0", "updated x 1")
    assert listed(visiting).items() >= dict.fromkeys(names, 8 * KIB).items()


def test_experts_count_with_their_temporaries() -> None:
    terms = listed(Footprint(LLADA_MOE).feed_forward(Residency(True))[-1])
    assert terms["terms of experts"] == 8 * 2048 * 2
    assert terms["activated of experts"] == 8 * 1024 * 2
    assert terms["normed"] == 2048 * 2


def test_only_plain_heads_without_a_common_norm_can_be_grouped() -> None:
    assert LLADA_8B.head_groups == (1, 2, 4, 8, 16, 32)
    assert DREAM_7B.head_groups == (1, 2, 4)
    assert replace(LLADA_8B, num_kv_heads=6).head_groups == (1, 2)
    assert QUANTISED.head_groups == (1,)


# ---- plans ----


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [1, 17, 500, 4096, 20_000, 200_000, 1_000_000])
def test_every_plan_keeps_to_its_budget_and_uses_it(name: str, length: int, is_split: bool) -> None:
    """Budgets run from the smallest one with a plan to one in which the step is whole."""
    shape, step = SHAPES[name], half_masked(length)

    def plan_within(budget: int) -> Plan:
        return Planner(shape, budget, row_budget=1, is_split=is_split).plan(step)

    with pytest.raises(ActivationBudgetError) as refused:
        plan_within(1)
    required = refused.value.required_bytes
    with pytest.raises(ActivationBudgetError):
        plan_within(required - 1)
    budget, slowest = required, math.inf
    while True:
        plan = plan_within(budget)
        assert 0 < plan.predicted_average_bytes <= plan.predicted_peak_bytes <= budget
        sizes = (plan.rows.keys_values, plan.rows.attend, plan.rows.feed_forward)
        assert all(1 <= size <= length for size in sizes)
        assert 1 <= plan.rows.logits <= max(step.sample_rows, 1)
        # More memory never costs more time than the rounding of chunks to whole tiles.
        assert plan.predicted_seconds <= 1.05 * slowest
        slowest = min(slowest, plan.predicted_seconds)
        if plan.is_whole(length) or budget > 64 * required:
            break
        budget = budget * 5 // 4


@pytest.mark.parametrize(
    "name", sorted(SHAPES.keys() - {"fused"})
)  # the sum of "fused" differs for long chunks
def test_predicted_bytes_are_the_sum_of_the_footprint(name: str) -> None:
    shape = SHAPES[name]
    footprint, step = Footprint(shape), half_masked(50_000)
    whole = row_bytes(footprint.resident(Residency(True))) * step.rows
    for budget in (whole // 8, whole // 2, whole, 4 * whole):
        try:
            plan = Planner(shape, budget, row_budget=1).plan(step)
        except ActivationBudgetError:
            continue
        layout = plan.layout
        resident = row_bytes(footprint.resident(layout)) * step.rows
        resident += row_bytes(footprint.read_results(layout)) * step.sample_rows
        stages = (
            (plan.rows.keys_values, footprint.keys_values(layout)),
            (plan.rows.attend, footprint.attend(layout, is_packed=False)),
            (plan.rows.feed_forward, footprint.feed_forward(layout)),
            (plan.rows.logits, footprint.logits(layout, is_packed=False)),
        )
        most = max(rows * row_bytes(phase) for rows, phases in stages for phase in phases)
        assert plan.predicted_peak_bytes == resident + most + ROUNDING_BYTES


def test_a_split_pool_holds_the_most_of_buffers_and_the_most_of_temporaries() -> None:
    """Attention's results are temporaries, in whose memory normed rows of other stages can be."""
    step, layout = half_masked(50_000), Residency(keep_queries=False)
    footprint = Footprint(LLADA_8B)
    resident = row_bytes(footprint.resident(layout)) * step.rows
    resident += row_bytes(footprint.read_results(layout)) * step.sample_rows + ROUNDING_BYTES
    projecting, attending = attend = footprint.attend(layout, is_packed=False)
    assert row_bytes(projecting, is_temporary=True) == 8 * KIB
    assert row_bytes(attending, is_temporary=True) == 8 * KIB + 128
    for share in (1.05, 1.2, 1.5, 3.0):
        planner = Planner(
            LLADA_8B, int(share * resident), row_budget=1, uses_host=False, is_split=True
        )
        plan = planner.plan(step)
        if plan.layout.is_streamed:
            continue
        stages = (
            (plan.rows.keys_values, footprint.keys_values(layout)),
            (plan.rows.attend, attend),
            (plan.rows.feed_forward, footprint.feed_forward(layout)),
            (plan.rows.logits, footprint.logits(layout, is_packed=False)),
        )
        phases = [(rows, phase) for rows, phases in stages for phase in phases]
        buffers = max(rows * row_bytes(phase, is_temporary=False) for rows, phase in phases)
        temporaries = max(rows * row_bytes(phase, is_temporary=True) for rows, phase in phases)
        assert plan.predicted_peak_bytes == resident + buffers + temporaries


def test_normed_rows_that_attention_cannot_replace_are_buffers() -> None:
    """As temporaries, narrower rows and fp8 rows would need memory in addition to attention."""
    narrow = replace(LLADA_8B, hidden_size=2048)
    fp8 = replace(LLADA_8B, products=(LLADA_8B.products[0]._replace(quantises=True),))
    for shape, normed in (
        (narrow, {"normed": 4 * KIB}),
        (fp8, {"normed": 4 * KIB, "scales of normed": 4}),
    ):
        projecting, _ = Footprint(shape).attend(Residency(False), is_packed=False)
        assert listed(projecting).items() >= normed.items()
        assert row_bytes(projecting, is_temporary=True) == 0
    projecting, _ = Footprint(narrow).attend(Residency(False, 2), is_packed=False)
    assert row_bytes(projecting, is_temporary=True) == narrow.row_bytes


@pytest.mark.parametrize("length", [1024, 4096, 6000, 16_384, 20_000, 65_536, 204_800])
@pytest.mark.parametrize("sampled", [32, 1000])
def test_a_split_pool_needs_no_more_than_one_that_is_not(length: int, sampled: int) -> None:
    """A split pool may also need softmax statistics, and normed rows next to gate and up."""
    split, joint = (
        Planner(FUSED, 100 * GIB, row_budget=4096, is_split=is_split).plan(
            StepShape(length, sampled, length)
        )
        for is_split in (True, False)
    )
    assert split.predicted_peak_bytes <= joint.predicted_peak_bytes + length * 128 + (16 << 20)
    assert split.predicted_seconds <= 1.01 * joint.predicted_seconds


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("shape", [LLADA_8B, LLADA_MOE], ids=["llada-8b", "llada-moe"])
@pytest.mark.parametrize("length", [128, 1024, 4096, 16_384])
def test_what_fits_is_not_cut(length: int, shape: ModelShape, is_split: bool) -> None:
    planner = Planner(shape, 100 * GIB, row_budget=4096, is_split=is_split)
    plan = planner.plan(half_masked(length))
    assert plan.is_whole(length)
    assert not plan.layout.is_streamed
    just = Planner(shape, plan.predicted_peak_bytes, row_budget=4096, is_split=is_split)
    assert just.plan(half_masked(length)) == plan


def test_only_the_stage_that_is_the_peak_is_cut() -> None:
    step = half_masked(4096)
    whole = Planner(LLADA_8B, 100 * GIB, row_budget=4096).plan(step)
    plan = Planner(LLADA_8B, whole.predicted_peak_bytes * 2 // 3, row_budget=4096).plan(step)
    assert (plan.rows.keys_values, plan.rows.attend) == (4096, 4096)
    assert plan.rows.feed_forward == 2048  # in two equal parts
    few = StepShape(rows=512, sample_rows=512, longest=512)
    whole = Planner(LLADA_8B, 100 * GIB, row_budget=4096).plan(few)
    plan = Planner(LLADA_8B, whole.predicted_peak_bytes * 3 // 4, row_budget=4096).plan(few)
    assert (plan.is_whole(512), plan.rows.logits) == (True, 256)


def test_the_ladder_as_the_budget_shrinks() -> None:
    """Plans are whole, then cut, then have head groups or rows on the host, then both."""
    step = half_masked(262_144)
    plans = [
        Planner(LLADA_8B, gibibytes * GIB, row_budget=4096).plan(step)
        for gibibytes in (100, 12, 7, 6, 4, 3, 2, 1)
    ]
    seconds = [plan.predicted_seconds for plan in plans]
    assert seconds == sorted(seconds) and seconds[-1] < 1.2 * seconds[0]
    assert not any(plan.layout.is_streamed for plan in plans[:3]) and plans[3].layout.is_streamed
    on_host = [plan.layout.host_residual for plan in plans]
    assert on_host == sorted(on_host)
    assert plans[-1].layout.head_groups >= 8 and plans[-1].layout.host_residual
    with pytest.raises(ActivationBudgetError):
        Planner(LLADA_8B, GIB, row_budget=4096, uses_host=False).plan(step)


# Milliseconds per step of LLaDA-8B by number of rows, measured on an H200.
STEPS_MS: dict[type[Projection], dict[int, float]] = {
    PlainProjection: {32: 4.15, 256: 6.92, 1024: 22.8, 2048: 46.7, 4096: 99.5},
    Fp8Projection: {32: 2.80, 256: 4.60, 1024: 14.2, 2048: 29.1, 4096: 64.9},
    PackedProjection: {1024: 25.7, 4096: 106.6},
}


@pytest.mark.parametrize("kind", STEPS_MS)
def test_steps_take_what_is_predicted(kind: type[Projection]) -> None:
    (plain,) = LLADA_8B.products
    products = plain._replace(weight_bytes=kind.weight_bytes, speed=kind.speed)
    planner = Planner(replace(LLADA_8B, products=(products,)), 100 * GIB, 1 << 14)
    for rows, milliseconds in STEPS_MS[kind].items():
        plan = planner.plan(StepShape(rows, min(rows, 32), rows))
        assert 1000 * plan.predicted_seconds == pytest.approx(milliseconds, rel=0.1), rows


def test_long_steps_level_their_stages() -> None:
    """With enough memory, the ratio of peak and average is small."""
    for length in (32_768, 65_536, 204_800):
        plan = Planner(LLADA_8B, 120 * GIB, row_budget=4096).plan(half_masked(length))
        assert not plan.layout.is_streamed and plan.rows.attend == length
        assert plan.predicted_peak_bytes <= 1.25 * plan.predicted_average_bytes
        assert plan.predicted_peak_bytes <= 42 * KIB * length


def test_twenty_five_kibibytes_a_token_suffice_without_the_host() -> None:
    for length in (65_536, 204_800):
        planner = Planner(LLADA_8B, 25 * KIB * length, row_budget=4096, uses_host=False)
        plan = planner.plan(half_masked(length))
        assert not plan.layout.host_residual


def test_half_a_million_tokens_fit_beside_the_weights_of_a_24_gib_card() -> None:
    budget = 24 * GIB - int(14.93 * GIB) - GIB
    for length in (524_288, 1_048_576):
        plan = Planner(LLADA_8B, budget, row_budget=4096).plan(half_masked(length))
        attention = 4 * length**2 * 4096 * 32 / 612e12
        assert plan.predicted_seconds < 1.3 * attention


def test_kept_bytes_are_taken_from_the_budget() -> None:
    step, kept = half_masked(4096), 3 * GIB
    with_all = Planner(LLADA_8B, GIB // 2, row_budget=4096).plan(step)
    beside = Planner(LLADA_8B, GIB // 2 + kept, row_budget=4096).plan(step, kept)
    assert beside == replace(
        with_all,
        predicted_peak_bytes=with_all.predicted_peak_bytes + kept,
        predicted_average_bytes=with_all.predicted_average_bytes + kept,
    )


@pytest.mark.parametrize("seconds", [0.5, 0.1, 0.03])
@pytest.mark.parametrize(("length", "kibibytes"), [(204_800, 40), (204_800, 25), (16_384, 64)])
def test_a_bound_on_pauses_cuts_chunks_too(length: int, kibibytes: int, seconds: float) -> None:
    """Attention of one layer with 204,800 tokens fits into memory, but takes over a second."""
    planner = Planner(LLADA_8B, length * kibibytes * KIB, 4096)
    step = half_masked(length)
    free, bound = planner.plan(step), planner.plan(step, 0, seconds)
    assert max(bound.chunk_seconds) <= seconds
    assert bound.predicted_peak_bytes <= planner.budget_bytes
    assert bound.predicted_seconds <= 1.15 * free.predicted_seconds
    if kibibytes == 40:
        assert max(free.chunk_seconds) > 0.25
    assert planner.plan(step, -planner.reserved_bytes, 1000.0).sizes == free.sizes


def test_the_chunks_of_a_step_take_as_long_as_the_step() -> None:
    planner = Planner(LLADA_8B, 8 * GIB, 4096)
    for bound in (math.inf, 0.05):
        plan = planner.plan(half_masked(65_536), 0, bound)
        num_chunks = [65_536 / rows for rows in plan.rows[:3]]  # the last chunk may be short
        one = plan.chunk_seconds
        layers = one.keys_values * num_chunks[0] + one.attend * num_chunks[1]
        layers += one.feed_forward * num_chunks[2]
        assert 32 * layers * plan.layout.head_groups == pytest.approx(
            plan.predicted_seconds, rel=0.1
        )


def test_plans_are_remembered_by_shape() -> None:
    planner = Planner(LLADA_8B, 100 * GIB, row_budget=4096)
    plan = planner.plan(half_masked(4096))
    assert planner.plan(half_masked(4096)) is plan
    assert planner.plan(half_masked(4096), kept_bytes=1) is not plan


def test_a_plan_reads_as_one_line() -> None:
    line = str(Planner(LLADA_8B, 8 * GIB, row_budget=4096).plan(half_masked(1_048_576)))
    assert "\n" not in line
    assert "4 head groups; residual in host memory; predicted peak " in line
    assert line.startswith("rows a chunk: keys-values ")


# ---- admission ----


def admission_of(*sizes: Any, **more: Any) -> Admission:
    return Admission(Planner(*sizes, **more))


def demand(length: int, **more: Any) -> Demand:
    return Demand(length, sample_positions=length // 2, **more)


def test_a_lone_request_may_have_any_number_of_rows() -> None:
    assert admission_of(TINY, GIB, row_budget=100).obstacle([], demand(10_000)) is None


def test_requests_share_a_step_within_the_row_budget() -> None:
    admission = admission_of(TINY, GIB, row_budget=100)
    running = [demand(40), demand(30)]
    assert admission.obstacle(running, demand(30)) is None
    assert admission.obstacle(running, demand(31)) is not None
    assert admission.obstacle(running, demand(16, num_sequences=2)) is not None


def test_requests_share_a_step_within_the_memory() -> None:
    with pytest.raises(ActivationBudgetError) as refused:
        admission_of(TINY, 1, row_budget=1000).check(demand(100))
    budget = refused.value.required_bytes
    admission = admission_of(TINY, budget, row_budget=1000)
    assert admission.obstacle([], demand(100)) is None
    assert admission.obstacle([demand(60)], demand(60)) is not None
    assert admission.obstacle([demand(40)], demand(40)) is None


def test_steps_share_the_row_budget_by_the_rows_that_they_have_most_of_the_time() -> None:
    admission = admission_of(TINY, GIB, row_budget=100)
    running = [demand(60, keeps_cache=True, window=8)] * 11
    assert admission.obstacle(running, demand(60, keeps_cache=True, window=8)) is None
    assert admission.obstacle(running, demand(12)) is None
    assert admission.obstacle(running, demand(13)) is not None
    cached = demand(60, keeps_cache=True, window=8)
    assert admission.obstacle([*running, demand(12)], cached) == "rows"


def test_a_second_step_of_those_that_have_one_forward_waits_behind_the_first() -> None:
    admission, read = admission_of(TINY, GIB, row_budget=100), demand(40, once=True)
    assert admission.obstacle([read] * 4, read) is None  # 200 rows in total
    assert admission.obstacle([read] * 5, read) is not None
    assert admission.obstacle([demand(40)] * 2, read) is None  # 80 rows in each step, 40 once
    assert admission.obstacle([demand(40)] * 2, demand(41, once=True)) is not None


def smallest_budget(demands: list[Demand], row_budget: int) -> int:
    """Return the smallest pool with which the last of these requests joins the others."""

    def joins(num_bytes: int) -> bool:
        admission = admission_of(TINY, num_bytes, row_budget)
        return admission.obstacle(demands[:-1], demands[-1]) is None

    return 1 + bisect_left(range(1, GIB), True, key=joins)


def test_first_forwards_need_the_memory_of_one_shared_step() -> None:
    """Four first forward passes have 400 rows, but no step has more than 150."""
    largest = smallest_budget([Demand(75, 75)] * 2, row_budget=150)
    assert smallest_budget([demand(100, window=8)] * 4, row_budget=150) == largest
    cached = [demand(100, keeps_cache=True, window=8)] * 4
    kept = 4 * 128 * TINY.cache_bytes  # in whole pages
    assert largest + kept <= smallest_budget(cached, row_budget=150) < 2 * kept


def test_a_forward_beyond_the_row_budget_must_fit_beside_all_kept_keys_and_values() -> None:
    kept = [demand(50, keeps_cache=True, window=8)] * 4
    large = demand(5000, window=8)
    alone = smallest_budget([large], row_budget=100)
    together = smallest_budget([*kept, large], row_budget=100)
    assert together == alone + 4 * 64 * TINY.cache_bytes  # in whole pages


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    length = draw(st.integers(1, 400))
    num_sequences = draw(st.integers(1, 2))
    window = draw(st.none() | st.integers(1, length)) if num_sequences == 1 else None
    sampled = draw(st.integers(1, length))
    once = window is None and draw(st.booleans())
    return Demand(length, sampled, num_sequences, window is not None, window, once=once)


@settings(deadline=None)
@given(
    st.lists(demands(), min_size=1, max_size=8),
    st.integers(50_000, 1_500_000),
    st.integers(1, 300),
    st.data(),
)
def test_every_step_of_admitted_requests_has_a_plan(
    parameters: list[Demand], pool: int, row_budget: int, data: st.DataObject
) -> None:
    """Every combination of forward passes of admitted requests fits with all their caches."""
    admission, running = admission_of(TINY, pool, row_budget), []
    for new in parameters:
        if admission.obstacle(running, new) is None:
            running.append(new)
    assume(running)
    kept = admission.kept_bytes(running)
    next_rows = {
        str(i): d.num_sequences * data.draw(st.sampled_from([d.window or d.length, d.length]))
        for i, d in enumerate(running)
    }
    taken = take_turns(next_rows, row_budget)
    step = StepShape(
        rows=sum(taken.values()),
        sample_rows=sum(min(running[int(i)].sample_rows, rows) for i, rows in taken.items()),
        longest=max(running[int(i)].length for i in taken),
        num_sequences=sum(running[int(i)].num_sequences for i in taken),
    )
    assert admission.planner.plan(step, kept).predicted_peak_bytes <= pool


def test_kept_keys_and_values_of_several_have_half_of_the_budget() -> None:
    """Caches take whole pages of 64 positions, not shared. A single request may use all memory."""
    admission = admission_of(TINY, 2 * 250 * TINY.cache_bytes, row_budget=1000)
    assert admission.planner.cached_positions == 192  # 250 rounded down to whole pages
    running = [demand(100, keeps_cache=True)]
    assert admission.obstacle(running, demand(64, keeps_cache=True)) is None
    assert admission.obstacle(running, demand(65, keeps_cache=True)) is not None
    assert admission.obstacle([demand(64, keeps_cache=True)], demand(65, keeps_cache=True)) is None
    admission.check(demand(193, keeps_cache=True))
    assert admission.obstacle([demand(10)], demand(193, keeps_cache=True)) is None
    assert (
        admission.obstacle([demand(1, keeps_cache=True)], demand(193, keeps_cache=True)) is not None
    )
    with pytest.raises(ActivationBudgetError) as refused:
        admission.check(demand(1000, keeps_cache=True))
    longest = refused.value.longest_tokens
    assert 193 < longest < 500
    admission.check(demand(longest, keeps_cache=True))
    with pytest.raises(ActivationBudgetError):
        admission.check(demand(longest + PAGE_SIZE, keeps_cache=True))


# Memory of a GPU of 12 GiB that LLaDA-8B in int4 leaves. Two requests have 4 GiB of caches.
SMALL_CARD = int(4.7 * GIB)


@pytest.mark.parametrize("row_budget", [256, 2048, 4096, 8192])
@pytest.mark.parametrize("graph_bytes", [0, 300 << 20])
def test_several_keep_more_than_half_where_no_step_is_slower(
    row_budget: int, graph_bytes: int
) -> None:
    pool = SMALL_CARD - graph_bytes
    admission = admission_of(LLADA_8B, pool, row_budget, is_split=True)
    kept, other = demand(4096, keeps_cache=True, window=32), demand(64)
    assert 2 * admission.kept_bytes([kept, kept]) > pool
    assert admission.obstacle([kept], kept) is None
    assert admission.obstacle([kept, kept], kept) == "memory"
    assert admission.obstacle([kept, kept], other) is None
    long = demand(65_536)  # would need host memory if there were two caches
    assert admission.obstacle([kept], long, long={long}) is None
    assert admission.obstacle([kept, kept], long, long={long}) == "memory"
    assert admission.obstacle([kept, long], kept, long={long}) == "memory"


def test_what_several_keep_can_still_move() -> None:
    """An eighth of the layers exists twice while pages move. Only one request uses host memory."""
    kept = demand(4096, keeps_cache=True, window=32)
    for room, obstacle in ((GIB // 2 - 1, "memory"), (GIB // 2, None)):  # for two running requests
        admission = admission_of(LLADA_8B, 6 * GIB + room, 4096)
        (step,) = admission._largest_steps([kept] * 3, [kept] * 3)
        assert admission.fits(step, 6 * GIB)
        assert admission.obstacle([kept, kept], kept) == obstacle
    assert admission.obstacle([kept], kept) is None
    assert admission.obstacle([kept, kept], replace(kept, host_layers=8)) == "memory"


def test_a_copy_of_kept_keys_is_counted_where_one_is_made() -> None:
    """The copy is that of the longest sequence, with one group of heads at a time."""
    step = StepShape(rows=64, sample_rows=8, longest=500, kept_keys=500)
    copying = replace(TINY, collects_keys=True)

    def peak(shape: ModelShape, step: StepShape) -> int:
        return Planner(shape, GIB, row_budget=1000).plan(step).predicted_peak_bytes

    without = peak(copying, step._replace(kept_keys=0))
    assert peak(copying, step) == without + 500 * TINY.key_value_bytes
    assert peak(TINY, step) == without
    grouped = Footprint(copying).collected_keys(Residency(False, head_groups=4))
    assert grouped == TINY.key_value_bytes // 4


@pytest.mark.parametrize("guided", [1, 2])
def test_a_refusal_names_the_longest_request_that_fits(guided: int) -> None:
    admission = admission_of(LLADA_8B, GIB, row_budget=4096)
    admission.check(demand(1000, num_sequences=guided))
    with pytest.raises(ActivationBudgetError) as refused:
        admission.check(demand(4_000_000, num_sequences=guided))
    error = refused.value
    assert (error.num_tokens, error.budget_bytes) == (4_000_000, GIB)
    assert error.required_bytes > GIB
    admission.check(demand(error.longest_tokens - 2, num_sequences=guided))
    with pytest.raises(ActivationBudgetError):
        admission.check(demand(error.longest_tokens + 10, num_sequences=guided))
    assert f"the pool has {GIB}; wanted at most {error.longest_tokens} tokens" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(("num_rows", "size"), [(0, 3), (1, 3), (6, 3), (7, 3), (2, 100)])
def test_chunks_cover_all_rows_once(num_rows: int, size: int) -> None:
    parts = list(chunks(num_rows, size))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop - part.start <= size for part in parts)


def test_host_buffers_are_reused_and_grow() -> None:
    pool = HostBuffers(is_pinned=False)
    small = pool.take("x", (4, 8), torch.float32)
    large = pool.take("x", (8, 8), torch.float32)
    again = pool.take("x", (2, 3), torch.float32)
    assert (small.shape, large.shape, again.shape) == ((4, 8), (8, 8), (2, 3))
    assert again.data_ptr() == large.data_ptr()
    assert pool.take("y", (8, 8), torch.float32).data_ptr() != large.data_ptr()
    assert pool.num_bytes == 2 * 8 * 8 * 4


# ---- long steps ----


@pytest.mark.parametrize("budget", [4 * GIB, 100 * GIB])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_long_step_leaves_a_shared_one_its_room(budget: int, is_split: bool) -> None:
    planner = Planner(LLADA_8B, budget, 4096, is_split=is_split)
    plan = planner.plan(half_masked(16_384), 0, 0.05)
    shared = planner.plan(half_masked(4096), plan.predicted_peak_bytes)
    assert shared.predicted_peak_bytes <= budget
    assert planner.reserved_bytes <= budget // 8


def test_what_fits_alone_fits_without_a_reserve() -> None:
    planner = Planner(LLADA_8B, GIB // 2, 4096, uses_host=False)
    longest = max(
        length
        for length in range(1024, 65_536, 1024)
        if Admission(planner).fits(half_masked(length))
    )
    assert longest < 64_512
    assert not Admission(planner).fits(half_masked(longest), planner.reserved_bytes)
    plan = planner.plan(half_masked(longest), 0, 0.05)
    assert plan.predicted_peak_bytes <= GIB // 2


def test_what_a_long_step_leaves_to_others_is_no_memory_that_it_lacks() -> None:
    """A plan that reserves no memory for others would be faster, but is not chosen."""
    planner, step = Planner(LLADA_8B, 380 << 20, row_budget=8192), StepShape(65_536, 128, 65_536)
    actual, a_little_more, all_of_it, much_more = (
        planner.plan(step, -more, 0.05).predicted_seconds
        for more in (0, 1, planner.reserved_bytes, 100 << 20)
    )
    assert all_of_it < 0.9 * actual and much_more < 0.95 * actual
    assert a_little_more > 0.95 * actual


def test_requests_that_share_no_step_keep_nobody_out() -> None:
    admission = admission_of(LLADA_8B, 100 * GIB, 4096)
    long, short = Demand(65_536, 32), Demand(256, 32)
    assert admission.obstacle([long], short) is not None
    assert admission.obstacle([long, long], short, long={long}) is None
    assert admission.obstacle([short] * 15, long, long={long}) is None
    assert admission.obstacle([short] * 16, short, long={long}) is not None
    kept = Demand(admission.planner.cached_positions, 32, keeps_cache=True)
    assert admission.obstacle([kept], replace(kept, spare=64), long={kept}) is not None


def test_chunks_of_attention_are_whole_waves_where_time_cuts_them() -> None:
    """33 tiles of 128 queries with 32 heads are 8 tiles for each of 132 multiprocessors."""
    planner = Planner(LLADA_8B, 100 * GIB, 4096)
    for length in (65_536, 204_800):
        plan = planner.plan(half_masked(length), 0, 0.05)
        tiles = -(-plan.rows.attend // 128) * 32
        assert tiles > 0.98 * 132 * -(-tiles // 132)
        assert plan.rows.attend < length
        assert max(plan.chunk_seconds) <= 0.05


# ---- over several ranks ----


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_divide_rows_take_a_part_of_the_time(num_ranks: int) -> None:
    alone = Planner(LLADA_8B, 100 * GIB, row_budget=4096)
    ranks = Planner(LLADA_8B, 100 * GIB, row_budget=4096, shards=num_ranks)
    assert 1024 <= ranks.search.min_rows <= 16_384
    for rows in (65_536, 204_800):
        plan = ranks.plan(StepShape(rows, 128, rows))
        assert plan.layout.shards == num_ranks
        one = alone.plan(StepShape(rows, 128, rows)).predicted_seconds
        assert 0.85 * num_ranks < one / plan.predicted_seconds < 1.02 * num_ranks
    few = StepShape(ranks.search.min_rows - 1, 128, ranks.search.min_rows - 1)
    assert ranks.plan(few) == alone.plan(few)


def test_a_step_that_keeps_keys_and_values_is_not_divided() -> None:
    planner = Planner(LLADA_8B, 100 * GIB, row_budget=4096, shards=2, min_rows=0)
    step = StepShape(8192, 128, 8192)
    assert planner.search.divides(step) and not planner.search.divides(step._replace(keeps=True))
    kept = Demand(length=8192, sample_positions=128, keeps_cache=True)
    assert planner.plan(Admission(planner).step_of([kept])).layout.shards == 1
    assert (
        planner.plan(Admission(planner).step_of([replace(kept, keeps_cache=False)])).layout.shards
        == 2
    )


def test_groups_of_heads_have_heads_for_every_rank() -> None:
    """KV heads of a group are divided over ranks, so that the smallest pools differ."""
    for shape, most in ((DREAM_7B, 2), (LLADA_8B, 16)):
        step = StepShape(65_536, 128, 65_536)
        with pytest.raises(ActivationBudgetError) as refused:
            Planner(shape, 1 << 20, row_budget=4096, shards=2, min_rows=0).plan(step)
        smallest = refused.value.required_bytes
        tight = Planner(shape, smallest, row_budget=4096, shards=2, min_rows=0).plan(step)
        assert (
            tight.layout.shards == 2
            and tight.layout.head_groups == most
            and tight.layout.host_residual
        )


def test_four_ranks_hold_a_million_tokens() -> None:
    """All layers of LLaDA-8B fit into 24 GiB per rank. This is only planned, not run."""
    planner = Planner(LLADA_8B, 24 * GIB, row_budget=8192, shards=4, is_split=True)
    plan = planner.plan(StepShape(1 << 20, 128, 1 << 20))
    assert plan.predicted_peak_bytes <= 24 * GIB
    assert not plan.layout.host_residual
    assert 200 < plan.predicted_seconds < 300


def test_steps_that_are_a_little_smaller_have_one_plan() -> None:
    """A whole plan is shared. If memory is short, the plan is that of the step itself."""
    step = StepShape(rows=160, sample_rows=32, longest=256, num_sequences=16, kept_keys=256)
    planner = Planner(LLADA_8B, GIB, row_budget=8_192)
    smaller = [step._replace(sample_rows=n) for n in range(1, 33)]
    smaller += [step._replace(longest=n, kept_keys=n) for n in (1, 100, 255)]
    smaller += [step._replace(num_sequences=n) for n in range(2, 17)]
    assert len({id(planner.plan_alike(step)) for step in smaller}) == planner.num_found == 1
    exact = planner.plan(step)
    assert planner.plan_alike(step) == exact

    tight = Planner(LLADA_8B, exact.predicted_peak_bytes, row_budget=8_192)
    fewer = step._replace(sample_rows=20)
    assert tight.plan_alike(fewer) == tight.plan(step)  # 32 sampled rows still fit
    tighter = Planner(LLADA_8B, exact.predicted_peak_bytes - 1, row_budget=8_192)
    assert tighter.plan_alike(fewer) == tighter.plan(fewer)

    long = StepShape(rows=100_000, sample_rows=33, longest=100_000)
    assert planner.plan_alike(long) == planner.plan(long)


def test_chunks_of_the_feed_forward_stage_hold_whole_windows() -> None:
    """Rows of a window choose their experts together, so that a chunk must not cut one."""
    shape = replace(LLADA_MOE, row_unit=32)
    step = StepShape(rows=4096, sample_rows=64, longest=4096)
    search = Planner(shape, 1 << 40, 8192, uses_host=False).search
    least, most = search.smallest_bytes(step), search.whole_bytes(step)
    for part in range(10):
        budget = least + (most - least) * part // 10
        plan = Planner(shape, budget, 8192, uses_host=False).plan(step)
        assert plan.rows.feed_forward % 32 == 0
        assert plan.predicted_peak_bytes <= budget
    hasty = Planner(shape, most, 8192).plan(step, 0, 1e-9)
    assert hasty.rows.feed_forward == 32
