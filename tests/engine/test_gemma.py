# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma's loop gives the tokens and steps of the authors' `generate`."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    refusal_error,
    rows_of_launches,
    running,
    start,
)
from tests.engine.schedules import ask_while_pages_are_lost
from tests.gemma import CANVAS, STOP_IDS, GemmaRun, load_network, make_gemma, run_loop


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


def test_a_context_is_read_with_the_first_step_of_the_next_canvas(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canvas of N steps takes N forward passes, and the last canvas is never read as context."""
    launched = rows_of_launches(engine, monkeypatch)
    engine.scheduler.reset_prefix_cache()
    engine.ask(request(random_prompt(20, 30), seed=1, steps_per_block=3, max_tokens=3 * CANVAS))
    assert launched == [28, 8, 8, 16, 8, 8, 16, 8, 8]
    del launched[:]
    engine.ask(request(random_prompt(70, 31), seed=1, steps_per_block=2))
    assert launched == [40, 38, 8, 16, 8]


def test_nothing_is_read_that_was_not_written(engine: Engine, runs: list[GemmaRun]) -> None:
    """Rows of pages are as wide as the widest layer requires; other layers use a part."""
    assert engine.scheduler.reset_prefix_cache()
    for layer in range(4):
        engine.runner.caches.keys(layer).fill_(torch.nan)
        engine.runner.caches.values(layer).fill_(torch.nan)
    for answer, one, run in zip(engine.ask(*CASES), CASES, runs, strict=True):
        assert_same(answer, one, run)


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
    answer = ask_while_pages_are_lost(engine, one, 6 * every)
    assert_same(answer, one, reference(network, one))


def test_without_pages(engine: Engine, runs: list[GemmaRun]) -> None:
    """Without a cache, every forward pass reads the context again."""
    asks = [Request(one.prompt, {**one.extra, "cache": "none"}, one.sampling) for one in CASES]
    for answer, one, run in zip(engine.ask(*asks), asks, runs, strict=True):
        assert_same(answer, one, run)


@pytest.mark.parametrize("steps", [1, 4])
def test_warm_start(engine: Engine, network: Any, steps: int) -> None:
    """A given first canvas replaces the noise of the first canvas alone."""
    prompt, given = random_prompt(20, 12), random_prompt(CANVAS, 13)
    one = request(prompt, seed=14, steps_per_block=steps)
    (answer,) = engine.ask(Request(prompt, {**one.extra, "canvas_token_ids": given}, one.sampling))
    run = run_loop(
        network,
        prompt,
        max_tokens=2 * CANVAS,
        seed=14,
        max_denoising_steps=steps,
        decoder_input_ids=torch.tensor([given]),
    )
    assert answer.token_ids == run.ids
    if steps == 1:
        plain = reference(network, one).ids
        assert plain[:CANVAS] != run.ids[:CANVAS]


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


# ---- fields that edit logits, before the temperature of the step ----


def filtered(keep: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an edit that keeps some of the probabilities [R, V], sorted in descending order."""

    def edit(_: Tensor, logits: Tensor) -> Tensor:
        ordered, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ~keep(ordered))
        return logits.masked_fill(removed, -torch.inf)

    return edit


