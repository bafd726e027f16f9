# SPDX-License-Identifier: Apache-2.0
"""Block-causal families give the tokens of the published loops, which have no cache.

Requests run alone and in mixed batches of different prompts, block lengths and phases. They run
with exact keys and values and with full recompute, and with a finished block stored alone or
together with the next one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference import block_loops, causal_loops
from reference.models import load_reference

from tests import golden
from tests.checkpoints import (
    DELETE_ID,
    EOS_ID,
    EOT_ID,
    MASK_ID,
    SPLIT_ID,
    THINK_IDS,
    random_prompt,
)
from tests.engine.harness import Engine, Request, Response, running, shrink, speculating
from vllm.diffusion.request.algorithms import algorithms_for

STOP_IDS = frozenset({EOS_ID, EOT_ID})
ROW_BUDGET = 100
NUM_PAGES = 13  # one of them is reserved by upstream


class Wanted(NamedTuple):
    ask: Request
    answer: list[int]
    num_forwards: int
    is_whole: bool  # the answer ends at the end of a block


class Loop(NamedTuple):
    """A published loop, its options, and the same options of a request."""

    run: Any
    options: dict[str, Any]
    fields: dict[str, Any]


def dynamic(steps: int, threshold: float) -> Loop:
    return Loop(
        partial(block_loops.sdar, remasking="dynamic"),
        {"steps": steps, "threshold": threshold},
        {
            "algorithm": "low_confidence_dynamic",
            "steps_per_block": steps,
            "threshold": threshold,
        },
    )


def paced(algorithm: str, remasking: str, steps: int) -> Loop:
    return Loop(
        partial(block_loops.sdar, remasking=remasking),
        {"steps": steps},
        {"algorithm": algorithm, "steps_per_block": steps},
    )


def joint(threshold: float, editing_threshold: float, max_post_steps: int) -> Loop:
    options = {
        "threshold": threshold,
        "editing_threshold": editing_threshold,
        "max_post_steps": max_post_steps,
    }
    return Loop(block_loops.llada21, options, {"algorithm": "joint_threshold", **options})


def sub_blocks(sub_block_length: int, threshold: float) -> Loop:
    options = {"sub_block_length": sub_block_length, "threshold": threshold}
    return Loop(block_loops.fast_dllm_v2, options, {"algorithm": "hierarchy_block", **options})


def reached(threshold: float) -> Loop:
    options = {"threshold": threshold}
    parameters = {"algorithm": "low_confidence_dynamic", **options}
    return Loop(block_loops.stable_diffcoder, options, parameters)


def shared(steps: int) -> Loop:
    parameters = {"algorithm": "semi_ar", "steps_per_block": steps}
    return Loop(block_loops.stable_diffcoder, {"steps": steps}, parameters)


def edited(
    threshold: float, editing_threshold: float, max_post_steps: int, steps: int = 32
) -> Loop:
    options = {
        "threshold": threshold,
        "editing_threshold": editing_threshold,
        "max_post_steps": max_post_steps,
    }
    loop = partial(block_loops.llada22, edit_ids=(DELETE_ID, SPLIT_ID))
    parameters = {"algorithm": "levenshtein", "steps_per_block": steps, **options}
    return Loop(loop, {"steps": steps, **options}, parameters)


def seeded(threshold: float) -> Loop:
    parameters = {"algorithm": "low_confidence_dynamic", "threshold": threshold}
    return Loop(causal_loops.diffusion, {"threshold": threshold}, parameters)


def seeded_shares(steps: int) -> Loop:
    parameters = {"algorithm": "semi_ar", "steps_per_block": steps}
    return Loop(causal_loops.diffusion, {"steps": steps}, parameters)


def confirmed(threshold: float) -> Loop:
    parameters = {"algorithm": "self_speculation", "threshold": threshold}
    return Loop(causal_loops.self_speculation, {"threshold": threshold}, parameters)


ONE_BY_ONE = Loop(causal_loops.autoregressive, {}, {"algorithm": "autoregressive"})


def bounded(loop: Loop, budget: int) -> Loop:
    thinking = causal_loops.Thinking(*THINK_IDS, budget)
    parameters = {**loop.fields, "thinking_token_budget": budget}
    return Loop(loop.run, {**loop.options, "thinking": thinking}, parameters)


def unedited(loop: Loop) -> Loop:
    """Return the same loop without proposals to delete or to insert."""
    draw = block_loops.Draw(scores_all=True, never=(DELETE_ID, SPLIT_ID))
    return loop._replace(options={**loop.options, "draw": draw})


# prompt length, block length, length of the answer, loop
CASES: dict[str, list[tuple[int, int, int, Loop]]] = {
    "sdar": [
        (20, 4, 16, dynamic(4, 0.5)),
        (3, 4, 9, dynamic(2, 0.3)),
        (64, 4, 12, paced("semi_ar", "static", 2)),
        (130, 16, 21, dynamic(8, 0.4)),
        (33, 8, 30, paced("sequential", "sequential", 4)),
        (50, 7, 16, dynamic(3, 0.4)),
        (17, 32, 40, paced("semi_ar", "static", 5)),
    ],
    "stable_diffcoder": [
        (20, 4, 16, reached(0.4)),
        (5, 8, 21, reached(0.25)),
        (66, 4, 12, shared(4)),
        (7, 16, 30, shared(5)),
        (35, 32, 40, reached(0.3)),
    ],
    "llada2": [
        (40, 8, 24, joint(0.4, 0.3, 4)),
        (66, 4, 12, joint(0.5, 0.0, 2)),
        (7, 16, 20, joint(0.3, 0.6, 16)),
        (64, 8, 16, joint(0.9, 0.5, 0)),
        (90, 32, 33, joint(0.4, 0.2, 3)),
    ],
    "llada22": [
        (20, 8, 24, edited(0.5, 0.0, 4)),
        (66, 16, 30, edited(0.3, 0.2, 6, steps=5)),
        (7, 8, 20, edited(0.9, 0.4, 0, steps=4)),
        (90, 32, 33, edited(0.6, 0.3, 16)),
        (40, 8, 24, unedited(dynamic(8, 0.4))),
        (130, 16, 21, unedited(paced("semi_ar", "static", 8))),
        (5, 8, 32, unedited(dynamic(8, 0.9))),
        # Requests without edits share their steps with requests that edit.
        (5, 8, 32, unedited(joint(0.6, 0.3, 2))),
    ],
    "nemotron": [
        (20, 8, 24, seeded(0.5)),
        (63, 4, 12, seeded(0.25)),
        (5, 16, 21, seeded_shares(4)),
        (130, 32, 40, seeded(0.3)),
        (64, 7, 30, seeded_shares(5)),
        (91, 5, 3, seeded(0.9)),
        (21, 1, 30, ONE_BY_ONE),
        (70, 1, 9, bounded(ONE_BY_ONE, 4)),
        (30, 8, 24, confirmed(0.0)),
        (64, 32, 33, confirmed(0.0)),
        (100, 5, 20, confirmed(0.4)),
        (40, 8, 24, bounded(seeded(0.4), 11)),
        (9, 4, 16, bounded(seeded_shares(2), 8)),
    ],
    "fast_dllm": [
        (64, 32, 33, sub_blocks(8, 0.5)),
        (32, 8, 20, sub_blocks(4, 0.9)),
        (5, 8, 13, sub_blocks(8, 0.4)),
        (130, 4, 9, sub_blocks(2, 1.0)),
        (71, 16, 30, sub_blocks(4, 0.3)),
    ],
}


def wanted_of(folder: Path, name: str) -> list[Wanted]:
    """Return requests whose reference runs do not depend on rounding."""
    model, wanted = load_reference(folder), []
    for length, block_length, gen_length, loop in CASES[name]:
        lengths = {"block_length": block_length, "gen_length": gen_length}
        key = {"prompt_length": length, **lengths, **loop.fields}
        run = partial(searched, model, load_reference(folder, torch.float64), length, loop, lengths)
        actual = golden.written(model, key, run)
        ask = Request(random_prompt(length, actual["prompt_seed"]), {**lengths, **loop.fields})
        # The grid of blocks begins after the prompt for Nemotron, and at position 0 otherwise.
        end = len(actual["answer"]) + (0 if name == "nemotron" else length)
        is_whole = end % block_length == 0
        wanted.append(Wanted(ask, actual["answer"], actual["num_forwards"], is_whole))
    return wanted


def searched(
    single: Any, double: Any, length: int, loop: Loop, lengths: dict[str, int]
) -> dict[str, Any]:
    """Search the first prompt whose run is the same in single and in double precision."""
    options = {**lengths, **loop.options, "mask_id": MASK_ID, "stop_ids": STOP_IDS}
    for seed in range(40):
        try:
            runs = [
                loop.run(
                    partial(logits_of, model, lengths["block_length"]),
                    random_prompt(length, seed),
                    **options,
                )
                for model in (single, double)
            ]
        except block_loops.NoEnd:
            continue
        masks = any(MASK_ID in canvas[: lengths["gen_length"]] for canvas in runs[0].history[-1:])
        if runs[0].history == runs[1].history and not masks:
            actual = {"answer": runs[0].answer, "num_forwards": runs[0].forwards}
            return {"prompt_seed": seed, **actual}
    raise AssertionError(f"no clear prompt of {length} tokens for {loop.asked}")


def logits_of(
    model: Any, block_length: int, tokens: Sequence[int], num_causal: int | None = None
) -> torch.Tensor:
    ids = torch.tensor([list(tokens)])
    if num_causal is not None:
        causal: torch.Tensor = model.causal_logits(ids, num_causal)[0]
        return causal
    actual: torch.Tensor = model.logits(ids, block_length)[0]
    return actual


def run_ahead(worker: Any) -> None:
    worker.worker.loop.runs_ahead = True


# This test is the first one of the file, because ranks are only forked if no engine ran before.
@pytest.mark.parametrize("name", ["llada2", "llada22", "nemotron"])
def test_two_ranks(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Both ranks keep the same pages and take the same steps. Half of the requests run ahead.

    Every second request is enough, because rules and pages do not depend on ranks.
    """
    folder = checkpoint(name)
    wanted = wanted_of(folder, name)[::2]
    with running(
        folder,
        tensor_parallel_size=2,
        max_num_batched_tokens=2 * ROW_BUDGET,
        num_gpu_blocks_override=2 * NUM_PAGES,
    ) as engine:
        same(engine.ask(*mixed(wanted[::2])), wanted[::2])
        engine.llm.collective_rpc(run_ahead)
        same(engine.ask(*mixed(wanted[1::2])), wanted[1::2])


