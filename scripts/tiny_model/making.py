# SPDX-License-Identifier: Apache-2.0
"""Writes a whole checkpoint directory: tokenizer, trained weights, configuration, facts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import torch

from tiny_model.checkpoint import generation_config, write_json, write_weights
from tiny_model.facts import all_facts
from tiny_model.family import TokenIds
from tiny_model.tokenizer import chat_prompt, load_tokenizer, train_tokenizer, write_tokenizer
from tiny_model.training import Example, train
from tiny_model.verification import Verifier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tiny_model.facts import Fact
    from tiny_model.family import Family
    from tiny_model.settings import Plan, TrainingSettings

# Keeps small matrices from being spread over dozens of cores.
_MAX_THREADS = 4


def write_checkpoint(
    directory: Path, family: Family, settings: TrainingSettings, seed: int
) -> None:
    """Trains a network of `family` on all facts and writes its files into `directory`."""
    torch.set_num_threads(min(torch.get_num_threads(), _MAX_THREADS))
    torch.manual_seed(seed)
    facts = all_facts()
    special_tokens = family.special_tokens
    texts = [text for fact in facts for text in (fact.question, fact.answer)]
    tokenizer = train_tokenizer([*texts, *family.template_texts], special_tokens)
    write_tokenizer(directory, tokenizer, special_tokens, family.chat_template)

    token_id = tokenizer.get_vocab()
    tokens = TokenIds(
        vocab_size=len(token_id),
        bos=None if special_tokens.bos is None else token_id[special_tokens.bos],
        eos=token_id[special_tokens.eos],
        mask=token_id[special_tokens.mask],
        eot=token_id[special_tokens.eot],
    )
    config = family.config(tokens)
    network = family.network(config)
    train(network, _examples(facts, load_tokenizer(directory), tokens), tokens, settings, seed)

    write_weights(directory, network.state_dict())
    write_json(directory / "config.json", config)
    # Clients that send messages only get one block of greedy text, which the model is good at.
    defaults = {**generation_config(family, tokens), "max_new_tokens": 32, "temperature": 0.0}
    write_json(directory / "generation_config.json", defaults)
    with (directory / "facts.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(fact._asdict(), ensure_ascii=False) + "\n" for fact in facts)


def verify(directory: Path, family: Family, plan: Plan) -> list[dict[str, Any]]:
    """Reads the checkpoint back and answers all facts at every setting of `plan`.

    Returns one dict a setting: canvas, steps, block_length, right, total, and `wrong`, the wrong
    answers as [question, given text] pairs.
    """
    facts = all_facts()
    verifier = Verifier(directory, family)
    results = []
    for setting in plan.verifications:
        wrong = verifier.wrong_answers(facts, setting)
        results.append(
            {
                "canvas": setting.canvas,
                "steps": setting.steps,
                "block_length": setting.block_length,
                "right": len(facts) - len(wrong),
                "total": len(facts),
                "wrong": [[fact.question, given] for fact, given in wrong],
            }
        )
    return results


def _examples(
    facts: Sequence[Fact], tokenizer: PreTrainedTokenizerBase, tokens: TokenIds
) -> list[Example]:
    def encode(text: str) -> list[int]:
        return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))

    return [
        Example(
            kind=fact.kind,
            chat_prompt=chat_prompt(tokenizer, fact.question),
            raw_prompt=encode(fact.question),
            answer=[*encode(fact.answer), tokens.eot],
        )
        for fact in facts
    ]
