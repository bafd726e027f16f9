# SPDX-License-Identifier: Apache-2.0
"""`echo` with `logprobs` on completions, as evaluation harnesses send them."""

from typing import Any

import pytest
import torch
from reference import likelihood

from tests.server.client import COMPLETIONS, QUESTION, Client, body_for, refusal
from tests.server.reference import CLOSE, mask_id, model, tokenizer

PROMPTS = (QUESTION + " The capital of France is Paris.", QUESTION + " It is 7.")


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


def echoed(client: Client, **body: Any) -> dict[str, Any]:
    parameters = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "temperature": 0, **body}
    return client.answer(COMPLETIONS, body_for(COMPLETIONS, **parameters))


def assert_chain(choice: dict[str, Any], prompt: list[int], num_top: int = 1) -> None:
    """Check that logprobs of a prompt and their alternatives are those of the reference's chain."""
    chain = likelihood.chain(model(), prompt, mask_id())
    report = choice["logprobs"]
    assert report["token_logprobs"][0] is None
    assert report["top_logprobs"][0] is None
    values = chain.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert report["token_logprobs"][1 : len(prompt)] == pytest.approx(values, **CLOSE)
    for row, token, top in zip(chain, prompt[1:], report["top_logprobs"][1:], strict=False):
        best = row.topk(num_top).values.tolist() if num_top else []
        wanted = sorted({*best, row[token].item()})
        assert sorted(top.values())[-len(wanted) :] == pytest.approx(wanted, **CLOSE)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_the_chain_of_a_prompt(client: Client, num_top: int) -> None:
    prompt = ids(PROMPTS[0])
    answer = echoed(client, prompt=prompt, logprobs=num_top, max_tokens=0)
    (choice,) = answer["choices"]
    assert_chain(choice, prompt, num_top)
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert choice["text"] == PROMPTS[0]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["diffusion"]["num_forwards"] == len(prompt) - 1


def test_with_one_token_behind_it(client: Client) -> None:
    prompt = ids(PROMPTS[0])
    answer = echoed(client, max_tokens=1, seed=1234)
    (choice,) = answer["choices"]
    assert_chain(choice, prompt)
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["diffusion"]["num_forwards"] == len(prompt), "one a token"
    alone = client.answer(COMPLETIONS, body_for(COMPLETIONS, prompt=prompt, gen_length=1))
    assert choice["text"] == PROMPTS[0] + alone["choices"][0]["text"]


def test_several_prompts_and_answers(client: Client) -> None:
    prompts = [ids(text) for text in PROMPTS]
    answer = echoed(
        client, prompt=prompts, max_tokens=4, gen_length=4, n=2, temperature=1.0, ignore_eos=True
    )
    for index, choice in enumerate(answer["choices"]):
        assert_chain(choice, prompts[index // 2])
    read = sum(len(prompt) - 1 for prompt in prompts)
    assert answer["diffusion"]["num_forwards"] == read + 4 * 4


def test_a_streamed_echo(client: Client) -> None:
    prompt = ids(PROMPTS[1])
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1}
    first, *_ = client.events(COMPLETIONS, body_for(COMPLETIONS, **body))
    assert_chain(first["choices"][0], prompt, 2)


def test_one_token_has_nothing_before_it(client: Client) -> None:
    (choice,) = echoed(client, prompt=[7], max_tokens=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [5] * 2049}, "prompt: given 2049; wanted at most 2048 tokens with echo and"),
        ({"logprobs": 21}, "logprobs: given 21; wanted 0 to 20"),
        ({"max_tokens": 0, "timeout_s": -1}, "timeout_s: given -1; wanted at least"),
        ({"max_tokens": 0, "logprobs": None}, "max_tokens: given 0; wanted at least 1"),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, Any], message: str) -> None:
    parameters = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, **body}
    error = refusal(client.http.post(COMPLETIONS, json=body_for(COMPLETIONS, **parameters)))
    assert message in error["message"]


def test_offsets_lie_within_a_text_of_characters_of_several_tokens(client: Client) -> None:
    """The last token of a character has its whole text, so that all texts join to the prompt."""
    for prompt in (
        "h\u00e9llo \U0001f408 \u65e5\u672c",
        "a\u00e9\u00e9b",
        "\U0001f408\u00e9",
        "\u65e5",
    ):
        (choice,) = echoed(client, prompt=prompt, max_tokens=0, logprobs=1)["choices"]
        actual = choice["logprobs"]
        texts, offsets = actual["tokens"], actual["text_offset"]
        assert choice["text"] == prompt
        assert len("".join(texts)) == len(prompt)
        assert "".join(texts)[1:] == prompt[1:]
        assert offsets == [len("".join(texts[:i])) for i in range(len(texts))]
