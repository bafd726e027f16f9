# SPDX-License-Identifier: Apache-2.0
"""A2D models of block diffusion give the tokens and forward passes of dllm's sampler.

The prompt ends with a block, so all lengths of a prompt relative to a block are tested.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import a2d_blocks, block_loops
from reference.dispatch import TOKEN_NOISE
from reference.models import A2DReference, load_reference
from reference.philox import uniform_matrix

from tests.checkpoint_files import change_json, weights_of
from tests.checkpoints import (
    EOS_ID,
    EOT_ID,
    MASK_ID,
    VOCAB_SIZE,
    make_checkpoint,
    random_prompt,
    save_weights,
)
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    engine_config,
    num_cached,
    record,
    running,
    speculating,
    tokens,
    uncached,
)
from tests.engine.schedules import run_schedule
from tests.pages import NO_PAGES
from vllm.diffusion.config import served_model
from vllm.diffusion.core.errors import InvalidParameterError, ServerConfigError
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.engine.worker.step_graphs import buckets_of, fill
from vllm.diffusion.engine.worker.warm_up import warm_up

BLOCK = 8
ROW_BUDGET = 40
NUM_PAGES = 8  # one of them is reserved by upstream
SHARED = random_prompt(150, seed=99)
GRIDS = ("answer", "start")


def make_model(folder: Path, family: str, seed: int) -> Path:
    """Write a checkpoint that hardly proposes the mask token."""
    made = make_checkpoint(folder, family=family, seed=seed, tie_word_embeddings=False)
    change_json(made, block_size=BLOCK)
    weights = weights_of(made)
    weights["lm_head.weight"][MASK_ID] = 0
    save_weights(made, weights)
    return made


# This test is the first one of the file, because ranks are only forked if no engine ran before.
def test_two_ranks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a2d", "a2d_qwen3", 3)
    model = load_reference(folder)
    asks = [ask(random_prompt(n, seed=n), steps_per_block=4) for n in (5, 70, 33)]
    with running(folder, tensor_parallel_size=2) as engine:
        responses = engine.ask(*asks)
    answers = [wanted(model, one) for one in asks]
    assert [(r.token_ids, r.num_forwards) for r in responses] == answers


@pytest.fixture(scope="module", params=["a2d_qwen3", "a2d_qwen2", "a2d_llama"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, A2DReference]]:
    """Start an engine with few rows and pages."""
    seed = {"a2d_qwen3": 3, "a2d_qwen2": 5, "a2d_llama": 7}[request.param]
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param, seed)
    with running(
        folder, max_num_batched_tokens=ROW_BUDGET, num_gpu_blocks_override=NUM_PAGES
    ) as engine:
        yield engine, load_reference(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_model(tmp_path_factory.mktemp("blocks"), "a2d_qwen3", 3)
    with running(
        folder,
        max_num_batched_tokens=ROW_BUDGET,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as started:
        yield started


def ask(prompt: list[int], **more: Any) -> Request:
    return Request(prompt, {"gen_length": 24, "ignore_eos": True, **more})


def uniform(seed: int, forward: int, position: int) -> torch.Tensor:
    return uniform_matrix(seed, TOKEN_NOISE, forward, [position], VOCAB_SIZE)[0]


CASES: dict[str, dict[str, Any]] = {
    "one a step": {},
    "quotas": {"steps_per_block": 3},
    "noise": {"temperature": 0.7, "seed": 11, "gen_length": 16, "steps_per_block": 4},
    "a longer block": {"block_length": 16, "steps_per_block": 5, "gen_length": 32},
    "a block of 5": {"block_length": 5, "gen_length": 25},
    "a part of a block": {"gen_length": 21},
    "a threshold": {
        "algorithm": "low_confidence_dynamic",
        "threshold": 0.02,
        "steps_per_block": 4,
    },
    "an end": {"ignore_eos": False, "steps_per_block": 2, "gen_length": 60},
}


def wanted(model: A2DReference, one: Request) -> tuple[list[int], int]:
    extra = one.extra
    options: dict[str, Any] = {"steps": extra.get("steps_per_block")}
    if "seed" in extra:
        options["uniform"] = partial(uniform, extra["seed"])
    if "threshold" in extra:
        options["choose"] = a2d_blocks.above(extra["threshold"])
    decoded = a2d_blocks.bd3lm(
        model,
        one.prompt,
        gen_length=extra["gen_length"],
        block_length=extra.get("block_length", BLOCK),
        mask_id=MASK_ID,
        stop_ids=() if extra["ignore_eos"] else (EOS_ID, EOT_ID),
        temperature=extra.get("temperature", 0.0),
        **options,
    )
    assert MASK_ID not in decoded.answer
    return decoded.answer, decoded.forwards


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
def test_the_published_sampler(
    parameters: dict[str, Any], served: tuple[Engine, A2DReference]
) -> None:
    engine, model = served
    lengths = (*range(1, BLOCK + 1), 65, 100)
    asks = [ask(random_prompt(n, seed=n), **parameters) for n in lengths]
    answers = [wanted(model, one) for one in asks]
    for run in (asks, [uncached(one) for one in asks]):
        responses = engine.ask(*run)
        assert [r.token_ids for r in responses] == [ids for ids, _ in answers]
        # An answer that ends within a block does not wait for the end of the block.
        if parameters not in (CASES["an end"], CASES["a part of a block"]):
            assert [r.num_forwards for r in responses] == [count for _, count in answers]
    if parameters == CASES["an end"]:
        assert any(len(r.token_ids) < parameters["gen_length"] for r in responses)


def test_blocks_from_the_start(served: tuple[Engine, A2DReference]) -> None:
    """With `block_grid: start` the sampler is SDAR's."""
    engine, model = served
    asks = [
        ask(random_prompt(n, seed=n), block_grid="start", steps_per_block=4) for n in (3, 8, 70)
    ]
    wanted = [
        block_loops.sdar(
            lambda tokens: model.logits(torch.tensor([list(tokens)]), BLOCK)[0],
            one.prompt,
            gen_length=24,
            block_length=BLOCK,
            steps=4,
            mask_id=MASK_ID,
            remasking="static",
        ).answer
        for one in asks
    ]
    for run in (asks, [uncached(one) for one in asks]):
        assert [r.token_ids for r in engine.ask(*run)] == wanted


