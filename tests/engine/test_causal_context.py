# SPDX-License-Identifier: Apache-2.0
"""A causal context in pages is shared between block lengths, and computed again if it is lost."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import causal_loops
from reference.models import load_reference
from safetensors.torch import save_file

from tests.checkpoints import MASK_ID, make_case, random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    num_cached,
    record,
    running,
    tokens,
    uncached,
)
from tests.engine.schedules import Arrival, arrivals, ask_while_pages_are_lost, check_schedule
from vllm.diffusion.engine.scheduler.paging import Paging

ROW_BUDGET = 40
NUM_PAGES = 8  # one of them is reserved by upstream
SHARED = random_prompt(130, seed=99)


def ask(prompt: list[int], algorithm: str, **parameters: Any) -> Request:
    if algorithm == "low_confidence_dynamic":
        parameters = {"threshold": 0.3, **parameters}
    return Request(prompt, {"ignore_eos": True, "algorithm": algorithm, **parameters})


ASKS = [
    ask(SHARED, "low_confidence_dynamic", block_length=8, gen_length=20),
    ask(SHARED, "autoregressive", gen_length=12),
    ask([*SHARED[:128], 7, 8], "self_speculation", block_length=16, gen_length=24),
    ask([*SHARED[:70], 3], "semi_ar", block_length=7, gen_length=30, steps_per_block=3),
    ask(random_prompt(5, 1), "self_speculation", block_length=5, gen_length=70),
    ask(random_prompt(64, 2), "autoregressive", gen_length=9, temperature=0.8, seed=5),
    ask(random_prompt(33, 3), "low_confidence_dynamic", block_length=32, gen_length=40),
    ask(random_prompt(90, 4), "self_speculation", block_length=8, gen_length=20, threshold=0.6),
    ask(
        random_prompt(12, 5),
        "low_confidence_dynamic",
        block_length=2,
        gen_length=12,
        thinking_token_budget=3,
    ),
]


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(
        checkpoint("nemotron"),
        max_num_batched_tokens=ROW_BUDGET,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[Response]:
    return [engine.ask(uncached(one))[0] for one in ASKS]


def same(answers: list[Response], wanted: list[Response]) -> None:
    assert tokens(answers) == tokens(wanted)


def test_pages_are_shared_whatever_the_blocks(engine: Engine, wanted: list[Response]) -> None:
    assert engine.scheduler.reset_prefix_cache()
    assert [num_cached(engine, one) for one in ASKS[:4]] == [0, 128, 128, 64]
    (answer,) = engine.ask(ASKS[4])
    follow = ask([*ASKS[4].prompt, *answer.token_ids, 9], "autoregressive", gen_length=3)
    assert num_cached(engine, follow) == 64
    same(engine.ask(*ASKS[:4]), wanted[:4])


# Six requests grow from one page to two, and only seven pages are free.
LARGE = [
    ask(random_prompt(60, seed), name, block_length=9, gen_length=30)
    for seed, name in enumerate(("low_confidence_dynamic", "self_speculation", "autoregressive"))
]
LARGE += [ask(random_prompt(60, 9 + seed), **one.extra) for seed, one in enumerate(LARGE)]


@pytest.fixture(scope="module")
def wanted_of_large(engine: Engine) -> list[Response]:
    return [engine.ask(uncached(one))[0] for one in LARGE]


def test_who_loses_its_pages_goes_on_where_it_was(
    engine: Engine,
    wanted_of_large: list[Response],
    runs_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    assert engine.scheduler.reset_prefix_cache()
    same(engine.ask(*LARGE), wanted_of_large)
    assert len(lost) >= 2
    assert engine.is_idle()


def test_no_part_of_a_context_reaches_into_a_draft(engine: Engine) -> None:
    """A forward pass over a part of the context has no rows of a draft, which are all sampled."""
    one = ask(random_prompt(50, 7), "self_speculation", block_length=16, gen_length=30)
    (alone,) = engine.ask(uncached(one))
    answer = ask_while_pages_are_lost(engine, one, 7)
    assert answer.token_ids == alone.token_ids


@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arrivals(len(ASKS)), st.booleans())
def test_any_schedule_gives_the_same_tokens(
    engine: Engine, wanted: list[Response], schedule: list[Arrival], ahead: bool
) -> None:
    """Requests that share prefixes, arrive and are aborted do not change tokens or cached pages."""
    for number, answer in check_schedule(engine, ASKS, schedule, runs_ahead=ahead):
        same([answer], [wanted[number]])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("block_length", [2, 8, 32])
def test_self_speculation_is_autoregressive(
    engine: Engine, block_length: int, temperature: float
) -> None:
    """Self-speculation gives the autoregressive tokens, also with `logit_bias` and `min_tokens`."""
    drafted = {"algorithm": "self_speculation", "block_length": block_length}
    drawn = {"gen_length": 33, "temperature": temperature, "seed": 6}
    asks = [
        Request(random_prompt(20 + seed, seed), {**drawn, **more, **extra})
        for seed, more in enumerate(({}, {"logit_bias": {"7": 5.0}, "min_tokens": 9}))
        for extra in ({"algorithm": "autoregressive"}, drafted)
    ]
    token_ids = [answer.token_ids for answer in engine.ask(*asks)]
    assert token_ids[::2] == token_ids[1::2]


def test_a_seed_is_delivered_before_the_next_one(engine: Engine) -> None:
    """A seed token is delivered before the next one, even if a step decides several tokens."""
    one = ask(random_prompt(9), "low_confidence_dynamic", block_length=1, gen_length=7)
    one.extra["max_tokens"] = 2
    assert [answer.num_steps for answer in engine.ask(one, one)] == [2, 2]


def test_an_answer_with_a_format_thinks_nothing(engine: Engine) -> None:
    parameters = {"structured_outputs": {"choice": ["Paris", "London"]}, "thinking_token_budget": 2}
    (answer,) = engine.ask(Request(random_prompt(20), {"gen_length": 32, **parameters}))
    assert answer.text in ("Paris", "London")
    assert answer.report["ignored"] == ["thinking_token_budget"]


def test_a_thinking_budget_of_upstreams_parameters(engine: Engine, wanted: list[Response]) -> None:
    """A budget in `SamplingParams` needs no reasoning parser."""
    extra = dict(ASKS[-1].extra)
    sampling = {"thinking_token_budget": extra.pop("thinking_token_budget")}
    same(engine.ask(Request(ASKS[-1].prompt, extra, sampling)), wanted[-1:])


def test_a_likelihood_is_that_of_the_next_token(
    engine: Engine, checkpoint: Callable[[str], Path]
) -> None:
    prompt = random_prompt(40, 8)
    parameters = {"score": {"positions": [3, 39], "token_ids": [[1, 2], [5]]}}
    (answer,) = engine.ask(Request(prompt, parameters))
    logits = load_reference(checkpoint("nemotron")).causal_logits(torch.tensor([prompt]), 40)[0]
    actual = torch.log_softmax(logits, dim=-1)
    given = answer.report["scores"]["logprobs"]
    wanted = [actual[2, [1, 2]], actual[38, [5]]]
    torch.testing.assert_close(torch.tensor(given[0]), wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(given[1]), wanted[1], atol=1e-4, rtol=1e-4)


# ---- an adapter for drafts ---------------------------------------------------------------------

RANK, ALPHA = 4, 16


def add_adapter(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a LoRA into the folder of a checkpoint and return its delta of each matrix by name."""
    generator, tensors, added = torch.Generator().manual_seed(5), {}, {}
    width = config["num_attention_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layers.{layer}.self_attn.o_proj"
        down = torch.randn(RANK, width, generator=generator) / width**0.5
        up = torch.randn(config["hidden_size"], RANK, generator=generator) / RANK
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        added[f"{name}.weight"] = ALPHA / RANK * up @ down
    adapter = folder / "linear_spec_lora"
    adapter.mkdir()
    save_file(tensors, str(adapter / "adapter_model.safetensors"))
    described = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    return added


def drafted(plain: Any, adapted: Any, tokens: Sequence[int], num_causal: int) -> torch.Tensor:
    """Return the logits of a block computed with the adapter, after a context without it."""
    ids, context = torch.tensor([list(tokens)]), range(num_causal)
    sees = torch.ones(num_causal, num_causal, dtype=torch.bool).tril()
    _, past = plain.forward_with_kv(ids[:, :num_causal], context, None, sees)
    block = range(num_causal, len(tokens))
    logits = adapted.forward_with_kv(ids[:, num_causal:], block, past)[0][0]
    return torch.cat([logits.new_zeros(num_causal, logits.shape[1]), logits])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafts_are_made_with_the_adapter_beside_the_weights(
    num_ranks: int, tmp_path: Path
) -> None:
    """The adapter changes how many drafts are accepted, but no token, also with other requests."""
    folder = make_case(tmp_path / "nemotron", "nemotron")
    plain = load_reference(folder)
    added = add_adapter(folder, plain.config)
    weights = {name.replace("model.", "encoder.", 1): w for name, w in plain.weights.items()}
    adapted = type(plain)(
        plain.config,
        {
            name.replace("lm_head", "diffusion_head"): tensor + added.get(name, 0)
            for name, tensor in weights.items()
        },
    )
    prompts = [random_prompt(length, length) for length in (20, 70, 33)]
    parameters = {"gen_length": 16, "block_length": 8, "ignore_eos": True}
    lengths = {"gen_length": 16, "block_length": 8, "mask_id": MASK_ID}
    with_draft, without = (
        [
            causal_loops.self_speculation(partial(causal, plain), prompt, **lengths, draft=draft)
            for prompt in prompts
        ]
        for draft in (partial(drafted, plain, adapted), None)
    )
    assert [d.forwards for d in with_draft] != [d.forwards for d in without]
    asks = [Request(prompt, {**parameters, "algorithm": "self_speculation"}) for prompt in prompts]
    others = [ask(prompt, "autoregressive", gen_length=16) for prompt in prompts]
    with running(folder, tensor_parallel_size=num_ranks) as engine:
        answers = engine.ask(*asks, *others, ASKS[0])
    assert [a.token_ids for a in answers[:3]] == [d.answer for d in without]
    assert [a.token_ids for a in answers[3:6]] == [d.answer for d in without]
    assert [a.num_steps for a in answers[:3]] == [d.forwards for d in with_draft]


def causal(model: Any, tokens: Sequence[int], num_causal: int) -> torch.Tensor:
    logits: torch.Tensor = model.causal_logits(torch.tensor([list(tokens)]), num_causal)[0]
    return logits
