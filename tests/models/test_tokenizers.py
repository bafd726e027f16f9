# SPDX-License-Identifier: Apache-2.0
"""Tokenizers load from their released files, without code of the checkpoint's repository."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase
from vllm.plugins import load_general_plugins
from vllm.tokenizers import get_tokenizer

from tests.checkpoints import (
    BOS_ID,
    EOS_ID,
    EOT_ID,
    MASK_ID,
    START_HEADER_ID,
    make_checkpoint,
    make_tokenizer,
)
from vllm.diffusion.models.tokenizers import DreamTokenizer

TEXT = "Hello there,  world: 12+3\n\nhowever"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(
        tmp_path_factory.mktemp("dream"), family="dream", released_tokenizer_files=True
    )
    assert not (folder / "tokenizer.json").exists()
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["no_remote_code", "remote_code"])
def tokenizer(folder: Path, request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Load the tokenizer as upstream does; the Python files of `auto_map` do not exist."""
    load_general_plugins()
    return get_tokenizer(str(folder), trust_remote_code=request.param)


def test_class_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert isinstance(tokenizer, DreamTokenizer)
    vocabulary = tokenizer.get_vocab()
    assert vocabulary["<|mask|>"] == tokenizer.mask_token_id == MASK_ID
    assert vocabulary["<|endoftext|>"] == tokenizer.eos_token_id == tokenizer.pad_token_id == EOS_ID
    assert vocabulary["<|beginoftext|>"] == tokenizer.bos_token_id == BOS_ID
    assert vocabulary["<|im_end|>"] == EOT_ID
    assert max(vocabulary.values()) == MASK_ID


def test_special_tokens_are_whole_and_text_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(f"<|im_start|>{TEXT}<|im_end|>")
    assert (ids[0], ids[-1]) == (START_HEADER_ID, EOT_ID)
    assert tokenizer.decode(ids[1:-1]) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT


def test_words_are_merged_within_their_borders(tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary = tokenizer.get_vocab()
    space = chr(0x120)  # a space in the byte alphabet
    # "he" is a merge. So is a space before a letter, which has precedence.
    assert tokenizer.encode("he he") == [
        vocabulary["he"],
        vocabulary[f"{space}h"],
        vocabulary["e"],
    ]


def test_text_is_composed_before_it_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    """NFC turns a Kelvin sign into the letter K. Without NFC, its bytes would have no token."""
    assert tokenizer.encode("3 \u212a") == tokenizer.encode("3 K")


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_json_is_read_as_it_is(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family="dream")
    load_general_plugins()
    given = get_tokenizer(str(folder))
    assert given.encode(TEXT) == make_tokenizer("dream").encode(TEXT)
