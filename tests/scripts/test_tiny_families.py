# SPDX-License-Identifier: Apache-2.0
"""Properties of the tiny model that differ between families."""

import json
from pathlib import Path
from typing import Any

import make_tiny_model
import pytest
import torch
from reference.models import reference_of
from tiny_model.checkpoint import read_config
from tiny_model.family import TokenIds, load_family
from tiny_model.moves import moved
from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings
from tiny_model.tokenizer import load_tokenizer
from tiny_model.training import BatchMaker, Example

FAMILIES = (
    *("dream", "llada-moe", "llada2", "sdar", "fast-dllm", "nemotron", "llada21"),
    *("llada22", "idlm", "diffusion-gemma"),
)
# All of the recipe but the training: two small iterations, one forward pass per verification.
QUICK = Plan(
    training=TrainingSettings(
        phases=(Phase(2, (12,)),), tokens_per_batch=100, examples_per_phase=20
    ),
    verifications=(DecodingSetting(canvas=8, steps=1, block_length=8, num_questions=2),),
    required_share=0.0,
)
TOKENS = TokenIds(vocab_size=40, bos=36, eos=37, mask=38, eot=39)
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
    """Make complete checkpoints of barely trained networks, which tests must not change."""
    folder = tmp_path_factory.mktemp("models")
    actual = {family: folder / f"{family}-tiny" for family in FAMILIES}
    for family, output in actual.items():
        make_tiny_model.make(output, family, seed=0, plan=QUICK)
    return actual


def test_all_makes_one_of_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        make_tiny_model, "make", lambda output, family, *_, **__: made.append((family, output.name))
    )
    assert make_tiny_model.main(["--family", "all"]) == 0
    assert made == [(family, f"{family}-tiny") for family in ("llada", *FAMILIES)]


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


@pytest.mark.parametrize("family", ["llada-moe", "llada2", "llada22"])
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


@pytest.mark.parametrize(
    ("family", "start", "off"),
    [
        ("sdar", "", "<think>\n\n</think>\n\n"),
        ("idlm", "", "<think>\n\n</think>\n\n"),
        ("nemotron", "<|im_start|>system\n<|im_end|>\n", "<think></think>"),
    ],
)
def test_templates_may_leave_thinking_out(
    checkpoints: dict[str, Path], family: str, start: str, off: str
) -> None:
    tokenizer = load_tokenizer(checkpoints[family])
    messages = [{"role": "user", "content": "Why?"}]
    text = f"{start}<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for options, end in (({}, ""), ({"enable_thinking": False}, off)):
        actual = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        assert actual == text + end


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("dream", ["<|beginoftext|>", "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]),
        *((family, [*MOE_TOKENS]) for family in ("llada-moe", "llada2", "llada22")),
        *(
            (
                family,
                ["<|endoftext|>", "<|MASK|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>"],
            )
            for family in ("sdar", "idlm")
        ),
        ("fast-dllm", ["<|endoftext|>", "|<MASK>|", "<|im_start|>", "<|im_end|>"]),
        (
            "nemotron",
            ["<s>", "<|im_end|>", "<SPECIAL_100>", "<|im_start|>", "<think>", "</think>"],
        ),
        ("diffusion-gemma", ["<bos>", "<eos>", "<mask>", "<pad>", "<|turn>", "<turn|>"]),
    ],
)
def test_special_tokens(checkpoints: dict[str, Path], family: str, tokens: list[str]) -> None:
    tokenizer = load_tokenizer(checkpoints[family])
    config = read_config(checkpoints[family])
    assert set(tokenizer.all_special_tokens) == set(tokens)
    for token in tokens:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    ends = {"nemotron": "<|im_end|>", "diffusion-gemma": "<eos>"}
    end = ends.get(family, "<|endoftext|>")
    assert tokenizer.eos_token == tokenizer.pad_token == end
    assert len(tokenizer) < config["vocab_size"]  # padded like the released checkpoints


