# SPDX-License-Identifier: Apache-2.0
"""Requests for scores, which write no token: log probabilities of tokens at positions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import decode
from reference.models import load_reference

from tests.checkpoints import MASK_ID, VOCAB_SIZE, make_checkpoint, random_prompt
from tests.engine.harness import (
    BLOCKS,
    MAX_MODEL_LEN,
    Engine,
    Request,
    Response,
    as_request,
    refusal_error,
    running,
)
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.sampling import sampler

POSITIONS = [0, 3, 4, 11, 18]
HOLES = (3, 4, 11)
TOKEN_IDS = [[5], [0, 255, 9], [9, 9], [MASK_ID, 1], [17, 250, 249, 3]]


def holed_prompt(length: int = 19, seed: int = 0) -> list[int]:
    prompt = random_prompt(length, seed)
    for position in HOLES:
        prompt[position] = MASK_ID
    return prompt


def score(prompt: list[int], positions: Any = POSITIONS, token_ids: Any = TOKEN_IDS) -> Request:
    return Request(prompt, {"score": {"positions": positions, "token_ids": token_ids}})


def plain(
    logits: torch.Tensor, token_ids: Sequence[Sequence[int]]
) -> tuple[list[list[float]], list[int]]:
    """Return fp64 log probabilities by the plain formula, rounded to fp32, and the best tokens."""
    values = torch.log_softmax(logits.double(), dim=-1).float()
    actual = [row[list(ids)].tolist() for row, ids in zip(values, token_ids, strict=True)]
    return actual, logits.argmax(dim=-1).tolist()


def by_reference(
    model: Any,
    prompt: list[int],
    positions: Sequence[int] = POSITIONS,
    token_ids: Sequence[Sequence[int]] = TOKEN_IDS,
) -> tuple[list[list[float]], list[int]]:
    logits = decode.aligned(model, model.logits(torch.tensor([prompt])))[0]
    return plain(logits[list(positions)], token_ids)


def assert_scored(
    answer: Response, expected: tuple[list[list[float]], list[int]], tolerance: float = 1e-5
) -> None:
    assert answer.token_ids == []
    assert (answer.finish_reason, answer.num_forwards) == ("stop", 1)
    assert answer.report["num_committed"] == 0
    scores, (logprobs, likeliest) = answer.report["scores"], expected
    assert scores["likeliest"] == likeliest
    assert [len(row) for row in scores["logprobs"]] == [len(row) for row in logprobs]
    actual, values = (
        torch.tensor([value for row in rows for value in row])
        for rows in (scores["logprobs"], logprobs)
    )
    torch.testing.assert_close(actual, values, rtol=tolerance, atol=tolerance)


# This test is the first one of the file, because ranks are only forked if no engine ran before.
def test_two_ranks_score_as_one(tmp_path: Path) -> None:
    """With 300 logit columns, the second rank has columns of padding that no token has."""
    folder = make_checkpoint(tmp_path, seed=10, n_kv_heads=2, embedding_size=300)
    model, prompt = load_reference(folder), holed_prompt()
    token_ids = [*TOKEN_IDS[:-1], [17, 299, 150, 149]]
    other = as_request(random_prompt(20), **BLOCKS)
    with running(folder, tensor_parallel_size=2) as engine:
        answer, beside = engine.ask(score(prompt, POSITIONS, token_ids), other)
        assert_scored(answer, by_reference(model, prompt, POSITIONS, token_ids))
    assert len(beside.token_ids) == BLOCKS["gen_length"]


def test_log_probabilities_are_those_of_the_model(engine: Engine, model: Any) -> None:
    prompt = holed_prompt()
    (answer,) = engine.ask(score(prompt))
    assert_scored(answer, by_reference(model, prompt))
    assert engine.is_idle()


def test_every_bit_is_that_of_the_plain_formula(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula is applied to the engine's logits, which the reference matches up to rounding."""
    computed: list[torch.Tensor] = []
    compute = DiffusionModel.compute_logits

    def kept(self: Any, *given: Any) -> torch.Tensor:
        logits = compute(self, *given)
        computed.append(logits.clone())
        return logits

    monkeypatch.setattr(DiffusionModel, "compute_logits", kept)
    (answer,) = engine.ask(score(holed_prompt()))
    assert_scored(answer, plain(torch.cat(computed), TOKEN_IDS), tolerance=0)


def test_beside_requests_that_are_written(engine: Engine, model: Any, runs_ahead: bool) -> None:
    prompts = [holed_prompt(19, seed) for seed in (1, 2)]
    options = (
        BLOCKS,
        {**BLOCKS, "cfg_scale": 1.0},
        {**BLOCKS, "cache": "dual", "threshold": 0.5},
    )
    others = [as_request(random_prompt(9 + i, i), **extra) for i, extra in enumerate(options)]
    alone = [answer.token_ids for ask in others for answer in engine.ask(ask)]
    first, *together, last = engine.ask(score(prompts[0]), *others, score(prompts[1]))
    assert [answer.token_ids for answer in together] == alone
    for answer, prompt in zip((first, last), prompts, strict=True):
        assert_scored(answer, by_reference(model, prompt))
    assert engine.is_idle()