MIXED = [
    *(ask(SHARED[:n], block_length=16, gen_length=20 + n % 7) for n in (150, 149, 134, 130)),
    *(ask([*SHARED[:100], n], block_length=32, gen_length=40) for n in range(3)),
    *(ask(random_prompt(70 + n, n), block_grid=grid) for n in range(4) for grid in GRIDS),
    *(ask(random_prompt(50 + n, n), gen_length=86) for n in range(5)),
    ask(random_prompt(128, 4), temperature=0.8, seed=5),
    ask(SHARED[:66], algorithm="joint_threshold", block_length=8),
    ask(SHARED[:91], algorithm="entropy_bounded", block_length=24),
    ask(SHARED[:91], algorithm="sequential", block_length=64, return_trajectory=True),
    ask(SHARED[:50], complete_blocks=True, block_length=8, gen_length=10),
]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Response]:
    """Return the response to each of `MIXED` alone with full recompute."""
    return [engine.ask(uncached(one))[0] for one in MIXED]


def test_alone_in_batches_and_without_pages(
    engine: Engine,
    alone: list[Response],
    runs_ahead: bool,
    fuses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are computed in parts, and requests lose their pages."""
    assert engine.scheduler.reset_prefix_cache()
    assert tokens([engine.ask(one)[0] for one in MIXED]) == tokens(alone)
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    assert tokens(engine.ask(*MIXED, *map(uncached, MIXED[:3]))) == tokens([*alone, *alone[:3]])
    assert lost
    assert engine.is_idle()


def test_any_schedule(engine: Engine, alone: list[Response]) -> None:
    """Requests arrive and are aborted; pages with a hash never change."""
    for delay in (0, 1, 3):
        assert engine.scheduler.reset_prefix_cache()
        schedule = [(delay, one, 5 if n % 6 == 5 else None) for n, one in enumerate(MIXED)]
        answers = run_schedule(engine, schedule)
        assert tokens(list(answers.values())) == tokens([alone[n] for n in answers])
        assert len(answers) == sum(abort is None for *_, abort in schedule)


def test_drafts_change_nothing(engine: Engine, alone: list[Response]) -> None:
    chosen = [n for n, one in enumerate(MIXED) if one.extra.get("algorithm") != "joint_threshold"]
    drafted = engine.ask(*speculating([MIXED[n] for n in chosen], 2))
    assert [a.token_ids for a in drafted] == [alone[n].token_ids for n in chosen]


def test_the_warm_up_captures_all_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of requests need no graph that a step of the warm-up has not captured."""
    buckets = buckets_of(engine.runner.model.config)
    batches = record(monkeypatch, engine.runner, "launch", lambda launched, _: launched.batch)
    model = served_model(engine.llm.llm_engine.vllm_config)
    warm_up(engine.runner, model, row_budget=ROW_BUDGET, shows_progress=False)
    captured = {buckets.find(batch) for batch in batches}
    del batches[:]
    engine.ask(*MIXED)
    for one in (*MIXED[::3], *map(uncached, MIXED[::3])):
        engine.ask(one)
    needed = {buckets.find(batch) for batch in batches if batch.num_rows <= ROW_BUDGET}
    assert len(needed) > 3
    assert needed - {None} <= captured


def test_a_graph_reads_the_grid_of_every_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of a row are in the inputs of a bucket, so one graph serves all grids."""
    buckets = buckets_of(engine.runner.model.config)
    batches = record(monkeypatch, engine.runner, "launch", lambda launched, _: launched.batch)
    lengths = range(BLOCK, 2 * BLOCK)
    engine.ask(*(ask(random_prompt(n, n), block_grid=grid) for n in lengths for grid in GRIDS))
    checked = set()
    for batch in batches:
        bucket = buckets.find(batch)
        assert bucket is not None and bucket.is_cached
        inputs = bucket.inputs(NO_PAGES, 1000, has_blocks=True)
        fill(inputs, batch)
        ((layout,),) = inputs.layouts
        columns = zip(layout.block_lengths, layout.firsts, layout.key_counts, strict=True)
        for (index, _, first, stop), (block, start, num_keys) in zip(
            batch.packing.sources, columns, strict=False
        ):
            item, window = batch.items[index], batch.packing.windows[index]
            offset = item.params.block_offset(item.prompt_length)
            for position in range(first, stop):
                end = position + BLOCK - (position + offset) % BLOCK
                key = start + position - first
                read = min((key // block + 1) * block, num_keys) if block else num_keys
                assert read == min(end, window.forward.num_keys)
            checked.add(offset)
    assert checked == set(range(BLOCK))


PARIS = {"structured_outputs": {"choice": ["Paris", "London"]}}
MASKS = [*random_prompt(11, 3), MASK_ID, MASK_ID, 5, 6, MASK_ID, *random_prompt(9, 4)]


@pytest.mark.parametrize("grid", GRIDS)
def test_formats_and_masks_of_prompts(grid: str, engine: Engine) -> None:
    for length in (9, 16, 21):
        one = Request(random_prompt(length), {"gen_length": 32, "block_grid": grid, **PARIS})
        answers = engine.ask(one, uncached(one))
        assert {answer.text for answer in answers} <= {"Paris", "London"}
        assert answers[0].text == answers[1].text
    filled = ask(MASKS, allow_infill=True, return_trajectory=True, block_grid=grid)
    cached, plain = engine.ask(filled, uncached(filled))
    assert cached.token_ids == plain.token_ids


def test_a_likelihood_counts_blocks_from_the_first_token(
    served: tuple[Engine, A2DReference],
) -> None:
    engine, model = served
    prompt = random_prompt(30, 8)
    parameters = {"score": {"positions": [3, 29], "token_ids": [[1, 2], [5]]}}
    (answer,) = engine.ask(Request(prompt, parameters))
    logits = model.logits(torch.tensor([prompt]), BLOCK)[0]
    actual, given = torch.log_softmax(logits, dim=-1), answer.report["scores"]["logprobs"]
    torch.testing.assert_close(torch.tensor(given[0]), actual[3, [1, 2]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(given[1]), actual[29, [5]], atol=1e-4, rtol=1e-4)


def test_prompts_share_pages_if_their_blocks_are_the_same(engine: Engine) -> None:
    """The last page that two prompts have in common ends within a block, unless blocks do."""
    assert engine.scheduler.reset_prefix_cache()

    def cached(length: int, **more: Any) -> int:
        return num_cached(engine, ask(SHARED[:length], block_length=16, gen_length=3, **more))

    assert [cached(150) for _ in range(2)] == [0, 64]
    assert cached(149) == 0  # the blocks are others
    assert cached(134) == 64  # 16 tokens less
    assert [cached(144) for _ in range(2)] == [0, 128]  # whole blocks
    assert cached(141, block_grid="start") == 128
    assert [cached(96 + 64, block_grid="start") for _ in range(2)] == [128, 128]


def test_tokens_behind_a_shared_page_do_not_change_it(engine: Engine) -> None:
    """The block that reaches over the end of a page belongs to one prompt only."""
    assert engine.scheduler.reset_prefix_cache()
    for last in (1, 2, 3):
        one = ask([*SHARED[:128], *[last] * 10], block_length=16)
        (found,), (plain,) = engine.ask(one), engine.ask(uncached(one))
        assert found.token_ids == plain.token_ids
        assert num_cached(engine, one) == 64


def test_the_trajectory_has_the_blocks_of_the_answer(engine: Engine) -> None:
    for grid, starts in (("answer", [0, 8, 16]), ("start", [0, 5, 13, 21])):
        one = ask(random_prompt(19, 1), return_trajectory=True, block_grid=grid)
        (answer,) = engine.ask(one)
        assert answer.report["trajectory"]["block_starts"] == starts


@pytest.mark.parametrize(
    ("name", "overrides", "values", "is_of_blocks"),
    [
        ("some-mdlm", {}, {}, False),
        ("some-bd3lm-v0.1", {}, {}, True),
        ("some", {}, {}, False),
        ("some", {"a2d_kind": "bd3lm"}, {}, True),
        ("some-bd3lm", {"a2d_kind": "mdlm"}, {}, False),
        ("some-mdlm", {}, {"block_size": 16}, True),
        ("some-mdlm", {}, {"a2d_kind": "bd3lm"}, True),
        ("some-bd3lm", {"a2d_kind": "mdlm"}, {"block_size": 16}, False),
    ],
)
def test_how_a_model_is_recognised(
    name: str,
    overrides: dict[str, Any],
    values: dict[str, Any],
    is_of_blocks: bool,
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path / name, family="a2d_qwen3")
    change_json(folder, mask_token_id=MASK_ID, **values)
    config = engine_config(folder, hf_overrides=overrides)
    model = served_model(config)
    assert model.family.name == ("a2d-qwen3-bd3lm" if is_of_blocks else "a2d-qwen3")
    if is_of_blocks:
        assert model.block_length == values.get("block_size", 32)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "some", family="a2d_qwen3")
    refused = pytest.raises(ServerConfigError, match="a2d_kind: given ar; wanted mdlm or bd3lm")
    with refused:
        engine_config(folder, hf_overrides={"a2d_kind": "ar"})


def test_other_families_have_one_grid(engine: Engine, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises((ValueError, InvalidParameterError), match="block_grid"):
        engine.ask(ask(SHARED[:9], block_grid="end"))
    with running(checkpoint("sdar")) as other:
        one = ask(SHARED[:9], block_grid="answer")
        with pytest.raises((ValueError, InvalidParameterError), match="block_grid"):
            other.ask(one)
