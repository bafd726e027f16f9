# SPDX-License-Identifier: Apache-2.0
"""POST /generate: all forms of prompts, and the effect of each parameter."""

import math
from typing import Any

import pytest

from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PUZZLE,
    QUESTION,
    Client,
    body_for,
)
from tests.server.process import MODEL_NAME

NOISY = {"temperature": 2.0, "gen_length": 32, "steps": 8, "ignore_eos": True}


def tokenize(client: Client, **body: Any) -> list[int]:
    tokens: list[int] = client.answer("/tokenize", body)["tokens"]
    return tokens


def mask_id(client: Client) -> int:
    """Return the model's mask token, which the tokenizer has by name."""
    (actual,) = tokenize(client, prompt="<|mdm_mask|>", add_special_tokens=False)
    return actual


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (QUESTION, ANSWER),
        ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
        ("Lima is the capital of which country?", "Lima is the capital of Peru."),
        ("What is 3 plus 4?", "3 plus 4 is 7."),
    ],
)
def test_answers_are_right(client: Client, question: str, answer: str) -> None:
    assert client.ask(question)["text"] == [answer]


def test_messages_equal_the_chat_template(client: Client) -> None:
    """A rendered conversation sent as ids also gives the same answer as the messages."""
    messages = [{"role": "user", "content": QUESTION}]
    rendered = tokenize(client, messages=messages)
    by_template = client.ask()
    for answer in (client.generate(messages=messages), client.generate(prompt=rendered)):
        assert answer["text"] == [ANSWER]
        assert answer["token_ids"] == by_template["token_ids"]
        assert answer["usage"] == by_template["usage"]
    assert by_template["usage"]["prompt_tokens"] == len(rendered)


def test_a_string_prompt_is_taken_as_it_is(client: Client) -> None:
    ids = tokenize(client, prompt=QUESTION)
    as_text, as_ids = client.generate(prompt=QUESTION), client.generate(prompt=ids)
    assert as_text["token_ids"] == as_ids["token_ids"]
    assert as_text["usage"]["prompt_tokens"] == as_ids["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("as_ids", [False, True], ids=["strings", "token ids"])
def test_a_list_of_prompts_equals_each_alone(client: Client, as_ids: bool) -> None:
    prompts: list[Any] = [PUZZLE, "What is 2 plus 2?", "hello"]
    if as_ids:
        prompts = [tokenize(client, prompt=prompt) for prompt in prompts]
    together = client.generate(prompt=prompts, seed=3, **NOISY)
    alone = [client.generate(prompt=prompt, seed=3, **NOISY) for prompt in prompts]
    assert together["token_ids"] == [one["token_ids"][0] for one in alone]
    assert together["text"] == [one["text"][0] for one in alone]
    assert together["usage"] == {
        key: sum(one["usage"][key] for one in alone) for key in together["usage"]
    }


def test_n_answers_use_consecutive_seeds(client: Client) -> None:
    together = client.ask(PUZZLE, n=3, seed=11, **NOISY)
    alone = [client.ask(PUZZLE, seed=seed, **NOISY) for seed in (11, 12, 13)]
    assert together["token_ids"] == [one["token_ids"][0] for one in alone]
    assert together["diffusion"]["seeds"] == [11, 12, 13]
    assert len({tuple(ids) for ids in together["token_ids"]}) == 3


def test_n_answers_to_each_of_several_prompts(client: Client) -> None:
    prompts = [PUZZLE, "What is 1 plus 1?"]
    together = client.generate(prompt=prompts, n=2, seed=5, **NOISY)
    alone = [client.generate(prompt=p, seed=s, **NOISY) for p in prompts for s in (5, 6)]
    assert together["token_ids"] == [one["token_ids"][0] for one in alone]


def test_shape_of_an_answer(client: Client) -> None:
    response = client.http.post(
        GENERATE,
        json={"prompt": QUESTION, "apply_chat_template": True, "gen_length": 32, "seed": 9},
        headers={"X-Request-Id": "my-request"},
    )
    answer = response.json()
    assert answer["id"] == "my-request"
    assert answer["model"] == MODEL_NAME
    assert answer["object"] == "text_diffusion"
    assert answer["text"] == [ANSWER]
    assert answer["finish_reason"] == ["stop"]
    prompt = tokenize(client, messages=[{"role": "user", "content": QUESTION}])
    tokens = tokenize(client, prompt=ANSWER)
    assert answer["token_ids"] == [tokens]
    num_tokens = len(tokens) + 1  # the stop token is counted, but not returned
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(prompt) + num_tokens,
    }
    report = answer["diffusion"]
    # Other tests cover the fields of memory.
    assert {key for key in report if not key.endswith("_bytes")} == {
        *("steps", "num_forwards", "num_forwards_saved", "tokens_per_forward"),
        *("queue_ms", "denoise_ms", "seeds", "ignored", "num_end_tokens"),
        *("num_steps", "states_drafted", "states_accepted", "steps_per_forward"),
    }
    assert (report["steps"], report["seeds"], report["tokens_per_forward"]) == (32, [9], 1.0)
    assert report["num_forwards"] + report["num_forwards_saved"] == 32
    assert report["num_end_tokens"] == 32 - len(tokens)
    assert report["queue_ms"] >= 0
    assert report["denoise_ms"] > 0


