# SPDX-License-Identifier: Apache-2.0
"""Score queries of the HTTP handlers give each token the context that its family attends to."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference, shift_right

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import Request, running
from vllm.diffusion.api.likelihood.prompt_scores import ScoreQuery
from vllm.diffusion.api.likelihood.typed_decisions import masked_behind
from vllm.diffusion.api.openai.echo import queries_of
from vllm.diffusion.api.validator import validator_of
from vllm.diffusion.core.errors import InvalidParameterError

FAMILIES = ("dream", "sdar", "llada2", "llada22", "fast_dllm")
PROMPT = random_prompt(21, 5)


def as_ask(query: ScoreQuery) -> Request:
    names = ("positions", "token_ids", "num_top")
    return Request(query.prompt, {"score": {name: getattr(query, name) for name in names}})


def row(model: Any, tokens: Sequence[int], position: int, block_length: int | None) -> torch.Tensor:
    """Return the log probabilities at a position in float64, [V]."""
    compute = model.logits
    if block_length is not None:
        compute = partial(model.logits, block_length=block_length)
    logits = compute(torch.tensor([list(tokens)]))
    if model.logit_shift:
        logits = shift_right(logits)
    return torch.log_softmax(logits[0, position].double(), dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_is_read_in_its_exact_context(checkpoint: Callable[[str], Path], name: str) -> None:
    """The context is all earlier tokens, then masks to the end of the block, or of the tokens."""
    folder = checkpoint(name)
    model = load_reference(folder)
    with running(folder) as engine:
        validator = validator_of(engine.llm.llm_engine.input_processor)
        assert validator is not None
        length = validator.block_length
        assert (length is None) == (name == "dream")
        chain = queries_of(PROMPT, validator, 2)
        lone = masked_behind(PROMPT, validator)
        answers = engine.ask(*map(as_ask, chain), Request(lone, {"score": reply_score()}))
        if length is not None:
            with pytest.raises(InvalidParameterError, match="x is of families whose"):
                validator.refuse_blocks("x", "POST /v1/completions")
    for position, answer in enumerate(answers[:-1], start=1):
        end = len(PROMPT) if length is None else (position // length + 1) * length
        tokens = [*PROMPT[:position], *[MASK_ID] * (end - position)]
        wanted = row(model, tokens, position, length)
        report = answer.report["scores"]
        assert report["logprobs"][0] == [pytest.approx(wanted[PROMPT[position]].item(), rel=1e-4)]
        assert report["top_tokens"][0] == wanted.topk(2).indices.tolist()
    end = len(PROMPT) + 1 if length is None else -(-(len(PROMPT) + 1) // length) * length
    tokens = [*PROMPT, *[MASK_ID] * (end - len(PROMPT))]
    wanted = row(model, tokens, len(PROMPT), length)[[3, 9]].tolist()
    assert answers[-1].report["scores"]["logprobs"][0] == pytest.approx(wanted, rel=1e-4)


def test_one_query_reads_a_prompt_causally(checkpoint: Callable[[str], Path]) -> None:
    """In a family with a causal context, a token depends only on the tokens before it."""
    folder = checkpoint("nemotron")
    logits = load_reference(folder).causal_logits(torch.tensor([PROMPT]), len(PROMPT))[0]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    with running(folder) as engine:
        validator = validator_of(engine.llm.llm_engine.input_processor)
        assert validator is not None
        assert queries_of(PROMPT[:1], validator, 2) == []
        (query,) = queries_of(PROMPT, validator, 2)
        (answer,) = engine.ask(as_ask(query))
    report = answer.report["scores"]
    for row, token, own, top in zip(
        wanted, PROMPT[1:], report["logprobs"], report["top_tokens"], strict=False
    ):
        assert own == [pytest.approx(row[token].item(), rel=1e-4)]
        assert top == row.topk(2).indices.tolist()


def reply_score() -> dict[str, Any]:
    return {"positions": [len(PROMPT)], "token_ids": [[3, 9]]}


def test_masks_complete_the_windows_of_a_prompt_that_is_read(
    checkpoint: Callable[[str], Path],
) -> None:
    """Masks fill the last window where rows choose experts by windows, also in mixed batches."""
    folder = checkpoint("llada22")
    model = load_reference(folder)
    prompts = [random_prompt(length, length) for length in (21, 5, 16, 9)]
    with running(folder) as engine:
        parameters = {"positions": [4], "token_ids": [[3, 9]]}
        answers = engine.ask(*(Request(prompt, {"score": parameters}) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *[MASK_ID] * (-len(prompt) % 8)]
        wanted = row(model, tokens, 4, 8)[[3, 9]].tolist()
        assert answer.report["scores"]["logprobs"][0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("sdar", "llada2", "llada22", "fast_dllm", "nemotron")),
        ("llada2", {"max_num_batched_tokens": 64}),  # forwards are cut
        ("llada2", {"max_num_seqs": 2}),
    ],
)
def test_reads_of_one_prefix_share_its_pages(
    checkpoint: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """Shared pages change no number, whether the requests share a step or come later."""
    state = random_prompt(150, 3)
    with running(checkpoint(name), enable_prefix_caching=True, **settings) as engine:
        validator = validator_of(engine.llm.llm_engine.input_processor)
        assert validator is not None
        asks = []
        for seed in range(6):
            prompt = [*state, *random_prompt(9 + seed, seed)]
            score = {"positions": [len(prompt)], "token_ids": [[3, 9]]}
            asks.append((masked_behind(prompt, validator), score))
        alone = engine.ask(*(Request(tokens, {"score": score}) for tokens, score in asks))
        shared = [Request(tokens, {"score": {**s, "shares_prefix": True}}) for tokens, s in asks]
        first, second = engine.outputs(*shared), engine.outputs(*shared)
        assert [output.num_cached_tokens for output in second] == [128] * len(shared)
        generated = engine.ask(Request(state, {"gen_length": 8, "temperature": 0}))
        again = engine.ask(Request(state, {"gen_length": 8, "temperature": 0, "cache": "none"}))
        assert generated[0].token_ids == again[0].token_ids
        assert engine.is_idle()
    wanted = [answer.report["scores"]["logprobs"] for answer in alone]
    for outputs in (first, second):
        for output, logprobs in zip(outputs, wanted, strict=True):
            actual = output.kv_transfer_params["dllm"]["scores"]["logprobs"]
            assert actual[0] == pytest.approx(logprobs[0], rel=1e-4)
