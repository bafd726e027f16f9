# SPDX-License-Identifier: Apache-2.0
"""Mask and stop ids of a checkpoint, from its configuration files and its tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs

from tests.checkpoint_files import change_json
from tests.checkpoints import (
    BLOCK_CASES,
    EOS_ID,
    EOT_ID,
    FAMILY_CASES,
    MASK_ID,
    START_HEADER_ID,
    VOCAB_SIZE,
    make_checkpoint,
)
from vllm.diffusion.config import served_model
from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.request.decision import decide
from vllm.diffusion.request.served_model import SpecialIds


def ids_of(path: Path, **engine_args: Any) -> SpecialIds:
    args = EngineArgs(model=str(path), dtype="float32", enforce_eager=True, **engine_args)
    return served_model(args.create_engine_config()).ids


def test_the_configuration_says_which_token_is_the_mask(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="sdar", mask_token_id=START_HEADER_ID)
    assert ids_of(path).mask == START_HEADER_ID


EVERY = sorted({case.family for case in (FAMILY_CASES | BLOCK_CASES).values()} | {"llada"})


@pytest.mark.parametrize("family", EVERY)
def test_else_the_tokenizer_does(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family=family)
    change_json(path, "config.json", mask_token_id=None)
    change_json(path, "tokenizer_config.json", mask_token="<|im_start|>")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert ids_of(path).mask == tokenizer.mask_token_id != MASK_ID
    with pytest.raises(ModelConfigError, match="mask_token_id: given nothing; wanted"):
        ids_of(path, skip_tokenizer_init=True)


@pytest.mark.parametrize("family", EVERY)
def test_the_end_of_sequence_may_be_the_tokenizers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family=family)
    for file in ("config.json", "generation_config.json"):
        change_json(path, file, eos_token_id=None)
    change_json(path, "tokenizer_config.json", eos_token="<|im_start|>")
    assert ids_of(path).eos == AutoTokenizer.from_pretrained(path).eos_token_id


def test_a_mask_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="llada", vocab_size=VOCAB_SIZE)
    change_json(path, "config.json", mask_token_id=None, vocab_size=100, embedding_size=100)
    wanted = f"mask_token_id: given {MASK_ID}; that is the tokenizer's.*below 100"
    with pytest.raises(ModelConfigError, match=wanted):
        ids_of(path)


@pytest.mark.parametrize("family", ["sdar", "fast_dllm"])
def test_else_it_is_known_by_its_name(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family=family)
    change_json(path, "config.json", mask_token_id=None)
    change_json(path, "tokenizer_config.json", mask_token=None)
    assert ids_of(path).mask == MASK_ID


def test_a_checkpoint_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="sdar")
    change_json(path, "config.json", mask_token_id=None)
    with pytest.raises(ModelConfigError, match="mask_token_id"):
        ids_of(path, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ((), None),
        (("<think>",), "<think>"),
        (("</think>",), "</think>"),
        (("<think>", "</think>"), None),
    ],
)
def test_thinking_has_both_of_its_tokens_or_none(
    absent: tuple[str, ...], message: str | None, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family="nemotron")
    text = (path / "tokenizer.json").read_text()
    for name in absent:
        text = text.replace(f'"{name}"', f'"{name[:-1]}er>"')
    (path / "tokenizer.json").write_text(text)
    ids = ids_of(path)
    assert (len(ids.think), ids.no_think) == (0 if absent else 2, message)


def test_answers_end_where_the_generation_configuration_says(tmp_path: Path) -> None:
    """In these families, an end-of-turn token only stops an answer if the file lists it."""
    path = make_checkpoint(tmp_path, family="sdar")
    ids = ids_of(path)
    assert (ids.eos, ids.eot, ids.stop) == (EOS_ID, None, {EOS_ID, EOT_ID})
    change_json(path, "generation_config.json", eos_token_id=EOS_ID)
    assert ids_of(path).stop == {EOS_ID}


def test_llada2_names_them_in_its_other_files(tmp_path: Path) -> None:
    """config.json has neither id. The end of a role only stops an answer if it is listed."""
    path = make_checkpoint(tmp_path, family="llada2")
    ids = ids_of(path)
    assert (ids.mask, ids.eos, ids.eot, ids.stop) == (MASK_ID, EOS_ID, None, {EOS_ID})
    change_json(path, "generation_config.json", eos_token_id=[EOS_ID, EOT_ID])
    assert ids_of(path).stop == {EOS_ID, EOT_ID}


def test_the_end_of_sequence_may_be_the_generation_configurations(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="sdar")
    change_json(path, "config.json", eos_token_id=None)
    ids = ids_of(path)
    assert (ids.eos, ids.stop) == (EOT_ID, {EOT_ID, EOS_ID})


def test_a_penalty_of_the_generation_configuration_does_not_act(tmp_path: Path) -> None:
    """The decoding of model authors ignores it, but an operator may set one on purpose."""
    path = make_checkpoint(tmp_path, family="fast_dllm")
    change_json(path, "generation_config.json", repetition_penalty=1.05, top_p=0.8)
    for override, penalty in (({}, 1.0), ({"repetition_penalty": 1.2}, 1.2)):
        args = EngineArgs(model=str(path), override_generation_config=override)
        config = args.create_engine_config()
        sampling = config.model_config.get_diff_sampling_param()
        assert (sampling["repetition_penalty"], sampling["top_p"]) == (penalty, 0.8)
        model = served_model(config)
        assert model.unused_defaults == (() if override else ("repetition_penalty",))
        parameters = {"repetition_penalty": penalty}
        assert decide(parameters, model, [1]).ignored == model.unused_defaults
        assert decide({"repetition_penalty": 1.3}, model, [1]).ignored == ()


def test_tokens_that_end_a_line(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="sdar")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([".\n", "\nno"])
    tokenizer.save_pretrained(path)
    actual = ids_of(path).line_ends
    vocabulary = tokenizer.get_vocab()
    assert vocabulary[".\n"] in actual
    assert vocabulary["\nno"] not in actual
    texts = {token: tokenizer.decode([token]) for token in vocabulary.values()}
    assert list(actual) == sorted(token for token, text in texts.items() if text.endswith("\n"))
    assert ids_of(path, skip_tokenizer_init=True).line_ends == ()
