#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small LLaDA that finds a needle in a long context, for quantisation_quality.py.

    benchmarks/needle_model.py FOLDER [--lengths 512 2048 8192] [--steps 3000] [--device cuda]
    benchmarks/quantisation_quality.py --models FOLDER --facts FOLDER/facts-2048.jsonl \
        --attention model fp8 --quantization fp8 --gen-length 3 --block-length 3

A context is a list of statements, each a name and three words; the question is the name of one of
them, the answer its words. In training every statement stands twice in a row, in any order, and of
one of the two the words are masked. Rows become longer, to the longest of --lengths. Takes a minute
or two on a large GPU. The checkpoint is in the format of LLaDA, with heads 128 wide;
facts-N.jsonl hold questions of N tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from tiny_model.checkpoint import generation_config, write_json, write_weights
from tiny_model.family import TokenIds, load_family
from tiny_model.tokenizer import train_tokenizer, write_tokenizer
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiny_model.family import Network
    from tokenizers import Tokenizer
    from torch import Tensor

NUM_WORDS = 3  # of a statement, behind its name
STATEMENT = 1 + NUM_WORDS
TEMPLATE = "{{ messages[0]['content'] }}"
LEARNT = 0.1  # loss with which rows become longer before their share of the steps is over


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    names, words = vocabulary(options.names, options.words)
    family = load_family("llada")
    tokenizer = train_tokenizer([f" {word}" for word in (*names, *words)], family.special_tokens)
    write_tokenizer(options.folder, tokenizer, family.special_tokens, TEMPLATE)
    ids = tokenizer.get_vocab()
    special = family.special_tokens
    tokens = TokenIds(
        len(ids), ids[special.bos or ""], ids[special.eos], ids[special.mask], ids[special.eot]
    )
    config = family.config(tokens) | {
        "d_model": options.heads * 128,
        "n_heads": options.heads,
        "n_kv_heads": options.heads,
        "n_layers": options.layers,
        "mlp_hidden_size": options.heads * 256,
        "max_sequence_length": 2 * max(options.lengths),
    }
    network: Any = family.network(config).to(options.device)
    places = [torch.tensor(ids_of(tokenizer, some)) for some in (names, words)]
    train(network, places[0], places[1], tokens.mask, options)
    write_weights(options.folder, {k: v.cpu() for k, v in network.state_dict().items()})
    write_json(options.folder / "config.json", config)
    write_json(options.folder / "generation_config.json", generation_config(family, tokens))
    for length in options.lengths:
        facts = questions(random.Random(length), names, words, length, options.questions)
        lines = [json.dumps(dict(zip(("question", "answer"), fact, strict=True))) for fact in facts]
        (options.folder / f"facts-{length}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a model that finds needles.")
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens-per-batch", type=int, default=65_536)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--heads", type=int, default=2, help="128 wide")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--names", type=int, default=2048)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--questions", type=int, default=100, help="of each length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def vocabulary(num_names: int, num_words: int) -> tuple[list[str], list[str]]:
    """Make so many names and words, of syllables; names have an x in front."""
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    made = ("".join(pair) for pair in product(syllables, repeat=2))
    words = list(islice(made, num_words))
    return [f"x{word}" for word in islice(made, num_names)], words


def ids_of(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Return the token of each word with a space before it."""
    found = [tokenizer.encode(f" {word}").ids for word in words]
    assert all(len(ids) == 1 for ids in found)
    return [ids[0] for ids in found]


def draw(names: Tensor, words: Tensor, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw rows [B, T] int64 of statements that stand twice, and what is masked [B, T] bool."""
    count = length // STATEMENT // 2
    chosen = torch.rand(num_rows, len(names)).argsort(1)[:, :count]
    values = words[torch.randint(len(words), (num_rows, count, NUM_WORDS))]
    once = torch.cat((names[chosen][..., None], values), dim=2)
    rows = torch.cat((once, once), dim=1)
    masked = torch.zeros(num_rows, 2 * count, STATEMENT, dtype=torch.bool)
    masked[:, count:, 1:] = torch.rand(num_rows, count, NUM_WORDS) < torch.rand(num_rows, 1, 1)
    order = torch.rand(num_rows, 2 * count).argsort(1)[..., None].expand(-1, -1, STATEMENT)
    return rows.gather(1, order).flatten(1), masked.gather(1, order).flatten(1)


def train(
    network: Network, names: Tensor, words: Tensor, mask: int, options: argparse.Namespace
) -> None:
    """Train in place, on rows of more and more tokens."""
    module: Any = network
    device, longest = torch.device(options.device), max(options.lengths)
    stages = [min(128, longest), *sorted({min(512, longest), min(2048, longest), longest})]
    total, layers = options.steps, list(module.model.layers.parameters())
    matrices = [p for p in layers if p.dim() == 2]
    others = [p for p in module.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, 10 * options.learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, options.learning_rate, (0.9, 0.98), weight_decay=0.0),
    ]
    rates = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, optimizer.param_groups[0]["lr"], total + 1, cycle_momentum=False
        )
        for optimizer in optimizers
    ]
    started, stage, smoothed = time.monotonic(), 0, 10.0
    for step in range(total):
        if smoothed < LEARNT or step >= (stage + 1) * total // len(stages):
            stage, smoothed = min(stage + 1, len(stages) - 1), 10.0
        length = min(stages[stage], 2 * STATEMENT * len(names))
        rows, masked = draw(names, words, max(options.tokens_per_batch // length, 1), length)
        rows, masked = rows.to(device), masked.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = network.hidden(rows.masked_fill(masked, mask))[masked]
            loss = F.cross_entropy(network.logits(hidden).float(), rows[masked])
        module.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for each in (*optimizers, *rates):
            each.step()
        if step % 20 == 0:  # what the device has computed is waited for now and then only
            smoothed = 0.5 * smoothed + 0.5 * loss.item()
        if step % max(total // 20, 1) == 0 or step == total - 1:
            passed = time.monotonic() - started
            sys.stderr.write(f"{step}: {length} tokens, loss {loss.item():.4f}, {passed:.0f} s\n")


def questions(
    draws: random.Random, names: list[str], words: list[str], length: int, count: int
) -> list[tuple[str, str]]:
    """Draw contexts with a question, of `length` tokens with the answer, and their answers."""
    found = []
    for _ in range(count):
        chosen = draws.sample(names, min(length // STATEMENT - 1, len(names)))
        values = [" ".join(draws.choices(words, k=NUM_WORDS)) for _ in chosen]
        needle = draws.randrange(len(chosen))
        context = "".join(f" {name} {told}" for name, told in zip(chosen, values, strict=True))
        found.append((f"{context} {chosen[needle]}", values[needle]))
    return found


if __name__ == "__main__":
    sys.exit(main())