# Some released families store an id in only one of the files.
@pytest.mark.parametrize(
    ("family", "in_config", "mask_token"),
    [
        ("dream", {"eos", "pad", "mask", "bos"}, "<|mask|>"),
        ("llada-moe", {"eos", "pad", "mask"}, "<|mask|>"),
        ("llada2", {"pad"}, "<|mask|>"),
        ("llada22", {"pad"}, "<|mask|>"),
        ("sdar", {"eos", "pad", "mask", "bos"}, "<|MASK|>"),
        ("idlm", {"eos", "pad", "mask", "bos"}, "<|MASK|>"),
        ("fast-dllm", {"eos", "bos"}, None),
        ("nemotron", {"eos", "bos", "mask"}, None),
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
        "bos": tokenizer.bos_token_id if family == "nemotron" else tokenizer.eos_token_id,
        "mask": tokenizer.mask_token_id or tokenizer.convert_tokens_to_ids("<SPECIAL_100>"),
    }
    assert {n for n in ids if f"{n}_token_id" in config} == in_config
    assert all(config[f"{name}_token_id"] == ids[name] for name in in_config)
    assert tokenizer.mask_token == mask_token
    stop = json.loads((checkpoints[family] / "generation_config.json").read_text())["eos_token_id"]
    turn = load_family(family).special_tokens.eot
    both = [tokenizer.convert_tokens_to_ids(turn), tokenizer.eos_token_id]
    assert stop == (
        both if family in ("llada2", "llada22", "sdar", "idlm", "fast-dllm") else both[1]
    )


# --- forward pass ----------------------------------------------------------------------------


def random_network(family: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a network with random norms and biases, too, and its configuration."""
    torch.manual_seed(1)
    config = load_family(family).config(TOKENS) | changes
    network = load_family(family).network(config)
    with torch.no_grad():
        for parameter in [*network.parameters(), *network.buffers()]:
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network.eval(), config


@pytest.mark.parametrize("family", ["llada2", "llada22", "sdar", "fast-dllm"])
def test_a_noised_block_is_computed_as_behind_finished_ones(family: str) -> None:
    """Training computes in one pass what decoding computes block by block."""
    network, _ = random_network(family)
    length, block = 3 * network.block_length + 2, network.block_length
    clean, noised = torch.randint(TOKENS.vocab_size, (2, 2, length), generator=torch.manual_seed(0))
    with torch.inference_mode():
        hidden = network.hidden(noised, clean)
        for start in range(0, length, block):
            rows = torch.cat((clean[:, :start], noised[:, start : start + block]), dim=1)
            wanted = network.hidden(rows)[:, start:]
            first = int(network.shift_rows and not start)  # no row predicts position 0
            torch.testing.assert_close(
                hidden[:, start + first : start + block], wanted[:, first:], rtol=1e-4, atol=1e-4
            )


def test_a_seeded_block_is_computed_as_behind_its_context() -> None:
    """The same holds for a block that begins anywhere after a causal context."""
    network, _ = random_network("nemotron")
    clean, noised = torch.randint(TOKENS.vocab_size, (2, 3, 20), generator=torch.manual_seed(0))
    starts, first = torch.tensor([6, 9, 12]), 5
    with torch.inference_mode():
        hidden = network.seeded(noised[:, first:], starts, clean)
        for row, start in enumerate(starts.tolist()):
            rows = torch.cat((clean[row, :start], noised[row, start:]))[None]
            wanted = network.seeded(rows, starts[row : row + 1])[0]
            actual = torch.cat((hidden[row, :start], hidden[row, 20 - first + start :]))
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
            after = network.seeded(rows[:, :start], torch.tensor([start]))[0]
            torch.testing.assert_close(after, wanted[:start], rtol=1e-4, atol=1e-4)


def test_a_canvas_is_computed_behind_its_own_context() -> None:
    """Rows of a batch have canvases that begin at different positions."""
    network, config = random_network("diffusion-gemma", sliding_window=7)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TOKENS.vocab_size, (3, 20), generator=generator)
    soft = torch.randn(3, 20, config["hidden_size"], generator=generator)
    starts = torch.tensor([6, 9, 12])
    with torch.inference_mode():
        hidden = network.denoised(ids, starts, soft)
        for row, start in enumerate(starts.tolist()):
            one = slice(row, row + 1)
            alone = network.denoised(ids[one], starts[one], soft[one])
            torch.testing.assert_close(hidden[one], alone, rtol=1e-4, atol=1e-4)
            # The context is causal, so it depends neither on the canvas nor on its embeddings.
            shorter = network.denoised(ids[one, :start], starts[one], None)
            torch.testing.assert_close(hidden[one, :start], shorter, rtol=1e-4, atol=1e-4)


def test_rows_of_a_block_share_their_experts() -> None:
    network, config = random_network("llada22")
    ids = torch.randint(TOKENS.vocab_size, (2, 70), generator=torch.manual_seed(0))
    with torch.inference_mode():
        actual = network.logits(network.hidden(ids))
    reference = reference_of(config)(config, network.state_dict())
    for row, logits in zip(ids, actual, strict=True):
        wanted = reference.logits(row[None], network.block_length)[0]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("counts", "ids", "wanted"),
    [
        ([1, 1, 1, 1], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([0, 1, 0, 1], [2, 4], ["split", "split"]),
        ([1, 0, 0, 1], [1, 4], [1, "split"]),
        ([2, 1, 1, 2], [11, 1, 2, 3, 14, 4], ["delete", 1, 2, 3, "delete", 4]),
    ],
)
def test_missing_and_added_tokens_are_predicted(
    counts: list[int], ids: list[int], wanted: list[int | str]
) -> None:
    """A token after missing ones predicts an insertion, and an added token its deletion."""
    source, others = torch.tensor([1, 2, 3, 4]), torch.tensor([11, 12, 13, 14])
    result = moved(source, others, torch.tensor(counts), TOKENS)
    named = {"split": TOKENS.split, "delete": TOKENS.delete}
    assert result.ids.tolist() == ids
    assert result.wanted.tolist() == [named.get(str(token), token) for token in wanted]
    assert result.is_own.tolist() == [isinstance(token, int) for token in wanted]


def test_texts_in_a_batch_lead_back_to_the_answer() -> None:
    """What rows read and predict follows the order of the clean answer."""
    examples = [Example([1, 2, 3], list(range(4, 30)))]
    settings = TrainingSettings(text_share=1.0, moved_share=0.5, wrong_share=0.2)
    batch = BatchMaker(examples, TOKENS, settings, 0, block_length=8).draw(32)
    kinds = set[str]()
    for noised, clean, wanted in zip(batch.noised, batch.clean, batch.wanted, strict=True):
        for start in range(3, 35, 8):
            block = slice(start - start % 8 if start > 3 else start, start - start % 8 + 8)
            rest = iter(clean[block.start :].tolist())
            for read, token in zip(noised[block].tolist(), wanted[block].tolist(), strict=True):
                if token == TOKENS.delete:
                    kinds.add("added")
                elif token == TOKENS.split:
                    kinds.add("missing")
                    assert read in rest
                else:
                    kinds.add("own" if read == token else "wrong")
                    assert token in rest
    assert kinds == {"added", "missing", "own", "wrong"}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_tokens_is_wrong(share: float) -> None:
    examples = [Example([1, 2, 3], list(range(4, 36)))]
    settings = TrainingSettings(wrong_share=share)
    batch = BatchMaker(examples, TOKENS, settings, 0, block_length=8).draw(32)
    masked = batch.noised == TOKENS.mask
    wrong = (batch.noised != batch.clean) & ~masked
    canvas = torch.arange(35) >= 3
    assert not (wrong & ~canvas).any()
    if share:
        assert (batch.predicted == canvas).all()
        assert 0.4 < wrong.sum() / (canvas & ~masked).sum() < 0.6
    else:
        assert (batch.predicted == masked).all() and not wrong.any()
