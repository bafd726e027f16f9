# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma's loop gives the tokens and steps of the authors' `generate`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, Response, running, start, step
from tests.gemma import CANVAS, GemmaRun, load_network, make_gemma, run_loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load_network(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(folder, max_num_batched_tokens=40) as engine:
        yield engine


def request(prompt: list[int], *, max_tokens: int = 2 * CANVAS, **fields: Any) -> Request:
    temperature = fields.pop("temperature", 1.0)
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": fields.pop("seed")}
    return Request(prompt, {"ignore_eos": True, **fields}, sampling)


def reference(network: Any, one: Request) -> GemmaRun:
    """Return the authors' run of a request."""
    names = {"steps_per_block": "max_denoising_steps"}
    options = {names.get(n, n): v for n, v in one.extra.items() if n != "ignore_eos"}
    return run_loop(network, one.prompt, **one.sampling, **options)


def assert_same(answer: Response, one: Request, run: GemmaRun) -> None:
    max_tokens = one.sampling["max_tokens"]
    assert answer.token_ids == run.ids[:max_tokens]
    assert answer.num_steps == sum(run.steps)


# At low temperatures, canvases of random weights end early, too.
COOL = {"t_min": 0.05, "t_max": 0.3, "confidence_threshold": 0.5, "max_tokens": 3 * CANVAS}
CASES = [
    request(random_prompt(5, 1), seed=1, steps_per_block=6),
    request(random_prompt(30, 2), seed=2, steps_per_block=8, max_tokens=3 * CANVAS),
    request(random_prompt(1, 3), seed=3, steps_per_block=1),
    request(random_prompt(13, 5), seed=5, steps_per_block=10, temperature=0.0, entropy_bound=2.0),
    request(random_prompt(50, 6), seed=2**63 + 6, steps_per_block=5, t_min=0.2, t_max=1.5),
    request(random_prompt(7, 0), seed=0, steps_per_block=16, entropy_bound=100.0, **COOL),
    request(random_prompt(16, 1), seed=1, steps_per_block=16, entropy_bound=1.0, **COOL),
    request(random_prompt(25, 2), seed=2, stability_threshold=3, entropy_bound=3.0, **COOL),
    request(
        random_prompt(12, 4),
        seed=4,
        steps_per_block=16,
        confidence_threshold=1.3,
        stability_threshold=0,
        max_tokens=20,
    ),
    request(random_prompt(12, 7), seed=7, stability_threshold=2, entropy_bound=0.5, **COOL),
]


@pytest.fixture(scope="module")
def runs(network: Any) -> list[GemmaRun]:
    runs = [reference(network, one) for one in CASES]
    ends = {count for run in runs for count in run.steps}
    assert len(ends) > 10  # canvases end after different numbers of steps
    return runs


@pytest.mark.parametrize("number", range(len(CASES)))
def test_alone(engine: Engine, runs: list[GemmaRun], number: int) -> None:
    (answer,) = engine.ask(CASES[number])
    assert_same(answer, CASES[number], runs[number])


def test_together(engine: Engine, runs: list[GemmaRun], runs_ahead: bool) -> None:
    """Requests in a batch, whose rows take turns and whose prompts are cut, do not mix."""
    for answer, one, run in zip(engine.ask(*CASES), CASES, runs, strict=True):
        assert_same(answer, one, run)
    assert engine.is_idle()


def test_noise_depends_on_no_neighbour(engine: Engine, runs: list[GemmaRun]) -> None:
    many = [CASES[0], *CASES[3:], CASES[0]]
    answers = engine.ask(*many)
    assert answers[0].token_ids == answers[-1].token_ids == runs[0].ids


LONG = random_prompt(200, 8)


def test_prompt_in_chunks_and_from_cached_pages(engine: Engine, network: Any) -> None:
    one = request(LONG, seed=9, steps_per_block=4)
    run = reference(network, one)
    engine.scheduler.reset_prefix_cache()
    hits = []
    for _ in range(2):
        (output,) = engine.outputs(one)
        hits.append(output.num_cached_tokens)
        assert list(output.outputs[0].token_ids) == run.ids
    assert hits == [0, 192]
    longer = request([*LONG, *run.ids, 7, 8, 9], seed=10, steps_per_block=4)
    (output,) = engine.outputs(longer)
    assert list(output.outputs[0].token_ids) == reference(network, longer).ids
    assert output.num_cached_tokens == 192


@pytest.mark.parametrize("every", [1, 3])
def test_lost_pages(engine: Engine, network: Any, every: int) -> None:
    """A request whose pages are taken away computes its context again, and goes on."""
    one = request(LONG[:90], seed=11, steps_per_block=5, max_tokens=3 * CANVAS)
    start(engine, "a", one)
    answers: dict[str, Response] = {}
    for count in range(1, 200):
        answers |= step(engine)
        if "a" in answers:
            break
        if count % (6 * every) == 0:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert_same(answers["a"], one, reference(network, one))


def test_without_pages(engine: Engine, runs: list[GemmaRun]) -> None:
    """Without a cache, every forward pass reads the context again."""
    asks = [Request(one.prompt, {**one.extra, "cache": "none"}, one.sampling) for one in CASES]
    for answer, one, run in zip(engine.ask(*asks), asks, runs, strict=True):
        assert_same(answer, one, run)


def test_warm_start(engine: Engine, network: Any) -> None:
    """A given first canvas replaces the noise of the first canvas alone."""
    prompt, given = random_prompt(20, 12), random_prompt(CANVAS, 13)
    one = request(prompt, seed=14, steps_per_block=4, canvas_token_ids=given)
    (answer,) = engine.ask(one)
    run = run_loop(
        network,
        prompt,
        max_tokens=2 * CANVAS,
        seed=14,
        max_denoising_steps=4,
        decoder_input_ids=torch.tensor([given]),
    )
    assert answer.token_ids == run.ids


def test_stop_token(engine: Engine, network: Any) -> None:
    """The answer ends behind the first stop token, however many canvases it may have."""
    one = CASES[1]
    ids = reference(network, one).ids
    stop = ids[CANVAS + 3]
    end = ids.index(stop) + 1
    sampling = {**one.sampling, "stop_token_ids": [stop]}
    fields = {**one.extra, "ignore_eos": False}
    (answer,) = engine.ask(Request(one.prompt, fields, sampling))
    assert answer.token_ids == ids[:end]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, CANVAS - 1, CANVAS + 1])
def test_the_limit_cuts_the_answer(engine: Engine, runs: list[GemmaRun], max_tokens: int) -> None:
    one = CASES[1]
    (answer,) = engine.ask(
        Request(one.prompt, one.extra, {**one.sampling, "max_tokens": max_tokens})
    )
    assert answer.token_ids == runs[1].ids[:max_tokens]
    assert answer.num_steps == sum(runs[1].steps[: -(-max_tokens // CANVAS)])


def test_defaults_of_the_checkpoint(network: Any, tmp_path: Path) -> None:
    """Values of generation_config.json are the defaults; its length limits no answer."""
    generation = {"max_denoising_steps": 3, "t_min": 0.1, "t_max": 0.9, "max_new_tokens": CANVAS}
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 4.0}
    folder = make_gemma(tmp_path, generation={**generation, "sampler_config": sampler})
    prompt = random_prompt(9, 15)
    run = run_loop(
        network,
        prompt,
        max_tokens=20,
        seed=16,
        entropy_bound=4.0,
        max_denoising_steps=3,
        t_min=0.1,
        t_max=0.9,
    )
    with running(folder) as engine:
        (answer,) = engine.ask(request(prompt, seed=16, max_tokens=20))
    assert answer.token_ids == run.ids[:20]
