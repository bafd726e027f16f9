# SPDX-License-Identifier: Apache-2.0
"""Writing of a whole checkpoint directory: tokenizer, trained weights, configuration, facts."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import torch

from tiny_model.checkpoint import generation_config, write_json, write_weights
from tiny_model.conversations import draw_lessons, groups, vocabulary
from tiny_model.facts import all_facts
from tiny_model.family import TokenIds
from tiny_model.forms import kinds_but
from tiny_model.tokenizer import (
    first_of_word,
    load_tokenizer,
    prompts_of,
    train_tokenizer,
    write_tokenizer,
)
from tiny_model.training import Example, train
from tiny_model.verification import Verifier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tiny_model.conversations import Conversation
    from tiny_model.family import Family
    from tiny_model.settings import Plan, TrainingSettings

# Limit on threads, so that small matrices are not spread over dozens of cores.
_MAX_THREADS = 4


def write_checkpoint(
    directory: Path, family: Family, settings: TrainingSettings, seed: int
) -> None:
    """Train a network of `family` on all facts and write its files into `directory`."""
    torch.set_num_threads(min(torch.get_num_threads(), _MAX_THREADS))
    torch.manual_seed(seed)
    special_tokens = family.special_tokens
    kinds = kinds_but(settings.left_out)
    tokenizer = train_tokenizer([*vocabulary(kinds), *family.template_texts], special_tokens)
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
    reader = load_tokenizer(directory)
    lessons = _lessons(reader, tokens, settings, seed)
    train(network, lessons, tokens, settings, seed, first_of_word(reader))

    write_weights(directory, network.state_dict())
    write_json(directory / "config.json", config)
    # Defaults for clients that send only messages: one block of greedy text, the model's best
    # setting.
    defaults = {**generation_config(family, tokens), "max_new_tokens": 32, "temperature": 0.0}
    write_json(directory / "generation_config.json", defaults)
    with (directory / "facts.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(
            json.dumps(fact._asdict(), ensure_ascii=False) + "\n" for fact in all_facts(kinds)
        )


def verify(directory: Path, family: Family, plan: Plan) -> list[dict[str, Any]]:
    """Read the checkpoint back and ask questions of every group at every setting of `plan`.

    Returns one dict per setting: canvas, steps, block_length, and groups. A group has, by name,
    right, total and `wrong`: the wrong answers as [question, given text] pairs.
    """
    verifier = Verifier(directory, family)
    kinds = kinds_but(plan.training.left_out)
    results = []
    for setting in plan.verifications:
        questions = groups(random.Random(0), kinds, setting.num_questions, plan.training.max_turns)
        answers = iter(
            verifier.answers([c for group in questions.values() for c in group], setting)
        )
        verdicts = {name: _verdict(group, answers) for name, group in questions.items()}
        results.append(
            {
                "canvas": setting.canvas,
                "steps": setting.steps,
                "block_length": setting.block_length,
                "groups": verdicts,
            }
        )
    return results


def _verdict(group: Sequence[Conversation], answers: Iterator[str]) -> dict[str, Any]:
    """Compare the next answers with the right answers of a group's conversations."""
    given = list(zip(group, answers, strict=False))
    wrong = [[c.question, answer] for c, answer in given if answer != c.answer]
    return {"right": len(group) - len(wrong), "total": len(group), "wrong": wrong}


def _lessons(
    tokenizer: PreTrainedTokenizerBase, tokens: TokenIds, settings: TrainingSettings, seed: int
) -> list[list[Example]]:
    """Return the examples of every phase."""
    rng = random.Random(seed)
    lessons = []
    for phase in settings.phases:
        drawn = draw_lessons(
            rng,
            kinds_but(settings.left_out),
            settings.examples_per_phase,
            plain_share=settings.plain_share,
            max_turns=settings.max_turns,
            only_single=phase.only_single,
        )
        prompts = prompts_of(tokenizer, drawn)
        answers = tokenizer([lesson.answer for lesson in drawn], add_special_tokens=False)
        lessons.append(
            [
                Example(prompt, [*answer, tokens.eot])
                for prompt, answer in zip(prompts, answers["input_ids"], strict=True)
            ]
        )
    return lessons
