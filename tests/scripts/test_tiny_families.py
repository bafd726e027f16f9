# SPDX-License-Identifier: Apache-2.0
"""What the Dream and LLaDA-MoE families of the tiny model have of their own."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import make_tiny_model
import pytest
import torch
from safetensors import safe_open
from tiny_model.checkpoint import read_config
from tiny_model.decoding import (
    dream,
    dream_quotas,
    hierarchy_block,
    low_confidence_dynamic,
)
from tiny_model.family import FAMILY_NAMES, load_family
from tiny_model.settings import (
    DecodingSetting,
    Phase,
    Plan,
    TrainingSettings,
    plan_for,
)
from tiny_model.tokenizer import load_tokenizer
from tiny_model.training import train

from tests.checkpoints import checkpoint_shapes
from tests.reference.decode import aligned
from tests.reference.families import reference_of
from tests.scripts.networks import EXAMPLES, MASK, TOKENS, FixedNetwork, committed

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("dream", "llada-moe", "llada2", "sdar", "fast-dllm")
# Everything but the learning: two small iterations, one forward a verification.
QUICK = Plan(
    training=TrainingSettings(
        phases=(Phase(2, (12,)),), tokens_per_batch=100, examples_per_phase=20
    ),
    verifications=(DecodingSetting(canvas=8, steps=1, block_length=8, num_questions=2),),
    required_share=0.0,
)
MOE_TOKENS = (
    *("<|startoftext|>", "<|endoftext|>", "<|mask|>"),
    *("<role>", "</role>", "<|role_end|>"),
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 plus 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Complete checkpoints of hardly trained networks; tests only read them."""
    folder = tmp_path_factory.mktemp("models")
    found = {family: folder / f"{family}-tiny" for family in FAMILIES}
    for family, output in found.items():
        make_tiny_model.make(output, family, seed=0, plan=QUICK)
    return found


def test_all_makes_one_of_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        make_tiny_model, "make", lambda output, family, *_, **__: made.append((family, output.name))
    )
    assert make_tiny_model.main(["--family", "all"]) == 0
    assert made == [
        ("llada", "llada-tiny"),
        ("dream", "dream-tiny"),
        ("llada-moe", "llada-moe-tiny"),
        ("llada2", "llada2-tiny"),
        ("sdar", "sdar-tiny"),
        ("fast-dllm", "fast-dllm-tiny"),
    ]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_must_be_right_at_one_token_a_forward(family: str) -> None:
    plan = plan_for(family)
    assert plan.required_share >= 0.9
    assert (plan.verifications[0].canvas, plan.verifications[0].steps) == (32, 32)


# --- files -----------------------------------------------------------------------------------


def test_dream_template_adds_its_system_message(checkpoints: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(checkpoints["dream"])
    rest = (
        "<|im_start|>user\nWhat is 1 plus 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
    )
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == system + rest
    text = tokenizer.apply_chat_template(
        CONVERSATION[1:], tokenize=False, add_generation_prompt=True
    )
    default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert text == default + rest + "<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 5


@pytest.mark.parametrize("family", ["llada-moe", "llada2"])
def test_moe_templates_name_roles(checkpoints: dict[str, Path], family: str) -> None:
    tokenizer = load_tokenizer(checkpoints[family])
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<role>SYSTEM</role>Be brief.<|role_end|><role>HUMAN</role>What is 1 plus 1?<|role_end|>"
        "<role>ASSISTANT</role>2<|role_end|><role>HUMAN</role>Why?<|role_end|>"
        "<role>ASSISTANT</role>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<role>")) == 5
    assert len(tokenizer.encode("HUMAN")) == len(tokenizer.encode("ASSISTANT")) == 1