def of_columns(columns: list[int], value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an edit that adds a value to the logits of some tokens."""
    return lambda _, logits: logits.index_add(
        1, torch.tensor(columns), torch.full((len(logits), len(columns)), value)
    )


def penalised(_: Tensor, ids: Tensor, answer: Tensor, logits: Tensor) -> Tensor:
    counts = torch.bincount(answer, minlength=256)
    seen = torch.bincount(ids, minlength=256) > 0
    scaled = torch.where(logits > 0, logits / 1.3, logits * 1.3)
    logits = torch.where(seen, scaled, logits)
    return logits - 0.5 * counts - 0.7 * (counts > 0)


EDITED_PROMPT = random_prompt(11, 20)
EDITS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "top_k": ({"top_k": 3}, filtered(lambda p: torch.arange(256).expand_as(p) < 3)),
    "top_p": ({"top_p": 0.6}, filtered(lambda p: p.cumsum(-1) - p < 0.6)),
    "min_p": ({"min_p": 0.2}, filtered(lambda p: p >= 0.2 * p[:, :1])),
    "logit_bias": ({"logit_bias": {7: 6.0, 90: 6.0}}, of_columns([7, 90], 6.0)),
    "allowed_token_ids": (
        {"allowed_token_ids": [*range(30, 90)]},
        lambda _, z: z.index_fill(1, torch.tensor([*range(30), *range(90, 256)]), -torch.inf),
    ),
    "penalties": (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.7},
        lambda ids, z: penalised(ids, ids, ids[len(EDITED_PROMPT) :], z),
    ),
}


class Edit:
    """Logits processor of the authors' loop."""

    def __init__(self, edit: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.edit = edit

    def __call__(self, ids: Tensor, logits: Tensor, cur_step: Tensor) -> Tensor:
        return self.edit(ids[0], logits[0])[None]


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits(engine: Engine, network: Any, name: str, temperature: float) -> None:
    """Best and drawn tokens, entropies and the next step depend on edited logits."""
    fields, edit = EDITS[name]
    options = {"seed": 21, "temperature": temperature, "entropy_bound": 2.0}
    one = request(EDITED_PROMPT, steps_per_block=6, max_tokens=3 * CANVAS, **options)
    run = run_loop(
        network,
        EDITED_PROMPT,
        max_tokens=3 * CANVAS,
        max_denoising_steps=6,
        logits_processor=LogitsProcessorList([Edit(edit)]),
        **options,
    )
    # Upstream drops filters at temperature 0 from its own parameters.
    (answer,) = engine.ask(Request(one.prompt, {**one.extra, **fields}, one.sampling))
    assert answer.token_ids == run.ids
    assert reference(network, one).ids != run.ids


def test_no_stop_token_before_the_fewest_tokens(engine: Engine, network: Any) -> None:
    one = CASES[1]
    stops = reference(network, one).ids[:2]
    sampling = {**one.sampling, "stop_token_ids": stops, "min_tokens": 5}
    (answer,) = engine.ask(Request(one.prompt, {**one.extra, "ignore_eos": False}, sampling))
    assert not {*stops, *STOP_IDS} & {*answer.token_ids[:5]}
    assert len(answer.token_ids) > 5


REFUSED: dict[str, Any] = {
    "mask_id": 3,
    "cfg_scale": 1.0,
    "allow_infill": True,
    "suffix_ids": [5],
    "remasking": "random",
    "threshold": 0.5,
    "logits_eos_inf": True,
    "confidence_eos_eot_inf": True,
    "confidence_dtype": "float64",
    "cache": "dual",
    "algorithm": "low_confidence_dynamic",
    "complete_blocks": True,
    "block_length": CANVAS + 1,
    "canvas_token_ids": [1] * (CANVAS - 1),
    "t_max": 0.3,
    "confidence_threshold": -1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field(engine: Engine, name: str) -> None:
    with pytest.raises(refusal_error(), match=f"^{name}") as refused:
        engine.ask(Request([1, 2, 3], {name: REFUSED[name]}))
    assert "\n" not in str(refused.value)


def test_words_of_several_tokens_are_refused(engine: Engine) -> None:
    with pytest.raises(refusal_error(), match=r"^bad_words"):
        engine.ask(Request([1, 2, 3], {}, {"bad_words": ["long words"]}))


def test_shorter_canvases(engine: Engine) -> None:
    """Canvases may be shorter than the checkpoint's; answers of several lengths share steps."""
    asks = [
        request(random_prompt(9, 22), seed=3, steps_per_block=4, block_length=length)
        for length in (1, 3, CANVAS)
    ]
    answers = engine.ask(*asks)
    assert [len(answer.token_ids) for answer in answers] == [2 * CANVAS] * 3
    assert [answer.num_steps for answer in answers] == [64, 24, 8]
    alone = [engine.ask(one)[0].token_ids for one in asks]
    assert [answer.token_ids for answer in answers] == alone


@pytest.mark.parametrize("number", [1, 6])
def test_canvas_after_every_step(engine: Engine, runs: list[GemmaRun], number: int) -> None:
    """Events have the most likely tokens, their probabilities and the entropies of every step."""
    one, run = CASES[number], runs[number]
    streamed = Request(one.prompt, {**one.extra, "stream_canvas": True}, one.sampling)
    views = [step["canvas"] for step in reports(engine, streamed) if "canvas" in step]
    assert [view["step"] for view in views] == list(range(1, sum(run.steps) + 1))
    finished = list[int]()
    canvases = [canvas for canvas, count in enumerate(run.steps) for _ in range(count)]
    for view, canvas, logits in zip(views, canvases, run.logits, strict=True):
        own = slice(canvas * CANVAS, None)
        token_ids, kept = unpacked(view, "token_ids", "<i4"), unpacked(view, "committed", "?")
        assert token_ids.tolist() == [*run.ids[: own.start], *logits.argmax(-1).tolist()]
        shares = torch.softmax(logits, dim=-1)
        entropies = torch.special.entr(shares).sum(-1)
        close = {"atol": 1e-4, "rtol": 1e-3}
        torch.testing.assert_close(
            torch.tensor(unpacked(view, "entropies", "<f4")[own]), entropies, **close
        )
        torch.testing.assert_close(
            torch.tensor(unpacked(view, "confidence", "<f4")[own]), shares.amax(-1), **close
        )
        assert kept[: own.start].all()
        ordered, order = entropies.sort()
        bound = one.extra.get("entropy_bound", 0.1)
        wanted = set(order[ordered.cumsum(0) - ordered <= bound].tolist())
        is_last = token_ids.tolist() == run.ids[: len(token_ids)] and kept.all()
        assert is_last or {*kept[own].nonzero()[0].tolist()} == wanted
        finished = token_ids.tolist()
    assert finished == run.ids


def reports(engine: Engine, one: Request) -> list[dict[str, Any]]:
    """Return the scheduler's message about the request after every step."""
    start(engine, "a", one)
    messages = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs = engine.llm.llm_engine.step()
        messages += [(output.kv_transfer_params or {}).get("dllm", {}) for output in outputs]
    return messages


def unpacked(view: dict[str, Any], name: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(view[name], dtype)


def test_log_probabilities_of_the_last_step(engine: Engine, runs: list[GemmaRun]) -> None:
    """A token has its log probability at the temperature of the step that ended its canvas."""
    one, run = CASES[6], runs[6]
    sampling = {**one.sampling, "logprobs": 3, "max_tokens": 2 * CANVAS + 3}
    (output,) = engine.outputs(Request(one.prompt, one.extra, sampling))
    ends = np.cumsum(run.steps) - 1
    logits = torch.cat([run.logits[end] for end in ends])
    wanted = torch.log_softmax(logits, dim=-1)
    answer = output.outputs[0]
    assert list(answer.token_ids) == run.ids[: 2 * CANVAS + 3]
    for actual, token, own in zip(answer.logprobs, answer.token_ids, wanted, strict=False):
        top = {int(t): float(own[t]) for t in own.topk(3).indices}
        assert actual.keys() == top.keys()
        assert actual[token].rank == 1
        for other, value in top.items():
            assert actual[other].logprob == pytest.approx(value, abs=1e-4)


def test_trajectory(engine: Engine, runs: list[GemmaRun]) -> None:
    """A token's commit is the step from which on it stayed the most likely one."""
    one, run = CASES[6], runs[6]
    asked = {**one.extra, "return_trajectory": True, "return_entropy": True}
    (answer,) = engine.ask(Request(one.prompt, asked, one.sampling))
    trajectory = answer.report["trajectory"]
    assert trajectory["token_ids"] == run.ids
    assert trajectory["num_steps"] == sum(run.steps)
    assert trajectory["block_starts"] == [0, CANVAS, 2 * CANVAS]
    best = [logits.argmax(-1) for logits in run.logits]
    changes = list[tuple[int, int, int]]()
    for position in range(len(run.ids)):
        canvas, place = divmod(position, CANVAS)
        first = sum(run.steps[:canvas])
        own = [int(tokens[place]) for tokens in best[first : first + run.steps[canvas]]]
        new = [s for s, token in enumerate(own) if s == 0 or token != own[s - 1]]
        changes += [(first + s + 1, position, own[s]) for s in new]
        step = first + new[-1]
        assert trajectory["commit_steps"][position] == step + 1
        assert trajectory["block_steps"][position] == new[-1] + 1
        distribution = torch.log_softmax(run.logits[step][place], dim=-1)
        entropy = -float((distribution.exp() * distribution).sum())
        assert trajectory["logprobs"][position] == pytest.approx(
            float(distribution.max()), abs=1e-4
        )
        assert trajectory["entropies"][position] == pytest.approx(entropy, abs=1e-3)
    edits = trajectory["edits"]
    columns = (edits["steps"], edits["positions"], edits["token_ids"])
    assert list(zip(*columns, strict=True)) == sorted(changes)
    assert not trajectory["replayable"]


FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["Paris", "London", "Rome"]}, "Paris|London|Rome"),
    "one canvas": ({"regex": "[b-d]{4}"}, "[b-d]{4}"),
    "several canvases": ({"regex": "[b-d]{20}(xy)?"}, "[b-d]{20}(xy)?"),
    "any length": ({"regex": "(go )+home"}, "(go )+home"),
    "json": (
        {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        r'\{\s*"n"\s*:\s*-?\d+\s*\}',
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_formats(engine: Engine, runs: list[GemmaRun], name: str, temperature: float) -> None:
    """Answers are strings of their formats, across canvases, also in a step with other requests."""
    spec, pattern = FORMATS[name]
    asks = [
        request(
            random_prompt(9, seed),
            seed=seed,
            steps_per_block=1 + seed,
            temperature=temperature,
            max_tokens=4 * CANVAS,
            structured_outputs=spec,
            ignore_eos=False,
            **more,
        )
        for seed, more in enumerate(({}, {"stream_canvas": True}, {"return_trajectory": True}))
    ]
    *answers, plain = engine.ask(*asks, CASES[1])
    for answer, one in zip(answers, asks, strict=True):
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason == "stop"
        assert engine.ask(one)[0].token_ids == answer.token_ids
    assert_same(plain, CASES[1], runs[1])


def test_a_format_that_fills_its_canvases(engine: Engine, network: Any) -> None:
    """Where tokens are independent of each other, the most likely string has the best of each."""
    letters = [ord(letter) for letter in "bcd"]
    fields = {"structured_outputs": {"regex": "[b-d]{16}"}, "stream_canvas": True}
    one = request(random_prompt(9), seed=1, steps_per_block=1, temperature=0.0)
    (answer,) = engine.ask(Request(one.prompt, {**one.extra, **fields}, one.sampling))
    first = reference(network, one).logits[0][:, letters].argmax(-1)
    assert answer.token_ids[:CANVAS] == [letters[best] for best in first]
    assert len(answer.token_ids) == 2 * CANVAS


def test_likelihoods_are_those_of_the_causal_context(engine: Engine, network: Any) -> None:
    """They equal the encoder's logits, alone and in the steps of a request that denoises."""
    prompt = random_prompt(30, 21)
    positions, token_ids = [1, 5, 29], [[7], [8, 9], [prompt[29]]]
    scored = Request(prompt, {"score": {"positions": positions, "token_ids": token_ids}})
    with torch.no_grad():
        hidden = network.model.encoder(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        cap = network.config.text_config.final_logit_softcapping
        logits = torch.tanh(network.lm_head(hidden) / cap) * cap
    wanted = torch.log_softmax(logits, dim=-1)
    other = request(random_prompt(20, 22), seed=23, steps_per_block=4)
    (alone,) = engine.ask(scored)
    together = engine.ask(other, scored)[1]
    for answer in (alone, together):
        for place, tokens, given in zip(
            positions, token_ids, answer.report["scores"]["logprobs"], strict=True
        ):
            exact = wanted[place - 1, tokens]
            torch.testing.assert_close(torch.tensor(given), exact, atol=1e-4, rtol=1e-4)
