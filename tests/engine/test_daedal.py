# SPDX-License-Identifier: Apache-2.0
"""`canvas: daedal` against an independent loop: lengths, insertions, batches, streams, limits."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.daedal import Answer, daedal
from reference.models import load_reference
from torch import Tensor

from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.harness import (
    DETERMINISTIC,
    MAX_MODEL_LEN,
    Engine,
    Request,
    finish,
    rows_of_launches,
    running,
    start,
    step,
)
from vllm.diffusion.decoding import Candidates
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

# ---- random tables of logits -------------------------------------------------------------------

EOS, MASK, VOCAB = 0, 1, 7
PROMPT = [2, 3, 4]
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=None, stop=frozenset({EOS})),
    max_model_len=512,
    vocab_size=VOCAB,
)


def random_case(chance: random.Random) -> tuple[dict[str, Any], Callable[[list[int]], Tensor]]:
    """Return parameters and a model whose logits depend on the whole sequence."""
    window = chance.randint(1, 12)
    parameters = {
        "max_tokens": chance.randint(1, 60),
        "initial_length": chance.randint(1, 24),
        "block_length": chance.randint(1, 16),
        "threshold": chance.choice([0.3, 0.6, 0.9]),
        "low_threshold": chance.choice([0.1, 0.3, 0.5]),
        "expansion": chance.randint(1, 9),
        "eos_window": window,
        "eos_threshold": chance.choice([0.0, 0.2, 0.5]),
        "eos_expand_threshold": chance.choice([0.3, 0.6, 0.9]),
    }
    scale, grain = chance.choice([1.0, 2.0, 4.0]), chance.choice([0.0, 0.5])
    end, mask = chance.choice([0.0, 1.0, 3.0]), chance.choice([-9.0, 0.0, 4.0, 30.0])
    seed = chance.randrange(2**20)

    def logits_of(row: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *row)) % 2**31)
        logits = scale * torch.randn(len(row), VOCAB, generator=generator)
        # Later positions tend to be the end. Coarse logits have ties.
        logits[:, EOS] += end * torch.linspace(-1, 1, len(row))
        logits[:, MASK] += mask
        return logits if grain == 0 else (logits / grain).round() * grain

    return parameters, logits_of


def decode(parameters: dict[str, Any], logits_of: Callable[[list[int]], Tensor]) -> Answer:
    """Run our canvas with one length per forward pass."""
    asked = {"algorithm": "daedal", "ignore_eos": True, **parameters}
    params = decision.decide(fields.canonical(asked), MODEL, PROMPT)
    canvas = Canvas(NewCanvas("a", PROMPT, params))
    lengths, final = [params.gen_length], list[int]()
    while not canvas.is_complete:
        target, _ = canvas.next_forward()
        logits = logits_of(canvas.tokens.tolist())[torch.from_numpy(target.eligible)]
        positions = torch.from_numpy(target.eligible - len(PROMPT))
        assert canvas.adjust_logits is not None
        for part in torch.randperm(len(logits)).tensor_split(2):
            assert torch.equal(canvas.adjust_logits(logits[part], positions[part]), logits[part])
        score, token = torch.softmax(logits, dim=-1).max(dim=-1)
        canvas.commit(Candidates(target.eligible, token.numpy(), score.double().numpy()))
        result = canvas.report()
        final += result.new_token_ids
        # Whole prefixes are streamed, and no later insertion moves them.
        assert canvas.tokens[len(PROMPT) :][: len(final)].tolist() == final
        if result.new_lengths:
            lengths += result.new_lengths
            params = params.with_canvas(lengths[-1])
            canvas.grow(params)
    assert canvas.tokens.size == len(PROMPT) + lengths[-1]
    return Answer(final, lengths, canvas.num_steps)


@pytest.mark.parametrize("seed", range(500))
def test_the_rule_decodes_as_its_published_loop(seed: int) -> None:
    parameters, logits_of = random_case(random.Random(seed))
    wanted = daedal(logits_of, PROMPT, mask=MASK, eos=EOS, **parameters)
    assert decode(parameters, logits_of) == wanted
    assert len(wanted.canvas) <= parameters["max_tokens"]


def test_the_cases_cover_both_stages() -> None:
    cases = [random_case(random.Random(seed)) for seed in range(500)]
    runs = [
        (parameters, daedal(logits_of, PROMPT, mask=MASK, eos=EOS, **parameters))
        for parameters, logits_of in cases
    ]
    first = [min(p["initial_length"], p["max_tokens"]) for p, _ in runs]
    # Answers that need no more than their first canvas, that reach the limit, and in between.
    assert sum(run.lengths[0] == run.lengths[-1] for _, run in runs) > 20
    assert sum(run.lengths[-1] == p["max_tokens"] for p, run in runs) > 50
    between = [
        n < run.lengths[-1] < p["max_tokens"] for n, (p, run) in zip(first, runs, strict=True)
    ]
    assert sum(between) > 50


# ---- the engine --------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "canvas": "daedal",
    "initial_length": 8,
    "block_length": 8,
    "eos_window": 8,
    "eos_threshold": 0.4,
    "expansion": 4,
    "low_threshold": 0.2,
}
KINDS: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3},
    {"eos_threshold": 0.0},
    {"eos_threshold": 2.0},
    {"low_threshold": 0.5, "eos_expand_threshold": 2.0},
    {"cfg_scale": 0.5},
    {"cfg_scale": 1.0, "low_threshold": 0.6, "eos_expand_threshold": 2.0},
    {"block_length": 5, "expansion": 3},
]
LIMIT = 70


@pytest.fixture(scope="module", params=["gqa", "dream"])
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, Any]]:
    folder = checkpoint(request.param)
    with running(folder, additional_config=DETERMINISTIC) as engine:
        yield engine, load_reference(folder)


def asked(prompt: list[int], bias: float, **more: Any) -> Request:
    sampling = {"logit_bias": {EOS_ID: bias}, "max_tokens": LIMIT, "ignore_eos": True}
    return Request(prompt, {**SHORT, **more}, sampling)


def expected(model: Any, prompt: list[int], bias: float, **more: Any) -> Answer:
    """Return the run of the published loop on the reference model."""
    values = {**SHORT, **more}
    scale = values.pop("cfg_scale", 0.0)
    del values["canvas"]

    def logits_of(row: list[int]) -> Tensor:
        rows = [row, [MASK_ID] * len(prompt) + row[len(prompt) :]]
        # The tokens that the row has at the start of decoding are masked in the second sequence.
        logits, free = (model.logits(torch.tensor([r]))[0].float() for r in rows)
        shift = model.logit_shift
        if shift:
            logits, free = (torch.cat([x[:1], x[:-1]]) for x in (logits, free))
        logits = free + (scale + 1) * (logits - free) if scale else logits
        logits = logits.clone()
        logits[:, EOS_ID] += bias
        return logits

    return daedal(logits_of, prompt, mask=MASK_ID, eos=EOS_ID, max_tokens=LIMIT, **values)


BIASES = (0.0, 3.0, 5.0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", BIASES)
def test_answers_are_those_of_the_loop(
    served: tuple[Engine, Any], kind: dict[str, Any], bias: float
) -> None:
    engine, model = served
    prompt = random_prompt(9, round(bias))
    wanted = expected(model, prompt, bias, **kind)
    (answer,) = engine.ask(asked(prompt, bias, **kind))
    assert answer.token_ids == wanted.canvas
    assert answer.report["canvas_lengths"] == wanted.lengths
    assert answer.num_steps == wanted.num_forwards
    assert answer.finish_reason == "length"
    assert engine.is_idle()


def test_the_cases_differ(served: tuple[Engine, Any]) -> None:
    """Some lengths are chosen in between, and some canvases get insertions."""
    _, model = served
    runs = [expected(model, random_prompt(9, round(b)), b, **k) for k in KINDS for b in BIASES]
    assert any(SHORT["initial_length"] < run.lengths[-1] < LIMIT for run in runs)
    assert any(4 in np.diff(run.lengths) and 3 in np.diff(run.lengths) for run in runs)
    assert any(run.lengths[-1] == LIMIT for run in runs)


def test_a_batch_of_all_kinds_with_others(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    asks = [asked(random_prompt(4 + n, n), 3.0, **kind) for n, kind in enumerate(KINDS)]
    asks += [Request(random_prompt(6), {"gen_length": 32, "steps": 16}, {"temperature": 0.0})]
    asks += [Request(random_prompt(6), {"growth": 8}, {"max_tokens": 300 // 2})]
    alone = [engine.ask(ask)[0] for ask in asks]
    together = engine.ask(*asks)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.num_steps for a in together] == [a.num_steps for a in alone]
    lengths = [a.report.get("canvas_lengths") for a in alone]
    assert [a.report.get("canvas_lengths") for a in together] == lengths
    assert engine.is_idle()


@pytest.mark.parametrize("limit", [0, 60, 10_000])
def test_lengths_tried_together_give_the_answer_of_one_at_a_time(
    served: tuple[Engine, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a step decide how many lengths it tries, and change nothing else."""
    engine, model = served
    prompt, kind = random_prompt(9), {"eos_threshold": 2.0, "seed": 5}
    wanted = expected(model, prompt, 0.0, eos_threshold=2.0)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    rows = rows_of_launches(engine, monkeypatch)
    (answer,) = engine.ask(asked(prompt, 0.0, **kind))
    assert (answer.token_ids, answer.num_steps) == (wanted.canvas, wanted.num_forwards)
    assert len(rows) == answer.num_forwards
    num_saved = answer.num_steps - answer.num_forwards
    assert max(rows) <= max(limit, LIMIT + len(prompt))
    # 17 lengths from 8 to 70: 4, 8 and 5 of them in three steps, or one in each step.
    assert num_saved == {0: 0, 10_000: 17 - 3}.get(limit, num_saved)
    assert (num_saved > 0) == (limit > 0)


