# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for through `vllm.LLM`: ends of answers, seeds, defaults, refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import EOS_ID, EOT_ID, MASK_ID, make_tokenizer, random_prompt
from tests.engine.harness import BLOCKS, NOISY, Ask, as_request, clear_case, refusal_error
from tests.reference import golden

if TYPE_CHECKING:
    from tests.engine.harness import Engine
    from tests.reference.models import LLaDAReference


# ---- the end of an answer ----------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 31, 32])
def test_max_tokens_cuts_the_answer_not_the_canvas(
    engine: Engine, model: LLaDAReference, max_tokens: int
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    asked = as_request(prompt, **BLOCKS)
    (by_field,) = engine.ask(Ask(asked.prompt, asked.extra, {"max_tokens": max_tokens}))
    (by_extra,) = engine.ask(Ask(asked.prompt, {**asked.extra, "max_tokens": max_tokens}))
    for answer in (by_field, by_extra):
        assert answer.token_ids == wanted.ids[:max_tokens]
        assert answer.finish_reason == "length"
    assert by_extra.num_forwards is not None
    assert by_extra.num_forwards <= wanted.num_forwards


def test_a_canvas_beside_upstreams_default_max_tokens_is_returned_whole(
    engine: Engine, model: LLaDAReference
) -> None:
    """SamplingParams() says max_tokens = 16 when nobody asked for a limit."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    asked = as_request(prompt, **BLOCKS)
    for sampling in ({}, {"max_tokens": 16}, {"max_tokens": None}):
        (answer,) = engine.ask(Ask(asked.prompt, asked.extra, sampling))
        assert answer.token_ids == wanted.ids


def test_stop_token_ids_of_the_request_end_the_answer(
    engine: Engine, model: LLaDAReference
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    stop = next(t for t in wanted.ids[10:] if t not in wanted.ids[:10])
    place = wanted.ids.index(stop)
    assert not {EOS_ID, EOT_ID} & set(wanted.ids[:place]), "choose another prompt"
    asked = as_request(prompt, ignore_eos=False, **BLOCKS)
    sampling: dict[str, Any] = {"stop_token_ids": [stop]}
    (answer,) = engine.ask(Ask(asked.prompt, asked.extra, sampling))
    assert answer.token_ids == wanted.ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    # ignore_eos: no stop id ends the answer.
    (whole,) = engine.ask(Ask(asked.prompt, {**asked.extra, "ignore_eos": True}, sampling))
    assert whole.token_ids == wanted.ids
    assert whole.finish_reason == "length"


def test_stop_strings_end_the_answer(engine: Engine, model: LLaDAReference) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    (whole,) = engine.ask(as_request(prompt, **BLOCKS))
    assert whole.text == make_tokenizer().decode(wanted.ids, skip_special_tokens=True)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    asked = as_request(prompt, **BLOCKS)
    (answer,) = engine.ask(Ask(asked.prompt, asked.extra, {"stop": [stop]}))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert engine.is_idle()


def test_a_report_comes_with_the_last_token(engine: Engine) -> None:
    (answer,) = engine.ask(as_request(random_prompt(20), seed=123, **BLOCKS))
    assert answer.report["steps"] == 16
    assert answer.report["num_forwards"] == 16
    assert answer.report["num_committed"] == 32
    assert answer.report["queue_ms"] >= 0
    assert answer.report["denoise_ms"] > 0
    assert answer.report["seed"] == 123
    json.dumps(answer.report)  # between processes go numbers of Python's own only


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_decided_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """On its way in, for all of its answers; the scheduler reads what it brings."""
    from vllm import SamplingParams
    from vllm.diffusion.api import validator
    from vllm.diffusion.request import decision

    made: list[Any] = []
    decide = decision.decide

    def counted(*args: Any) -> Any:
        made.append(decide(*args))
        return made[-1]

    monkeypatch.setattr(decision, "decide", counted)
    monkeypatch.setattr(validator, "decide", counted)
    sampling = SamplingParams(n=n, seed=3, temperature=1.0, extra_args={"gen_length": 8})
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": random_prompt(5)}], sampling, use_tqdm=False
    )
    assert len(output.outputs) == n
    assert len(made) == 1
    assert sampling.extra_args == {"gen_length": 8}


def test_fields_that_cannot_act_are_in_the_report(engine: Engine) -> None:
    asked = {"gen_length": 8, "block_length": 3, "remasking": "low_confidence", "cfg_scale": 0}
    prompt = random_prompt(5)
    answer, plain = engine.ask(
        as_request(prompt, **asked, algorithm="dream"),
        as_request(prompt, gen_length=8, algorithm="dream"),
    )
    assert answer.report["ignored"] == ["block_length", "remasking"]
    assert plain.report["ignored"] == []
    assert answer.token_ids == plain.token_ids


# ---- random numbers ----------------------------------------------------------------------------


def test_n_answers_use_consecutive_seeds(engine: Engine, model: LLaDAReference) -> None:
    from vllm import SamplingParams

    asked = {**NOISY, "temperature": 1.0}
    del asked["seed"]
    prompt, _ = clear_case(model, 20, seed=40, **asked)
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(
            n=3, seed=40, temperature=1.0, extra_args={**_no_temperature(asked), "ignore_eos": True}
        ),
        use_tqdm=False,
    )
    found = [list(c.token_ids) for c in sorted(output.outputs, key=lambda c: c.index)]
    assert found == [golden.run(model, prompt, seed=40 + i, **asked).ids for i in range(3)]
    assert len({tuple(tokens) for tokens in found}) == 3


def _no_temperature(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "temperature"}


def test_the_drawn_seed_is_reported_and_repeats_the_answer(engine: Engine) -> None:
    asked = {**_no_temperature(NOISY), "temperature": 1.5}
    del asked["seed"]
    prompt = random_prompt(20)
    drawn = engine.ask(*(as_request(prompt, **asked) for _ in range(8)))
    assert len({tuple(answer.token_ids) for answer in drawn}) > 1
    repeated = engine.ask(
        *(as_request(prompt, seed=answer.report["seed"], **asked) for answer in drawn)
    )
    assert [a.token_ids for a in repeated] == [a.token_ids for a in drawn]


# ---- as upstream's users write it --------------------------------------------------------------


def test_generate_as_it_stands(engine: Engine) -> None:
    from vllm import SamplingParams

    outputs = engine.llm.generate(
        ["What is the capital of France?", "Hi"],
        SamplingParams(temperature=1.0, max_tokens=100),
        use_tqdm=False,
    )
    assert len(outputs) == 2
    for output in outputs:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        assert MASK_ID not in tokens
        if completion.finish_reason == "stop":
            assert tokens[-1] in (EOS_ID, EOT_ID)
        else:
            assert len(tokens) == 100
        assert not {EOS_ID, EOT_ID} & set(tokens[:-1])


def test_default_lengths(engine: Engine, model: LLaDAReference) -> None:
    """100 tokens are cut from a canvas of 128 in blocks of 32 with one step a token."""
    prompt = make_tokenizer()("Hi").input_ids
    asked = {"gen_length": 128, "block_length": 32, "steps": 128}
    wanted = golden.run(model, prompt, **asked)
    (answer,) = engine.ask(
        Ask(prompt, {}, {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0})
    )
    assert answer.token_ids[:32] == wanted.ids[:32]
    assert len(answer.token_ids) == 100
    assert answer.report["steps"] == 128


def test_chat_as_it_stands(engine: Engine) -> None:
    outputs = engine.llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    wanted_prompt = make_tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert list(outputs[0].prompt_token_ids) == make_tokenizer()(wanted_prompt).input_ids
    assert 1 <= len(outputs[0].outputs[0].token_ids) <= 16


# ---- masks in the prompt -----------------------------------------------------------------------


def test_infill_fills_the_prompt_too(engine: Engine, model: LLaDAReference) -> None:
    """The holes take quota in the first block, as in the published loop."""
    asked: dict[str, Any] = {"gen_length": 8, "block_length": 8, "steps": 8}
    for seed in range(40):
        prompt = random_prompt(20, seed)
        prompt[3] = prompt[11] = MASK_ID
        wanted = golden.run(model, prompt, **asked)
        if set(wanted.filled) == {3, 11} and MASK_ID not in wanted.filled.values():
            break
    else:
        raise AssertionError("no prompt whose holes are filled")
    (answer,) = engine.ask(as_request(prompt, allow_infill=True, **asked))
    kept = [(a, w) for a, w in zip(answer.token_ids, wanted.ids, strict=True) if w != MASK_ID]
    assert all(a == w for a, w in kept)
    assert len(kept) < 8  # the holes took the quota of some canvas positions,
    assert MASK_ID not in answer.token_ids  # which one more forward fills
    assert answer.num_forwards == wanted.num_forwards + 1
    assert answer.report["infilled"] == wanted.filled


# ---- refusals ----------------------------------------------------------------------------------


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("gen_lenght", {"gen_lenght": 32}, {}, ["32"]),
    ("steps", {"gen_length": 32, "block_length": 8, "steps": 6}, {}, ["6", "4", "8"]),
    ("steps", {"steps": 0}, {}, ["0", "1"]),
    ("block_length", {"gen_length": 32, "block_length": 5}, {}, ["5", "32"]),
    ("gen_length", {"gen_length": 300}, {}, ["300", "20", "256"]),
    ("output_length", {"gen_length": 32, "output_length": 64}, {}, ["32", "64"]),
    ("max_tokens", {"gen_length": 32, "max_tokens": 33}, {}, ["33", "32"]),
    ("mask_id", {"mask_id": 5}, {}, ["5", str(MASK_ID)]),
    ("cfg_scale", {"cfg_scale": -1}, {}, ["-1", "0"]),
    ("remasking", {"remasking": "entropy"}, {}, ["entropy", "low_confidence"]),
    ("algorithm", {"algorithm": "guess"}, {}, ["guess", "semi_ar"]),
    ("threshold", {"algorithm": "semi_ar", "threshold": 0.5}, {}, ["0.5", "semi_ar"]),
    ("confidence_dtype", {"confidence_dtype": "int8"}, {}, ["int8", "float32"]),
    ("temperature", {"temperature": -0.5}, {}, ["-0.5", "0"]),
    ("min_tokens", {}, {"min_tokens": 3}, ["3", "0"]),
    ("bad_words", {}, {"bad_words": ["x"]}, ["x"]),
    ("prompt_logprobs", {}, {"prompt_logprobs": 2}, ["2"]),
]


@pytest.mark.parametrize(
    ("field", "extra", "sampling", "parts"),
    REFUSALS,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSALS)],
)
def test_refusals_name_field_given_and_wanted(
    engine: Engine,
    field: str,
    extra: dict[str, Any],
    sampling: dict[str, Any],
    parts: list[str],
) -> None:
    with pytest.raises(refusal_error(), match=field) as refusal:
        engine.ask(Ask(random_prompt(20), extra, sampling))
    assert refusal.value.parameter == field
    for part in parts:
        assert part in str(refusal.value)
    assert engine.scheduler.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    "prompt", [[1, MASK_ID, 2], [], [1, 256]], ids=["mask", "empty", "vocabulary"]
)
def test_prompts_that_cannot_be(engine: Engine, prompt: list[int]) -> None:
    with pytest.raises(refusal_error(), match="prompt"):
        engine.ask(Ask(prompt, {"gen_length": 8}))
    assert engine.scheduler.get_num_unfinished_requests() == 0


def test_a_refusal_among_good_requests_hurts_nobody(engine: Engine, model: LLaDAReference) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    good = as_request(prompt, **BLOCKS)
    with pytest.raises(refusal_error(), match="gen_length"):
        engine.ask(good, Ask(prompt, {"gen_length": 300}))
    (answer,) = engine.ask(good)
    assert answer.token_ids == wanted.ids
    assert engine.is_idle()