def test_an_empty_answer_tells_how_many_end_tokens_it_is(client: Client) -> None:
    first = client.ask()["token_ids"][0][0]
    answer = client.ask(stop_token_ids=[first])
    assert (answer["text"], answer["diffusion"]["num_end_tokens"]) == ([""], 32)
    assert client.ask(ignore_eos=True)["diffusion"]["num_end_tokens"] == 0


def test_max_tokens_cuts_the_answer_not_the_canvas(client: Client) -> None:
    whole = client.ask(gen_length=32)
    cut = client.ask(gen_length=32, max_tokens=3)
    assert cut["token_ids"][0] == whole["token_ids"][0][:3]
    assert cut["finish_reason"] == ["length"]
    assert cut["usage"]["completion_tokens"] == 3
    assert ANSWER.startswith(cut["text"][0])
    assert cut["text"][0]


def test_a_limit_above_the_first_canvas_lets_the_canvas_grow(client: Client) -> None:
    fields = {"prompt": QUESTION, "steps": 8, "cache": "dual"}
    answer = client.generate(**fields, max_tokens=300, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 300
    assert answer["diffusion"]["canvas_lengths"] == [32, 160, 288, 320]
    fixed = client.generate(**fields, gen_length=32)
    assert "canvas_lengths" not in fixed["diffusion"]


@pytest.mark.parametrize("route", [GENERATE, CHAT, COMPLETIONS, MESSAGES])
def test_a_limit_costs_nothing(client: Client, route: str) -> None:
    """With a limit of thousands of tokens, a short answer takes the steps of the first canvas."""
    fields = {"steps": 16, "cache": "dual"}
    asked = [client.answer(route, body_for(route, max_tokens=m, **fields)) for m in (256, 3500)]
    small, large = (answer["diffusion"] for answer in asked)
    # The first canvas has the length of generation_config.json.
    assert large["canvas_lengths"] == [32]
    assert large["num_forwards"] == small["num_forwards"]


def test_stop_string(client: Client) -> None:
    answer = client.ask(stop=["of Fr"])
    assert answer["text"] == ["The capital "]
    assert answer["finish_reason"] == ["stop"]
    kept = client.ask(stop="of Fr", include_stop_str_in_output=True)
    assert kept["text"] == ["The capital of Fr"]


def test_a_complete_answer_saves_forwards(client: Client) -> None:
    """Blocks after the block with the stop token are not denoised."""
    parameters = {"gen_length": 64, "block_length": 16, "steps": 32}
    stopped, whole = client.ask(**parameters), client.ask(**parameters, ignore_eos=True)
    assert stopped["text"] == [ANSWER]
    report = stopped["diffusion"]
    assert report["num_forwards"] <= 8
    assert report["num_forwards"] + report["num_forwards_saved"] == report["steps"] == 32
    assert whole["diffusion"]["num_forwards"] == 32
    assert whole["token_ids"][0][: len(stopped["token_ids"][0])] == stopped["token_ids"][0]
    by_string = client.ask(**parameters, stop=["France"])
    assert by_string["diffusion"]["num_forwards_saved"] >= 24


def test_logprobs(client: Client) -> None:
    """There is one entry per token; its probability is the token's confidence at its commit."""
    answer = client.ask(gen_length=32, threshold=0.9, logprobs=2, n=2)
    assert len(answer["logprobs"]) == 2
    for token_ids, actual in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [entry["token_id"] for entry in actual] == token_ids
        assert "".join(entry["token"] for entry in actual) == ANSWER
        for entry in actual:
            first, second = entry["top_logprobs"]
            assert first.items() <= entry.items()  # greedy: the token is the most likely one
            assert 0 >= entry["logprob"] >= second["logprob"]
    assert any(e["logprob"] > math.log(0.9) for e in answer["logprobs"][0])
    assert "logprobs" not in client.ask(gen_length=32)


def test_stop_token_ids(client: Client) -> None:
    whole = client.ask()["token_ids"][0]
    answer = client.ask(stop_token_ids=[whole[3]])
    assert answer["token_ids"] == [whole[:3]]
    assert answer["finish_reason"] == ["stop"]
    assert answer["usage"]["completion_tokens"] == 4


def test_ignore_eos_returns_the_whole_canvas(client: Client) -> None:
    short = client.ask(gen_length=64)
    whole = client.ask(gen_length=64, ignore_eos=True, skip_special_tokens=False)
    tokens = whole["token_ids"][0]
    assert len(tokens) == whole["usage"]["completion_tokens"] == 64
    assert whole["finish_reason"] == ["length"]
    assert tokens[: len(short["token_ids"][0])] == short["token_ids"][0]
    assert mask_id(client) not in tokens
    assert whole["text"][0].startswith(ANSWER + "<|")
    assert client.ask(gen_length=64, ignore_eos=True)["text"] == [ANSWER]


def test_a_drawn_seed_is_reported_and_repeats_the_answer(client: Client) -> None:
    drawn = client.ask(
        PUZZLE, n=8, **NOISY
    )  # eight, because half of all 64-bit numbers exceed a signed one
    seeds = drawn["diffusion"]["seeds"]
    assert len(set(seeds)) == 8
    assert max(seeds) < 2**53  # exact in JavaScript
    again = [client.ask(PUZZLE, seed=seed, **NOISY) for seed in seeds]
    assert [one["token_ids"][0] for one in again] == drawn["token_ids"]


def test_temperature_has_no_upper_limit(client: Client) -> None:
    hot, hotter = (
        client.ask(PUZZLE, seed=1, **{**NOISY, "temperature": value}) for value in (3.0, 30.0)
    )
    assert hot["token_ids"] != hotter["token_ids"]


def test_threshold_needs_fewer_forwards(client: Client) -> None:
    answer = client.ask(gen_length=32, threshold=0.9)
    assert answer["text"] == [ANSWER]
    report = answer["diffusion"]
    assert 1 <= report["num_forwards"] < 32
    assert report["tokens_per_forward"] == pytest.approx(32 / report["num_forwards"], abs=1e-3)
    assert client.ask(gen_length=32, algorithm="threshold")["text"] == [ANSWER]


def test_parameters_reach_the_engine(client: Client) -> None:
    """Each parameter changes the tokens. Parity tests compare the values."""
    base = {"seed": 4, **NOISY}
    plain = client.ask(PUZZLE, **base)["token_ids"]
    changes: dict[str, Any] = {"remasking": "random", "cfg_scale": 1.5, "steps": 4}
    changes |= {"block_length": 8, "temperature": 0.5, "logits_eos_inf": True, "gen_length": 64}
    for name, value in changes.items():
        assert client.ask(PUZZLE, **{**base, name: value})["token_ids"] != plain, name


def test_infill(client: Client) -> None:
    """With `allow_infill`, mask tokens of a prompt are filled and reported by position.

    A mask stays, and is not reported, if the model predicts the mask token there.
    """
    mask = mask_id(client)
    fillings = []
    for question in (QUESTION, PUZZLE):
        rendered = tokenize(client, messages=[{"role": "user", "content": question}])
        holed = [[*rendered[:hole], mask, *rendered[hole + 1 :]] for hole in range(len(rendered))]
        answer = client.generate(prompt=holed, allow_infill=True, gen_length=32, ignore_eos=True)
        assert [len(ids) for ids in answer["token_ids"]] == [32] * len(holed)
        for hole, filled in enumerate(answer["diffusion"]["infilled"]):
            assert filled.keys() <= {str(hole)}
            fillings.extend(filled.values())
    assert fillings
    assert mask not in fillings