@pytest.fixture(scope="module", params=list(CASES))
def served(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Any:
    """Start an engine with few pages and rows, and return it with the expected answers."""
    folder = checkpoint(request.param)
    wanted = wanted_of(folder, request.param)
    with running(
        folder, max_num_batched_tokens=ROW_BUDGET, num_gpu_blocks_override=NUM_PAGES
    ) as engine:
        yield engine, wanted


def same(answers: Sequence[Response], wanted: Sequence[Wanted]) -> None:
    """Check answers and steps.

    A loop finishes its last block; the engine stops at the answer's end.
    """
    assert [answer.token_ids for answer in answers] == [case.answer for case in wanted]
    for answer, (_, _, num_forwards, is_whole) in zip(answers, wanted, strict=True):
        assert answer.num_steps is not None
        assert answer.num_steps <= num_forwards
        if is_whole:
            assert answer.num_steps == num_forwards


def with_cache(wanted: Sequence[Wanted], cache: str) -> list[Request]:
    return [Request(ask.prompt, {**ask.extra, "cache": cache}) for ask, *_ in wanted]


def mixed(wanted: Sequence[Wanted]) -> list[Request]:
    """Return the requests, alternating between exact keys and full recompute."""
    asks = with_cache(wanted, "exact")
    asks[1::2] = with_cache(wanted, "none")[1::2]
    return asks


def test_alone(served: tuple[Engine, list[Wanted]], fuses: bool) -> None:
    """Requests give the loop's tokens alone: half of them with blocks fused, the others without."""
    engine, wanted = served
    half = wanted[fuses::2]
    same([engine.ask(ask)[0] for ask in mixed(half)], half)


def test_in_mixed_batches(
    served: tuple[Engine, list[Wanted]],
    fuses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches give the loop's tokens with fused blocks and running ahead, or with neither.

    `test_exact_cache.py` has all four combinations.
    """
    engine, wanted = served
    monkeypatch.setattr(engine.loop, "runs_ahead", fuses)
    if fuses:
        asks = [*with_cache(wanted, "exact"), *with_cache(wanted, "none")[::2]]
        same(engine.ask(*asks), [*wanted, *wanted[::2]])
    else:
        same(engine.ask(*mixed(wanted)), wanted)
    assert engine.is_idle()


def test_in_chunks(served: tuple[Engine, list[Wanted]]) -> None:
    """Steps that do not fit as a whole are cut into chunks, but not within a router's window."""
    engine, wanted = served
    runner, planner = engine.runner, engine.runner.planner
    budget = runner.pool.budget_bytes
    try:
        shrink(runner, runner.caches.reserved_bytes + 120_000)
        same(engine.ask(*mixed(wanted)), wanted)
    finally:
        runner.pool.budget_bytes, runner.planner = budget, planner


def test_tokens_that_moved_have_probabilities(served: tuple[Engine, list[Wanted]]) -> None:
    """Every token has a finite logprob, even if the last block is longer than the answer."""
    engine, wanted = served
    asks = [Request(ask.prompt, ask.extra, {"logprobs": 0}) for ask, *_ in wanted]
    for output, case in zip(engine.outputs(*asks), wanted, strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == case.answer
        actual = [entry.logprob for place in answer.logprobs for entry in place.values()]
        if case.ask.extra.get("editing_threshold", 0) == 0:
            assert torch.tensor(actual).isfinite().all()


@pytest.mark.parametrize(("most", "ahead"), [(3, True), (7, False)])
def test_guesses_change_nothing(
    served: tuple[Engine, list[Wanted]], most: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts do not change tokens, even with preempted requests and prompts in several parts.

    Steps run ahead where blocks are stored alone; `test_in_mixed_batches` has the other two cases.
    """
    engine, wanted = served
    monkeypatch.setenv("VLLM_DLLM_COMMIT_FUSION", "0" if ahead else "1")
    monkeypatch.setattr(engine.loop, "runs_ahead", ahead)
    engine.runner.pages.fix(NUM_PAGES, 1000, scratch=12)
    assert engine.scheduler.reset_prefix_cache()
    monkeypatch.setattr(engine.runner.planner, "row_budget", 6 * ROW_BUDGET)
    algorithms = algorithms_for(engine.runner.model.family)
    drafted = [w for w in wanted if algorithms[w.ask.extra["algorithm"]].speculates]
    if not drafted:
        return
    asks = speculating([*with_cache(drafted, "exact"), *with_cache(drafted, "none")], most)
    together = engine.ask(*asks)
    same(together, [*drafted, *drafted])
    alone = [engine.ask(ask)[0] for ask in speculating(mixed(drafted), most)]
    same(alone, drafted)
    for answers in (together[: len(drafted)], together[len(drafted) :], alone):
        assert any(answer.report["states_accepted"] for answer in answers)
    assert engine.is_idle()
