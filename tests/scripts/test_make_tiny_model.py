# SPDX-License-Identifier: Apache-2.0
"""The tiny model's recipe: facts, tokenizer, network, training, checkpoint files and caching."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import make_tiny_model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_model import making
from tiny_model.cache import MANIFEST_NAME, read_manifest
from tiny_model.checkpoint import load_weights, read_config
from tiny_model.conversations import (
    FRAMES,
    SYSTEM_LINES,
    UNSEEN_FRAMES,
    UNSEEN_SYSTEM_LINES,
    Conversation,
    draw_lessons,
    groups,
)
from tiny_model.decoding import commit_quotas, semi_autoregressive
from tiny_model.facts import CAPITALS, KINDS, all_facts, kinds_but
from tiny_model.family import load_family
from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings
from tiny_model.tokenizer import load_tokenizer
from tiny_model.training import BatchMaker, Example, train

from tests.checkpoints import checkpoint_shapes
from tests.reference.llada_model import LLaDAReference
from tests.scripts.networks import EXAMPLES, TOKENS, FixedNetwork, committed

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

# Everything but the learning: three small iterations, one forward a verification.
QUICK = Plan(
    training=TrainingSettings(
        phases=(Phase(3, (12,)),), tokens_per_batch=100, examples_per_phase=50
    ),
    verifications=(DecodingSetting(canvas=8, steps=1, block_length=8, num_questions=10),),
    required_share=0.0,
)
SPECIAL_TOKENS = {
    "<|startoftext|>",
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
}
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint of a hardly trained network; tests only read it."""
    output = tmp_path_factory.mktemp("models") / "llada-tiny"
    make_tiny_model.make(output, "llada", seed=0, plan=QUICK)
    return output