def test_noise_does_not_depend_on_the_lengths_tried_together(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served
    asks = [asked(random_prompt(9, n), 3.0, temperature=0.7, seed=n) for n in range(4)]
    together = [(a.token_ids, a.report["canvas_lengths"]) for a in engine.ask(*asks)]
    monkeypatch.setattr(engine.runner.planner, "row_budget", 0)
    assert [(a.token_ids, a.report["canvas_lengths"]) for a in engine.ask(*asks)] == together


def test_an_answer_ends_with_its_end_token(served: tuple[Engine, Any]) -> None:
    """Positions behind the end token are not computed."""
    engine, model = served
    prompt = random_prompt(9, 3)
    whole = expected(model, prompt, 6.0)
    ask = asked(prompt, 6.0)
    (answer,) = engine.ask(Request(prompt, ask.extra, {**ask.sampling, "ignore_eos": False}))
    end = whole.canvas.index(EOS_ID) + 1
    assert answer.token_ids == whole.canvas[:end]
    assert answer.finish_reason == "stop"
    assert answer.num_steps is not None
    assert answer.num_steps <= whole.num_forwards


def test_streams_and_views_follow_the_canvas(served: tuple[Engine, Any]) -> None:
    engine, model = served
    prompt, kind = random_prompt(9), {"low_threshold": 0.5, "eos_expand_threshold": 2.0}
    wanted = expected(model, prompt, 3.0, **kind)
    ask = asked(prompt, 3.0, **kind, stream_canvas=True)
    ask = Request(prompt, ask.extra, {**ask.sampling, "logprobs": 1})
    start(engine, "a", ask)
    lengths = list[int]()
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            final = output.outputs[0].token_ids
            assert list(final) == wanted.canvas[: len(final)]
            view = (output.kv_transfer_params or {}).get("dllm", {}).get("canvas")
            if view is not None:
                lengths.append(len(view["committed"]))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


def test_several_answers_of_one_prompt(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    ask = asked(random_prompt(9), 3.0)
    drawn = {**ask.sampling, "temperature": 0.8}
    (output,) = engine.outputs(Request(ask.prompt, ask.extra, {**drawn, "n": 3, "seed": 3}))
    seeds = [Request(ask.prompt, ask.extra, {**drawn, "seed": 3 + n}) for n in range(3)]
    alone = [engine.ask(one)[0] for one in seeds]
    assert [list(o.token_ids) for o in output.outputs] == [a.token_ids for a in alone]


def test_an_abort_during_the_search_leaves_nothing(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    request = start(engine, "a", asked(random_prompt(9), 0.0, eos_threshold=2.0))
    other = Request(random_prompt(6), {"gen_length": 16}, {"temperature": 0.0})
    start(engine, "b", other)
    for _ in range(2):
        step(engine)
    engine.llm.llm_engine.abort_request([request], internal=True)
    (alone,) = finish(engine).values()
    assert engine.ask(other)[0].token_ids == alone.token_ids
    assert engine.is_idle()


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"algorithm": "semi_ar"}, "canvas"),
        ({"canvas": "grow", "algorithm": "daedal"}, "canvas"),
        ({"return_trajectory": True}, "algorithm"),
        ({"complete_blocks": True}, "algorithm"),
        ({"suffix_ids": [3]}, "algorithm"),
        ({"allow_infill": True}, "algorithm"),
        ({"cache": "dual"}, "cache"),
        ({"growth": 8}, "growth"),
        ({"gen_length": 16, "initial_length": 8}, "initial_length"),
        ({"expansion": 0}, "expansion"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ],
    ids=str,
)
def test_refusals_name_the_field(
    served: tuple[Engine, Any], parameters: dict[str, Any], name: str
) -> None:
    engine, _ = served
    extra = {"canvas": "daedal", "initial_length": 8, **parameters}
    if parameters.get("gen_length") is None:
        extra.pop("initial_length")
    with pytest.raises(ValueError, match=f"^{name}: "):
        engine.ask(Request(random_prompt(9), extra, {}))


def test_both_names_and_the_first_length(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    prompt, ask = random_prompt(9, 1), asked(random_prompt(9, 1), 3.0)
    (answer,) = engine.ask(ask)
    others: list[dict[str, Any]] = [
        {"canvas": None, "algorithm": "daedal"},
        {"algorithm": "threshold"},
        {"initial_length": None, "gen_length": 8},
    ]
    for more in others:
        extra = {k: v for k, v in {**ask.extra, **more}.items() if v is not None}
        (same,) = engine.ask(Request(prompt, extra, ask.sampling))
        assert same.token_ids == answer.token_ids
    extra = {**ask.extra, "block_length": 8}
    (late,) = engine.ask(Request(prompt, extra, {**ask.sampling, "min_tokens": 30}))
    assert late.report["canvas_lengths"][0] == 30
