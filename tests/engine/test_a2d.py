# SPDX-License-Identifier: Apache-2.0
"""A2D models in the engine give the tokens and forward passes of LLaDA's published loops."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.models import A2DReference, load_reference

from tests.checkpoints import random_prompt
from tests.engine.harness import BLOCKS, NOISY, Engine, Request, assert_parity, running

CASES: dict[str, dict[str, Any]] = {
    "semi_ar": BLOCKS,
    "dual cache": {**BLOCKS, "cache": "dual"},
    "threshold": {"gen_length": 32, "block_length": 8, "algorithm": "threshold", "threshold": 0.6},
    "noise": {**NOISY, "temperature": 0.7},
}


@pytest.fixture(scope="module", params=["a2d_qwen3", "a2d_qwen2", "a2d_llama"])
def engine_and_reference(
    checkpoint: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, A2DReference]]:
    folder = checkpoint(request.param)
    with running(folder) as engine:
        yield engine, load_reference(folder)


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
@pytest.mark.parametrize("prompt_length", [3, 20])
def test_parity(
    prompt_length: int,
    parameters: dict[str, Any],
    engine_and_reference: tuple[Engine, A2DReference],
) -> None:
    assert_parity(*engine_and_reference, prompt_length, parameters)


def test_blocks_have_64_positions_unless_given(
    engine_and_reference: tuple[Engine, A2DReference],
) -> None:
    engine, _ = engine_and_reference
    prompt, lengths = random_prompt(5, seed=1), {"gen_length": 128, "steps": 4}
    usual, given, short = engine.ask(
        Request(prompt, lengths),
        Request(prompt, {**lengths, "block_length": 64}),
        Request(prompt, {**lengths, "block_length": 32}),
    )
    assert usual.token_ids == given.token_ids != short.token_ids


def test_answers_begin_without_a_thought_unless_asked(
    engine_and_reference: tuple[Engine, A2DReference],
) -> None:
    engine, _ = engine_and_reference
    conversation = [{"role": "user", "content": "Hi"}]
    arguments: tuple[dict[str, Any] | None, ...] = (None, {"enable_thinking": True})
    texts = [
        engine.llm.get_tokenizer().decode(
            engine.llm.chat(conversation, use_tqdm=False, chat_template_kwargs=given)[
                0
            ].prompt_token_ids
        )
        for given in arguments
    ]
    assert "<think>\n\n</think>" in texts[0]
    assert "<think>" not in texts[1]