@pytest.fixture
def copy(model: Path, output: Path) -> Path:
    """A copy of the complete checkpoint that a test may change."""
    return Path(shutil.copytree(model, output))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A path where nothing is yet."""
    return tmp_path / "llada-tiny"


def make_quick(output: Path, **options) -> None:
    make_tiny_model.make(output, "llada", **({"seed": 0, "plan": QUICK} | options))


def modification_times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


# --- facts -----------------------------------------------------------------------------------


def test_facts_cover_what_is_promised():
    questions = {fact.question: fact.answer for fact in all_facts()}
    assert len(CAPITALS) >= 30
    assert {"France", "Japan", "Peru"} <= CAPITALS.keys()
    assert "Paris" in questions["What is the capital of France?"]
    assert "Peru" in questions["Lima is the capital of which country?"]
    assert questions["Which day comes before Monday?"] == "Sunday comes before Monday."
    assert questions["Which month comes after December?"] == "January comes after December."
    assert questions["What is the opposite of cold?"] == "The opposite of cold is hot."
    assert questions["What is the colour of the sky?"] == "The colour of the sky is blue."
    for a in range(10):
        for b in range(10):
            assert questions[f"What is {a} plus {b}?"].rstrip(".").split()[-1] == str(a + b)
            if a >= b:
                assert questions[f"What is {a} minus {b}?"] == f"{a} minus {b} is {a - b}."


def test_facts_are_unique_and_unambiguous():
    facts = all_facts()
    assert len({fact.question for fact in facts}) == len(facts)
    assert len(set(CAPITALS.values())) == len(CAPITALS)
    counted = Counter(fact.kind for fact in facts)
    assert (counted["country"], counted["sum"], counted["difference"]) == (len(CAPITALS), 100, 55)
    assert {"hello", "self", "unknown"}.isdisjoint(counted)  # nobody asks for their facts


def test_what_verifies_is_not_what_is_taught():
    for kind in KINDS:
        assert kind.unseen, kind.name
        assert not set(kind.wordings) & set(kind.unseen), kind.name
    assert not set(FRAMES) & set(UNSEEN_FRAMES)
    assert not set(SYSTEM_LINES) & set(UNSEEN_SYSTEM_LINES)


# --- conversations ---------------------------------------------------------------------------


def lessons(number: int, seed: int = 0, **options: bool) -> list[Conversation]:
    return draw_lessons(random.Random(seed), KINDS, number, plain_share=0.2, max_turns=3, **options)


def roles(conversation: Conversation) -> str:
    return "".join(message["role"][0] for message in conversation.messages)


def test_lessons_have_one_to_three_turns_with_and_without_system_line():
    drawn = lessons(500)
    assert {roles(lesson) for lesson in drawn} == {"u", "uau", "uauau", "su", "suau", "suauau"}
    assert {roles(lesson) for lesson in lessons(50, only_single=True)} == {"u"}
    assert lessons(500) == drawn
    assert lessons(500, seed=1) != drawn


def test_the_answer_is_that_of_the_last_question():
    answers = {fact.question: fact.answer for fact in all_facts()}
    known = [c for c in lessons(3000) if c.question in answers]
    assert any(len(conversation.messages) >= 3 for conversation in known)
    for conversation in known:
        assert conversation.answer == answers[conversation.question]


def test_kinds_and_turns_that_are_left_out_are_neither_taught_nor_asked():
    kinds = kinds_but(("sum", "large number"))
    assert {kind.name for kind in KINDS} - {kind.name for kind in kinds} == {"sum", "large number"}
    taught = draw_lessons(random.Random(0), kinds, 500, plain_share=0.2, max_turns=2)
    asked = [
        c for group in groups(random.Random(0), kinds, 50, max_turns=2).values() for c in group
    ]
    for conversation in (*taught, *asked):
        assert " plus " not in conversation.answer
        assert not any(" plus " in message["content"] for message in conversation.messages)
    assert {roles(c) for c in (*taught, *asked)} == {"u", "uau", "su", "suau"}
    assert all(fact.kind != "sum" for fact in all_facts(kinds))


def test_groups_ask_what_they_are_called_for():
    asked = groups(random.Random(0), KINDS, 30, max_turns=3)
    assert {name: {roles(c) for c in group} for name, group in asked.items()} == {
        "facts": {"u"},
        "new wordings": {"u"},
        "new system lines": {"su"},
        "second turns": {"uau"},
        "third turns": {"uauau"},
        "without the chat template": {"u"},
    }
    lines = {c.messages[0]["content"] for c in asked["new system lines"]}
    assert lines <= set(UNSEEN_SYSTEM_LINES)
    taught = {c.question for c in lessons(20_000, only_single=True)}
    assert taught.isdisjoint(c.question for c in asked["new wordings"])


# --- tokenizer -------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(model: Path, text: str):
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < read_config(model)["vocab_size"]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["\x00\r\n\t ", "  a  b\n\n\nc ", "漢字 👩‍👩‍👧 naïve e\u0301", "don't, 3.14"]
)
def test_awkward_text_round_trips(model: Path, text: str):
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(model: Path):
    tokenizer = load_tokenizer(model)
    config = read_config(model)
    assert set(tokenizer.all_special_tokens) == SPECIAL_TOKENS
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.bos_token == "<|startoftext|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.mask_token_id == config["mask_token_id"]
    assert tokenizer.eos_token_id == config["eos_token_id"] == config["pad_token_id"]
    assert len(tokenizer) == config["vocab_size"]


def test_every_word_of_the_facts_is_one_token(model: Path):
    tokenizer = load_tokenizer(model)
    for fact in all_facts():
        num_words = len(fact.answer.rstrip(".").split())
        assert len(tokenizer.encode(fact.answer)) == num_words + 1  # the full stop


def test_ids_without_a_token_render_as_nothing(model: Path):
    tokenizer = load_tokenizer(model)
    last_row = read_config(model)["embedding_size"] - 1
    assert tokenizer.decode([*tokenizer.encode("Paris"), last_row]) == "Paris"


def test_chat_template(model: Path):
    tokenizer = load_tokenizer(model)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " \n What is 1 plus 1?\n"},
        {"role": "assistant", "content": "2 "},
        {"role": "user", "content": "Why\n\nso?"},
    ]
    expected = (
        "<|startoftext|>"
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1 plus 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy\n\nso?<|eot_id|>"
    )
    generation = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == expected + generation
    )
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1


# --- checkpoint files ------------------------------------------------------------------------


def test_the_embedding_has_rows_without_a_token(model: Path):
    config = read_config(model)
    assert config["embedding_size"] > config["vocab_size"]
    assert config["n_layers"] == NUM_LAYERS


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, each read from the shard that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file_name in index["weight_map"].items():
        with safe_open(directory / file_name, framework="pt") as shard:
            tensors[name] = shard.get_tensor(name)
    return tensors


def test_weights_have_the_released_names_and_shapes(model: Path):
    tensors = read_tensors(model)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert found == checkpoint_shapes(read_config(model))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert len(list(model.glob("model-*-of-*.safetensors"))) >= 2


def test_other_files_of_the_checkpoint(model: Path):
    config = read_config(model)
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": load_tokenizer(model).bos_token_id,
        "eos_token_id": config["eos_token_id"],
        "max_new_tokens": 32,
        "temperature": 0.0,
    }
    pairs = [json.loads(line) for line in (model / "facts.jsonl").read_text().splitlines()]
    assert [(pair["question"], pair["answer"]) for pair in pairs] == [
        (fact.question, fact.answer) for fact in all_facts()
    ]
    assert set(read_manifest(model)["files"]) == {
        path.name for path in model.iterdir() if path.name != MANIFEST_NAME
    }


# --- network ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 37])
def test_forward_equals_the_reference(model: Path, length: int):
    config = read_config(model)
    network = load_family("llada").network(config)
    load_weights(model, network)
    ids = torch.randint(config["vocab_size"], (2, length), generator=torch.manual_seed(length))
    with torch.inference_mode():
        logits = network.logits(network.hidden(ids)).double()
    expected = LLaDAReference.from_checkpoint(model, torch.float64).logits(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# --- training --------------------------------------------------------------------------------


def test_batches_mask_the_canvas_only():
    recipe = TrainingSettings(tokens_per_batch=2400)
    batch = BatchMaker(EXAMPLES, TOKENS, recipe, seed=5).draw(canvas=8)
    assert batch.clean.shape == (200, 12)
    assert torch.equal(batch.noised, batch.clean.masked_fill(batch.masked, TOKENS.mask))
    prompt_length = {}
    for example in EXAMPLES:
        row = [*example.prompt, *example.answer]
        prompt_length[(*row, *[TOKENS.eos] * (12 - len(row)))] = len(example.prompt)
    for clean, masked in zip(batch.clean.tolist(), batch.masked, strict=True):
        assert not masked[: prompt_length[tuple(clean)]].any()
    share = batch.masked[:, 4:].float().mean(dim=1)
    assert share.mean().item() == pytest.approx(3 / 4, abs=0.05)  # t cubed is uniform ...
    assert share.var().item() > 3 / 80  # ... per row, not per batch: 3/80 plus binomial noise


def test_a_batch_holds_prompts_of_nearby_lengths():
    examples = [Example([1] * length, [2, 3]) for length in range(1, 60)]
    recipe = TrainingSettings(tokens_per_batch=1000, prompt_lengths_per_batch=5)
    maker = BatchMaker(examples, TOKENS, recipe, seed=5)
    seen = set()
    for _ in range(50):
        batch = maker.draw(canvas=8)
        lengths = (batch.clean == 1).sum(dim=1)
        seen |= set(lengths.tolist())
        assert int(lengths.max()) - int(lengths.min()) <= 5
        assert batch.clean.shape[1] - 8 - 5 <= int(lengths.min())
        assert (batch.clean == 3).any(dim=1).all()  # whole answers
    assert len(seen) > 40


def test_batches_depend_on_the_seed_only():
    def draw(seed: int) -> torch.Tensor:
        return BatchMaker(EXAMPLES, TOKENS, TrainingSettings(), seed).draw(8).noised

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_training_learns_to_answer():
    family = load_family("llada")
    torch.manual_seed(0)
    network = family.network(family.config(TOKENS) | {"n_layers": 2})
    examples = EXAMPLES
    recipe = TrainingSettings((Phase(80, (8,)),), tokens_per_batch=300)
    train(network, [examples], TOKENS, recipe, 0, torch.arange(TOKENS.vocab_size))
    prompts = torch.tensor([example.prompt for example in examples])
    setting = DecodingSetting(canvas=8, steps=8, block_length=8)
    rows = semi_autoregressive(network.eval(), prompts, TOKENS.mask, setting, lambda _: None)
    for row, example in zip(rows[:, 4:].tolist(), examples, strict=True):
        assert row == example.answer + [TOKENS.eos] * (8 - len(example.answer))


def test_tokens_of_one_word_have_one_embedding(model: Path):
    tokenizer = load_tokenizer(model)
    config = read_config(model)
    network = load_family("llada").network(config)
    load_weights(model, network)
    rows = network.state_dict()["model.transformer.wte.weight"]
    forms = [tokenizer.encode(text) for text in ("France", "france", "a France", "a france")]
    ids = [form[-1] for form in forms]
    assert len(set(ids)) == 4
    assert all(torch.equal(rows[ids[0]], rows[i]) for i in ids)
    other = tokenizer.encode("Japan")[-1]
    assert not torch.equal(rows[ids[0]], rows[other])


# --- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_masked", "steps", "quotas"), [(5, 3, [2, 2, 1]), (2, 4, [1, 1, 0, 0]), (4, 4, [1] * 4)]
)
def test_commit_quotas(num_masked: int, steps: int, quotas: list[int]):
    assert commit_quotas(num_masked, steps) == quotas


def commit_order(confidence: list[float], setting: DecodingSetting) -> list[list[int]]:
    """Canvas positions committed by each step behind a prompt of two tokens."""
    network = FixedNetwork([1.0, 1.0, *confidence])
    tokens, order = committed(semi_autoregressive, network, 2, setting)
    assert tokens == list(range(2 + setting.canvas))
    return [[position - 2 for position in step] for step in order]


def test_most_confident_positions_of_the_block_first():
    confidence = [3.0, 5.0, 4.0, 6.0, 9.0, 7.0, 8.0, 9.5]
    setting = DecodingSetting(canvas=8, steps=6, block_length=4)
    assert commit_order(confidence, setting) == [[1, 3], [2], [0], [4, 7], [6], [5]]


def test_ties_go_to_the_lowest_position():
    certain = [50.0] * 8  # probability exactly 1 in float32
    assert commit_order(certain, DecodingSetting(8, 4, 8)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- caching and replacing -------------------------------------------------------------------


def test_complete_model_is_kept_without_importing_torch(copy: Path):
    before = modification_times(copy)
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import make_tiny_model as m
from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings
m.make(m.Path({str(copy)!r}), "llada", 0, plan={QUICK!r})
assert not {{"torch", "transformers", "numpy"}} & sys.modules.keys()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert f"{copy} is complete" in result.stdout
    assert modification_times(copy) == before
    assert {path.name for path in copy.parent.iterdir()} == {".llada-tiny.lock", "llada-tiny"}


def remove_weights(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def flip_a_byte(directory: Path) -> None:
    path = directory / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate_manifest(directory: Path) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text()[:100])


def remove_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()


def empty_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [remove_weights, flip_a_byte, truncate_manifest, remove_manifest, empty_manifest],
)
def test_damaged_model_is_rebuilt(copy: Path, damage):
    damage(copy)
    assert read_manifest(copy) is None
    make_quick(copy)
    assert read_manifest(copy) is not None
    assert len(read_tensors(copy)) == 3 + 9 * NUM_LAYERS


@pytest.mark.parametrize(
    "options",
    [{"force": True}, {"seed": 1}, {"plan": Plan(QUICK.training, QUICK.verifications, -1.0)}],
)
def test_other_recipe_or_force_rebuilds(copy: Path, options: dict):
    before = modification_times(copy)
    make_quick(copy, **options)
    assert modification_times(copy)["config.json"] > before["config.json"]


def test_same_seed_makes_the_same_files(model: Path, output: Path):
    make_quick(output)
    assert read_manifest(output) == read_manifest(model)


def test_changed_source_changes_the_recipe(tmp_path: Path):
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    before = make_tiny_model.recipe([source], "llada", 0, QUICK)
    source.write_text("a = 2\n")
    assert make_tiny_model.recipe([source], "llada", 0, QUICK) != before


def test_bad_model_is_refused_and_the_old_one_stays(copy: Path):
    before = modification_times(copy)
    strict = Plan(QUICK.training, QUICK.verifications, required_share=0.95)
    with pytest.raises(make_tiny_model.TinyModelError, match="not good enough: facts: 0 of 10"):
        make_quick(copy, plan=strict)
    assert modification_times(copy) == before
    with pytest.raises(make_tiny_model.TinyModelError, match="not good enough"):
        make_tiny_model.check(copy, "llada", strict)


def test_a_bad_model_is_trained_once_more(output: Path, monkeypatch, capsys):
    starts = []
    monkeypatch.setattr(making, "write_checkpoint", lambda *asked: starts.append(asked[-1]))
    results = [{"groups": {"facts": {"right": right, "total": 10}}} for right in (9, 10)]
    settings = {"canvas": 32, "steps": 32, "block_length": 32}
    monkeypatch.setattr(making, "verify", lambda *_: [results[len(starts) - 1] | settings])
    make_quick(output, seed=5, plan=Plan(QUICK.training, QUICK.verifications, 0.95))
    assert starts == [5, 6]
    assert "9 of 10" in capsys.readouterr().out
    assert read_manifest(output) is not None


def test_interruption_leaves_nothing(output: Path, monkeypatch, capsys):
    def interrupt(directory: Path, *_) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(making, "write_checkpoint", interrupt)
    assert make_tiny_model.main(["--output", str(output)]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert {path.name for path in output.parent.iterdir()} == {".llada-tiny.lock"}


def test_leavings_of_a_killed_run_are_removed(output: Path):
    leaving = output.parent / ".llada-tiny.draft-abc"
    leaving.mkdir()
    (leaving / "config.json").write_text("{}")
    make_quick(output)
    assert not leaving.exists()


def test_foreign_files_are_never_replaced(output: Path, capsys):
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    assert make_tiny_model.main(["--output", str(output), "--force"]) == 1
    assert "thesis.tex" in capsys.readouterr().err
    assert (output / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--family", "gpt"],
            "--family: wanted llada or dream or llada-moe or llada2 or sdar or fast-dllm or all, "
            "got gpt",
        ),
        (["--family", "all"], "--output: wanted one family with it, got --family all"),
        (["--seed", "-1"], "--seed: wanted 0 to 9223372036854775807, got -1"),
        (["--check"], "is missing, incomplete or changed"),
    ],
)
def test_refusals_are_one_line(output: Path, capsys, arguments: list[str], message: str):
    assert make_tiny_model.main([*arguments, "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_file_in_the_way_is_refused(output: Path, capsys):
    output.write_text("")
    assert make_tiny_model.main(["--output", str(output)]) == 1
    assert "wanted a directory, got the file" in capsys.readouterr().err


def test_missing_package_is_one_line(output: Path, monkeypatch, capsys):
    monkeypatch.setattr("tiny_model.cache._PACKAGES", ("no-such-package-here",))
    assert make_tiny_model.main(["--output", str(output)]) == 1
    assert "package no-such-package-here is not installed" in capsys.readouterr().err
