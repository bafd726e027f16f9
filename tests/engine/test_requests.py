# SPDX-License-Identifier: Apache-2.0
"""Requests through `vllm.LLM`: ends of answers, seeds, defaults and refusals."""

from typing import Any

import pytest
from reference.models import LLaDAReference

from tests import golden
from tests.checkpoints import EOS_ID, EOT_ID, MASK_ID, make_tokenizer, random_prompt
from tests.engine.harness import (
    BLOCKS,
    NOISY,
    Engine,
    Request,
    as_request,
    clear_case,
    refusal_error,
)

# ---- the end of an answer ----------------------------------------------------------------------


def test_a_canvas_beside_upstreams_default_max_tokens_is_returned_whole(
    engine: Engine, model: LLaDAReference
) -> None:
    """The default of SamplingParams, max_tokens = 16, does not cut a canvas."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    request = as_request(prompt, **BLOCKS)
    for sampling in ({}, {"max_tokens": 16}, {"max_tokens": None}):
        (answer,) = engine.ask(Request(request.prompt, request.extra, sampling))
        assert answer.token_ids == wanted.ids


def test_stop_token_ids_of_the_request_end_the_answer(
    engine: Engine, model: LLaDAReference
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    stop = next(t for t in wanted.ids[10:] if t not in wanted.ids[:10])
    place = wanted.ids.index(stop)
    assert not {EOS_ID, EOT_ID} & set(wanted.ids[:place]), "choose another prompt"
    request = as_request(prompt, ignore_eos=False, **BLOCKS)
    sampling: dict[str, Any] = {"stop_token_ids": [stop]}
    (answer,) = engine.ask(Request(request.prompt, request.extra, sampling))
    assert answer.token_ids == wanted.ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    # With ignore_eos, no stop id ends the answer.
    (whole,) = engine.ask(Request(request.prompt, {**request.extra, "ignore_eos": True}, sampling))
    assert whole.token_ids == wanted.ids
    assert whole.finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_decided_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """A request is decided on arrival, once for all answers; the scheduler uses the decision."""
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


# ---- random numbers ----------------------------------------------------------------------------


def test_n_answers_use_consecutive_seeds(engine: Engine, model: LLaDAReference) -> None:
    parameters = {name: value for name, value in NOISY.items() if name != "seed"}
    noisy = {**parameters, "temperature": 1.0}
    sampling = {"n": 3, "seed": 40, "temperature": 1.0}
    prompt, _ = clear_case(model, 20, seed=40, **noisy)
    (output,) = engine.outputs(Request(prompt, {**parameters, "ignore_eos": True}, sampling))
    actual = [list(c.token_ids) for c in sorted(output.outputs, key=lambda c: c.index)]
    assert actual == [golden.run(model, prompt, seed=40 + i, **noisy).ids for i in range(3)]
    assert len({tuple(tokens) for tokens in actual}) == 3


# ---- requests without diffusion parameters -----------------------------------------------------


def test_default_lengths(engine: Engine, model: LLaDAReference) -> None:
    """100 tokens are the start of a canvas of 128 in blocks of 32, with one step per token."""
    prompt = make_tokenizer()("Hi").input_ids
    parameters = {"gen_length": 128, "block_length": 32, "steps": 128}
    wanted = golden.run(model, prompt, **parameters)
    (answer,) = engine.ask(
        Request(prompt, {}, {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0})
    )
    assert answer.token_ids[:32] == wanted.ids[:32]
    assert len(answer.token_ids) == 100
    assert answer.report["steps"] == 128


# ---- masks in the prompt -----------------------------------------------------------------------


def test_infill_fills_the_prompt_too(engine: Engine, model: LLaDAReference) -> None:
    """Masks of the prompt use quota of the first block, as in the published loop."""
    parameters: dict[str, Any] = {"gen_length": 8, "block_length": 8, "steps": 8}
    for seed in range(40):
        prompt = random_prompt(20, seed)
        prompt[3] = prompt[11] = MASK_ID
        wanted = golden.run(model, prompt, **parameters)
        if set(wanted.filled) == {3, 11} and MASK_ID not in wanted.filled.values():
            break
    else:
        raise AssertionError("no prompt whose holes are filled")
    (answer,) = engine.ask(as_request(prompt, allow_infill=True, **parameters))
    kept = [(a, w) for a, w in zip(answer.token_ids, wanted.ids, strict=True) if w != MASK_ID]
    assert all(a == w for a, w in kept)
    # The masks of the prompt used the quota of some canvas positions, which one more forward
    # pass fills.
    assert len(kept) < 8
    assert MASK_ID not in answer.token_ids
    assert answer.num_forwards == wanted.num_forwards + 1
    assert answer.report["infilled"] == wanted.filled


# ---- refusals ----------------------------------------------------------------------------------


def test_a_refusal_among_good_requests_hurts_nobody(engine: Engine, model: LLaDAReference) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    good = as_request(prompt, **BLOCKS)
    with pytest.raises(refusal_error(), match=r"gen_length: given 300; .* 256") as refusal:
        engine.ask(good, Request(prompt, {"gen_length": 300}))
    assert refusal.value.parameter == "gen_length"
    (answer,) = engine.ask(good)
    assert answer.token_ids == wanted.ids
    assert engine.is_idle()
