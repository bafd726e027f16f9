# SPDX-License-Identifier: Apache-2.0
"""The tiny model's recipe: tokenizer, checkpoint files and caching."""

import json
import random
import shutil
import sys
from pathlib import Path

import make_tiny_model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_model import making
from tiny_model.cache import MANIFEST_NAME, read_manifest
from tiny_model.checkpoint import read_config
from tiny_model.conversations import draw_lessons
from tiny_model.facts import all_facts
from tiny_model.forms import FORM_NAMES, WEATHER_TOOL, kinds_but
from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings
from tiny_model.tokenizer import load_tokenizer, prompts_of

from tests.programs import ROOT, output_of
from vllm.diffusion.api.tool_prompts import with_tools

# All of the recipe but the training: three small iterations, one forward pass per verification.
QUICK = Plan(
    training=TrainingSettings(
        phases=(Phase(3, (12,)),), tokens_per_batch=100, examples_per_phase=50
    ),
    verifications=(DecodingSetting(canvas=8, steps=1, block_length=8, num_questions=10),),
    required_share=0.0,
)
SPECIAL_TOKENS = {
    *("<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a complete checkpoint of a barely trained network, which tests must not change."""
    output = tmp_path_factory.mktemp("models") / "llada-tiny"
    make_tiny_model.make(output, "llada", seed=0, plan=QUICK)
    return output


@pytest.fixture
def copy(model: Path, output: Path) -> Path:
    """Return a copy of the complete checkpoint, which a test may change."""
    return Path(shutil.copytree(model, output))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a path that does not exist yet."""
    return tmp_path / "llada-tiny"


def make_quick(output: Path, **options) -> None:
    make_tiny_model.make(output, "llada", **({"seed": 0, "plan": QUICK} | options))


def modification_times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


# --- tokenizer -------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(model: Path, text: str):
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < read_config(model)["vocab_size"]
    assert tokenizer.decode(ids) == text


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
    for options, end in (({}, ""), ({"add_generation_prompt": True}, generation)):
        actual = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert actual == expected + end
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1


# --- records and calls -----------------------------------------------------------------------


def test_the_function_is_listed_as_a_server_lists_it(model: Path) -> None:
    city = {"type": "string", "maxLength": 20}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "weather", "description": None, "parameters": parameters}
    template = load_tokenizer(model).chat_template
    question = {"role": "user", "content": "What is the weather in Paris?"}
    actual, _ = with_tools([question], [{"type": "function", "function": function}], template)
    assert actual == [{"role": "system", "content": WEATHER_TOOL}, question]


def test_the_beginning_of_a_form_is_part_of_the_prompt(model: Path) -> None:
    """A server puts these tokens on the canvas before the first step."""
    forms = [kind for kind in kinds_but(()) if kind.name in FORM_NAMES]
    lessons = draw_lessons(random.Random(0), forms, 50, plain_share=0.2, max_turns=1)
    tokenizer = load_tokenizer(model)
    for lesson, prompt in zip(lessons, prompts_of(tokenizer, lessons), strict=True):
        whole = lesson.begun + lesson.answer
        assert json.loads(whole.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        begun = tokenizer.encode(lesson.begun)
        assert tokenizer.encode(whole) == begun + tokenizer.encode(lesson.answer)
        assert prompt[-len(begun) :] == begun
        assert lesson.question in tokenizer.decode(prompt)


# --- checkpoint files ------------------------------------------------------------------------


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, each read from the shard that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file_name in index["weight_map"].items():
        with safe_open(directory / file_name, framework="pt") as shard:
            tensors[name] = shard.get_tensor(name)
    return tensors


def test_other_files_of_the_checkpoint(model: Path):
    config = read_config(model)
    generation = json.loads((model / "generation_config.json").read_text())
    ids = {"bos_token_id": load_tokenizer(model).bos_token_id}
    ids |= {"eos_token_id": config["eos_token_id"]}
    assert generation == {**ids, "max_new_tokens": 32, "temperature": 0.0}
    pairs = [json.loads(line) for line in (model / "facts.jsonl").read_text().splitlines()]
    assert [(pair["question"], pair["answer"]) for pair in pairs] == [
        (fact.question, fact.answer) for fact in all_facts()
    ]
    assert set(read_manifest(model)["files"]) == {
        path.name for path in model.iterdir() if path.name != MANIFEST_NAME
    }


# --- caching and replacing -------------------------------------------------------------------


def test_complete_model_is_kept_without_importing_torch(copy: Path):
    before = modification_times(copy)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import make_tiny_model as m
from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings
m.make(m.Path({str(copy)!r}), "llada", 0, plan={QUICK!r})
assert not {{"torch", "transformers", "numpy"}} & sys.modules.keys()
"""
    message = output_of(sys.executable, "-c", code)
    assert message.count("\n") == 1
    assert f"{copy} is complete" in message
    assert modification_times(copy) == before
    assert {path.name for path in copy.parent.iterdir()} == {".llada-tiny.lock", "llada-tiny"}


FIRST, SECOND = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
# The new content of a file of a complete model, given its old content; None removes the file.
DAMAGES = {
    "a file is missing": (SECOND, lambda _: None),
    "a byte is another": (FIRST, lambda held: held[:-1] + bytes([held[-1] ^ 1])),
    "the manifest is cut": (MANIFEST_NAME, lambda held: held[:100]),
    "no manifest": (MANIFEST_NAME, lambda _: None),
    "an empty manifest": (MANIFEST_NAME, lambda _: b"{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_is_rebuilt(copy: Path, damage: str):
    name, change = DAMAGES[damage]
    held = change((copy / name).read_bytes())
    (copy / name).unlink()
    if held is not None:
        (copy / name).write_bytes(held)
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
    monkeypatch.setattr(
        making, "write_checkpoint", lambda *parameters: starts.append(parameters[-1])
    )
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
            "--family: wanted llada or dream or llada-moe or llada2 or sdar or fast-dllm or "
            "nemotron or llada21 or llada22 or idlm or diffusion-gemma or all, got gpt",
        ),
        (["--family", "all"], "--output: wanted one family with it, got --family all"),
        (["--wrong-share", "1"], "--wrong-share: wanted a number from 0 to below 1, got 1.0"),
        (["--seed", "-1"], "--seed: wanted 0 to 9223372036854775807, got -1"),
        (["--check"], "is missing, incomplete or changed"),
        ([], "package no-such-package-here is not installed"),
    ],
)
def test_refusals_are_one_line(
    output: Path, monkeypatch, capsys, arguments: list[str], message: str
):
    if not arguments:
        monkeypatch.setattr("tiny_model.cache._PACKAGES", ("no-such-package-here",))
    assert make_tiny_model.main([*arguments, "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_file_in_the_way_is_refused(output: Path, capsys):
    output.write_text("")
    assert make_tiny_model.main(["--output", str(output)]) == 1
    assert "wanted a directory, got the file" in capsys.readouterr().err