def test_sdar_template_may_leave_thinking_out(checkpoints: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(checkpoints["sdar"])
    asked = [{"role": "user", "content": "Why?"}]
    text = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for options, end in (({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        found = tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **options
        )
        assert found == text + end


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("dream", ["<|beginoftext|>", "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]),
        *((family, [*MOE_TOKENS]) for family in ("llada-moe", "llada2")),
        (
            "sdar",
            ["<|endoftext|>", "<|MASK|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>"],
        ),
        ("fast-dllm", ["<|endoftext|>", "|<MASK>|", "<|im_start|>", "<|im_end|>"]),
    ],
)
def test_special_tokens(checkpoints: dict[str, Path], family: str, tokens: list[str]) -> None:
    tokenizer = load_tokenizer(checkpoints[family])
    config = read_config(checkpoints[family])
    assert set(tokenizer.all_special_tokens) == set(tokens)
    for token in tokens:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) < config["vocab_size"]  # padded, as in released checkpoints


# As released, not every family says everything twice.
@pytest.mark.parametrize(
    ("family", "in_config", "mask_token"),
    [
        ("dream", {"eos", "pad", "mask", "bos"}, "<|mask|>"),
        ("llada-moe", {"eos", "pad", "mask"}, "<|mask|>"),
        ("llada2", {"pad"}, "<|mask|>"),
        ("sdar", {"eos", "pad", "mask", "bos"}, "<|MASK|>"),
        ("fast-dllm", {"eos", "bos"}, None),
    ],
)
def test_where_the_special_ids_are_found(
    checkpoints: dict[str, Path], family: str, in_config: set[str], mask_token: str | None
) -> None:
    tokenizer = load_tokenizer(checkpoints[family])
    config = read_config(checkpoints[family])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>") if family == "fast-dllm" else None
    ids = {
        "eos": end or tokenizer.eos_token_id,
        "pad": tokenizer.eos_token_id,
        "bos": tokenizer.eos_token_id,
        "mask": tokenizer.mask_token_id,
    }
    assert {n for n in ids if f"{n}_token_id" in config} == in_config
    assert all(config[f"{name}_token_id"] == ids[name] for name in in_config)
    assert tokenizer.mask_token == mask_token
    stop = json.loads((checkpoints[family] / "generation_config.json").read_text())["eos_token_id"]
    turn = load_family(family).special_tokens.eot
    both = [tokenizer.convert_tokens_to_ids(turn), tokenizer.eos_token_id]
    assert stop == (both if family in ("llada2", "sdar", "fast-dllm") else both[1])


def test_a_tokenizer_is_read_without_a_word(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    load_tokenizer(checkpoints["sdar"])
    assert "".join(capfd.readouterr()) == ""


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors, each read from the shard that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for name, file_name in index["weight_map"].items():
        with safe_open(directory / file_name, framework="pt") as shard:
            found[name] = tuple(shard.get_slice(name).get_shape())
    return found


@pytest.mark.parametrize(
    ("family", "model_type", "architecture"),
    [
        ("dream", "Dream", "DreamModel"),
        ("fast-dllm", "Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM"),
        ("sdar", "sdar", "SDARForCausalLM"),
        ("llada2", "llada2_moe", "LLaDA2MoeModelLM"),
        ("llada-moe", "llada", "LLaDAMoEModelLM"),
    ],
)
def test_tensors_have_the_released_names_and_shapes(
    checkpoints: dict[str, Path], family: str, model_type: str, architecture: str
) -> None:
    config = read_config(checkpoints[family])
    assert (config["model_type"], config["architectures"]) == (model_type, [architecture])
    assert shapes(checkpoints[family]) == checkpoint_shapes(config)


def test_sizes_that_only_some_families_have(checkpoints: dict[str, Path]) -> None:
    configs = {family: read_config(path) for family, path in checkpoints.items()}
    for family in ("dream", "fast-dllm"):
        assert configs[family]["num_key_value_heads"] < configs[family]["num_attention_heads"]
    sdar, moe = configs["sdar"], configs["llada-moe"]
    assert sdar["head_dim"] * sdar["num_attention_heads"] > sdar["hidden_size"]
    assert moe["moe_layer_freq"] == [1] * moe["num_hidden_layers"]


# --- forward pass ----------------------------------------------------------------------------


def logits64(config: dict[str, Any], network: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the reference computes in float64 from the network's weights: [B, T, rows]."""
    weights = {name: tensor.double() for name, tensor in network.state_dict().items()}
    reference = reference_of(config)(config, weights)
    return aligned(reference, reference.logits(ids, network.block_length or None))


def random_network(family: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A network whose norms and biases are random, too, and its configuration."""
    torch.manual_seed(1)
    config = load_family(family).config(TOKENS) | changes
    network = load_family(family).network(config)
    with torch.no_grad():
        for parameter in [*network.parameters(), *network.buffers()]:
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network.eval(), config


@pytest.mark.parametrize("length", [1, 2, 23, 70])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dream", {}),
        ("llada-moe", {}),
        ("llada-moe", {"moe_layer_freq": [0, 1, 0, 1]}),
        ("llada2", {}),
        ("llada2", {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}),
        ("sdar", {}),
        ("sdar", {"block_size": 7, "head_dim": 16}),
        ("fast-dllm", {}),
    ],
)
def test_forward_equals_the_reference(family: str, changes: dict[str, Any], length: int) -> None:
    network, config = random_network(family, **changes)
    ids = torch.randint(TOKENS.vocab_size, (2, length), generator=torch.manual_seed(length))
    with torch.inference_mode():
        logits = network.logits(network.hidden(ids)).double()
    torch.testing.assert_close(logits, logits64(config, network, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llada2", "sdar", "fast-dllm"])
def test_a_noised_block_is_computed_as_behind_finished_ones(family: str) -> None:
    """What training computes at once is what decoding computes block by block."""
    network, _ = random_network(family)
    length, block = 3 * network.block_length + 2, network.block_length
    clean, noised = torch.randint(TOKENS.vocab_size, (2, 2, length), generator=torch.manual_seed(0))
    with torch.inference_mode():
        hidden = network.hidden(noised, clean)
        for start in range(0, length, block):
            rows = torch.cat((clean[:, :start], noised[:, start : start + block]), dim=1)
            wanted = network.hidden(rows)[:, start:]
            first = int(network.shift_rows and not start)  # position 0 is read from nowhere
            torch.testing.assert_close(
                hidden[:, start + first : start + block], wanted[:, first:], rtol=1e-4, atol=1e-4
            )


# --- learning and decoding -------------------------------------------------------------------


@pytest.mark.parametrize("family_name", ["llada2", "fast-dllm"])
def test_training_learns_to_answer(family_name: str) -> None:
    family = load_family(family_name)
    torch.manual_seed(0)
    network = family.network(family.config(TOKENS) | {"num_hidden_layers": 2, "bd_size": 8})
    network.block_length = 8
    recipe = TrainingSettings((Phase(80, (8,)),), tokens_per_batch=300)
    train(network, [EXAMPLES], TOKENS, recipe, 0, torch.arange(TOKENS.vocab_size))
    prompts = torch.tensor([example.prompt for example in EXAMPLES])
    setting = DecodingSetting(canvas=8, steps=8, block_length=8)
    rows = family.decode(network.eval(), prompts, TOKENS.mask, setting, lambda _: None)
    for row, example in zip(rows[:, 4:].tolist(), EXAMPLES, strict=True):
        assert row == example.answer + [TOKENS.eos] * (8 - len(example.answer))


@pytest.mark.parametrize(
    ("num_masked", "steps", "quotas"),
    [
        (8, 8, [0, 1, 1, 1, 1, 1, 1, 2]),  # the published schedule truncates
        (8, 4, [1, 2, 2, 3]),
        (5, 1, [5]),
        (1, 3, [0, 0, 1]),
    ],
)
def test_dream_quotas(num_masked: int, steps: int, quotas: list[int]) -> None:
    assert dream_quotas(num_masked, steps) == quotas


def test_dream_commits_the_lowest_entropy_first() -> None:
    network = FixedNetwork([1.0, 1.0, 3.0, 9.0, 4.0, 6.0, 9.0, 7.0, 8.0, 5.0])
    tokens, order = committed(dream, network, 2, DecodingSetting(canvas=8, steps=4))
    assert tokens == list(range(10))
    assert order == [[3], [6, 8], [5, 7], [2, 4, 9]]  # a tie goes to the lowest position


class ConfidentNetwork:
    """Token i + 10 at position i, alone with the probabilities that it is given."""

    block_length = 4
    tokens = torch.arange(10, 100)

    def __init__(self, probabilities: list[float]) -> None:
        self._probabilities = torch.tensor(probabilities)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        p = self._probabilities[:length, None].double()
        wanted = torch.arange(10, 10 + length)[:, None] == torch.arange(100)
        logits = torch.where(wanted, p.log(), ((1 - p) / 98).log())
        logits[:, MASK] = 9.0
        return logits.repeat(len(ids), 1, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_low_confidence_dynamic_commits_what_is_sure_or_the_quota() -> None:
    setting = DecodingSetting(canvas=6, steps=8, block_length=4)
    p = [1.0, 1.0, 1.0, 0.2, 0.95, 0.9, 0.3, 0.91, 0.5, 0.4, 0.6, 0.7]
    tokens, order = committed(
        partial(low_confidence_dynamic, threshold=0.9), ConfidentNetwork(p), 3, setting
    )
    assert tokens == list(range(10, 19))  # the last block is whole, the answer is not
    assert order == [[3], [4, 7], [5], [6], [11], [10], [8], [9]]


def test_low_confidence_dynamic_counts_no_finished_position_to_the_quota() -> None:
    setting = DecodingSetting(canvas=5, steps=2, block_length=4)
    p = [1.0, 1.0, 1.0, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert committed(
        partial(low_confidence_dynamic, threshold=2.0), ConfidentNetwork(p), 3, setting
    )[1] == [
        [3],
        [4, 5, 6, 7],
    ]


def test_hierarchy_block_seeds_a_block_and_fills_its_parts_in_order() -> None:
    setting = DecodingSetting(canvas=9, steps=9, block_length=4)
    p = [1.0, 1.0, 1.0, 0.2, 0.1, 0.3, 0.95, 0.99, 0.5, 0.4, 0.7, 0.6]
    loop = partial(hierarchy_block, threshold=0.9, sub_block_length=2)
    tokens, order = committed(loop, ConfidentNetwork(p), 3, setting)
    assert tokens == list(range(10, 22))
    assert order == [[3], [4], [5], [6, 7], [8], [9], [10], [11]]