def test_many_rows_in_small_parts(engine: Engine, model: Any, monkeypatch: Any) -> None:
    """Logits that are copied a few rows at a time are scored with the tokens of their own rows."""
    monkeypatch.setattr(sampler, "COPIES_BYTES", 3 * sampler.BYTES_OF_COPIES * VOCAB_SIZE)
    prompt = random_prompt(MAX_MODEL_LEN - 1, 3)
    positions = list(range(len(prompt)))
    token_ids = [[token] for token in prompt]
    (answer,) = engine.ask(score(prompt, positions, token_ids))
    assert_scored(answer, by_reference(model, prompt, positions, token_ids))


def test_the_most_likely_tokens_of_a_row(engine: Engine, model: Any) -> None:
    prompt = holed_prompt()
    ask = score(prompt)
    ask.extra["score"]["num_top"] = 3
    (answer,) = engine.ask(ask)
    assert_scored(answer, by_reference(model, prompt))
    logits = decode.aligned(model, model.logits(torch.tensor([prompt])))[0][POSITIONS]
    values, tokens = torch.log_softmax(logits.double(), dim=-1).topk(3)
    scores = answer.report["scores"]
    assert scores["top_tokens"] == tokens.tolist()
    torch.testing.assert_close(torch.tensor(scores["top_logprobs"]), values.float())


def test_guidance_hides_the_context_alone(engine: Engine, model: Any) -> None:
    """The second sequence of guidance still contains the known tokens of the target."""
    prompt, length = holed_prompt(), 9
    ask = score(prompt)
    ask.extra["score"] |= {"cfg_scale": 1.5, "context_length": length}
    (answer,) = engine.ask(ask)
    free = [*[MASK_ID] * length, *prompt[length:]]
    own, other = decode.aligned(model, model.logits(torch.tensor([prompt, free])))
    logits = (other + 2.5 * (own - other))[POSITIONS]
    assert_scored(answer, plain(logits, TOKEN_IDS), tolerance=5e-5)
    assert "infilled" not in answer.report


@pytest.mark.parametrize("beside", [{"priority": 3}, {"timeout_s": 60.0}])
def test_what_may_stand_beside_a_score(engine: Engine, beside: dict[str, Any]) -> None:
    ask = score(holed_prompt())
    ask.extra.update(beside)
    (answer,) = engine.ask(ask)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([1, 2], "score: given [1, 2]; wanted positions and token_ids"),
        ({"positions": [1]}, "wanted positions and token_ids"),
        ({"positions": [19], "token_ids": [[1]]}, "wanted ascending positions from 0 to 18"),
        ({"positions": [2, 1], "token_ids": [[1], [1]]}, "wanted ascending positions"),
        ({"positions": [1, 1], "token_ids": [[1], [1]]}, "wanted ascending positions"),
        ({"positions": [], "token_ids": []}, "wanted ascending positions"),
        ({"positions": [True], "token_ids": [[1]]}, "wanted ascending positions"),
        ({"positions": [1, 2], "token_ids": [[1]]}, "wanted 2 lists, one a position"),
        ({"positions": [1], "token_ids": [[]]}, f"wanted token ids from 0 to {VOCAB_SIZE - 1}"),
        ({"positions": [1], "token_ids": [[VOCAB_SIZE]]}, "wanted token ids from 0"),
        ({"positions": [1], "token_ids": 7}, "wanted 1 lists, one a position"),
        ({"positions": [1], "token_ids": [[1]], "top": 1}, "wanted positions and token_ids"),
        (
            {"positions": [1], "token_ids": [[1]], "num_top": -1},
            f"score.num_top: given -1; wanted a whole number from 0 to {VOCAB_SIZE}",
        ),
        (
            {"positions": [1], "token_ids": [[1]], "cfg_scale": "a"},
            "score.cfg_scale: given 'a'; wanted a finite number from 0",
        ),
        (
            {"positions": [1], "token_ids": [[1]], "context_length": 20},
            "score.context_length: given 20; wanted a whole number from 0 to 19",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(engine: Engine, parameters: Any, message: str) -> None:
    with pytest.raises(refusal_error()) as refusal:
        engine.ask(Request(random_prompt(19), {"score": parameters}))
    assert message in str(refusal.value)
    assert engine.is_idle()


def test_other_parameters_beside_a_score_are_refused(engine: Engine) -> None:
    ask = score(holed_prompt())
    ask.extra["cfg_scale"] = 1.0
    with pytest.raises(refusal_error(), match="wanted it without cfg_scale"):
        engine.ask(ask)


# ---- other engines -----------------------------------------------------------------------------


def test_families_that_shift_their_logits(checkpoint: Callable[[str], Path]) -> None:
    """The row before a position predicts it, and the first position predicts itself."""
    folder = checkpoint("dream")
    prompt = holed_prompt()
    with running(folder) as engine:
        (answer,) = engine.ask(score(prompt))
    assert_scored(answer, by_reference(load_reference(folder), prompt))


def test_server_wide_settings_do_not_act(checkpoint: Callable[[str], Path], model: Any) -> None:
    settings = {"cfg_scale": 1.5, "confidence_dtype": "float64", "cache": "none"}
    prompt = holed_prompt()
    with running(checkpoint("mha"), additional_config={"dllm": settings}) as engine:
        (answer,) = engine.ask(score(prompt))
    assert_scored(answer, by_reference(model, prompt))
