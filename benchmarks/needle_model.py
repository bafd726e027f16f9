#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small LLaDA that finds needles in a long context, for quantisation_quality.py.

    benchmarks/needle_model.py FOLDER [--lengths 512 2048 8192] [--steps 3000] [--device cuda]
    benchmarks/quantisation_quality.py --models FOLDER --facts FOLDER/facts-2048.jsonl \
        --attention model fp8 --quantization fp8 --gen-length 3 --block-length 3

A context consists of words without meaning, and contains one word of each of many kinds: the
needles. The question names three kinds, and the answer is the words of these kinds in the context.
In training several questions follow a context, with their answers masked. Rows become longer, up to
the longest of --lengths. The training takes a minute or two on a large GPU. The checkpoint is in
the format of LLaDA, with heads 128 wide; facts-N.jsonl hold questions of N tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import count, islice, product, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

ASKED = 3  # kinds per question
# Tokens of the first rows, and tokens of a row per question that follows it
SHORTEST, ROOM = 32, 32
TEMPLATE = "{{ messages[0]['content'] }}"
LEARNT = 0.1  # loss at which rows become longer before their share of the steps has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    sizes = options.kinds, options.kinds * options.needles, options.others
    words = vocabulary(*sizes)
    family = load_family("llada")
    tokenizer = train_tokenizer([f" {word}" for word in words], family.special_tokens)
    special, longest = family.special_tokens, max(options.lengths)
    write_tokenizer(options.folder, tokenizer, special, TEMPLATE, max_length=longest)
    ids = tokenizer.get_vocab()
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
    kinds, needles, others = torch.tensor(ids_of(tokenizer, words)).split(sizes)
    drawn = Drawn(kinds, needles.view(len(kinds), -1), others)
    train(network, drawn, tokens.mask, options)
    write_weights(options.folder, {k: v.cpu() for k, v in network.state_dict().items()})
    write_json(options.folder / "config.json", config)
    write_json(options.folder / "generation_config.json", generation_config(family, tokens))
    for length in options.lengths:
        torch.manual_seed(length)
        rows, masked = drawn.rows(options.questions, length, num_questions=1)
        lines = [
            json.dumps(fact(tokenizer, row, is_answer))
            for row, is_answer in zip(rows, masked, strict=True)
        ]
        (options.folder / f"facts-{length}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a model that finds needles.")
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens-per-batch", type=int, default=65_536)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--heads", type=int, default=2, help="number of heads, each 128 wide")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--kinds", type=int, default=64)
    parser.add_argument("--needles", type=int, default=16, help="needles of each kind")
    parser.add_argument("--others", type=int, default=256, help="number of words without meaning")
    parser.add_argument("--questions", type=int, default=100, help="questions of each length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.kinds < ASKED:
        parser.error(f"--kinds: given {options.kinds}; wanted at least {ASKED}")
    if min(options.lengths) < 4 * ASKED:
        parser.error(f"--lengths: given {min(options.lengths)}; wanted at least {4 * ASKED}")
    return options


def vocabulary(num_kinds: int, num_needles: int, num_others: int) -> list[str]:
    """Make names of kinds, then needles and other words, all of syllables.

    Names of kinds begin with an x.
    """
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    made = ("".join(pair) for pair in product(syllables, repeat=2))
    kinds = [f"x{word}" for word in islice(made, num_kinds)]
    return [*kinds, *islice(made, num_needles + num_others)]


def ids_of(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Return the token of each word with a space before it."""
    encoded = [tokenizer.encode(f" {word}").ids for word in words]
    assert all(len(ids) == 1 for ids in encoded)
    return [ids[0] for ids in encoded]


class Drawn(NamedTuple):
    """Tokens that rows are drawn from.

    Attributes:
        kinds: [K] int64, names of the kinds.
        needles: [K, N] int64, words of each kind.
        others: [M] int64, words without meaning.
    """

    kinds: Tensor
    needles: Tensor
    others: Tensor

    def rows(self, num_rows: int, length: int, num_questions: int) -> tuple[Tensor, Tensor]:
        """Draw rows [B, T] int64, and a mask [B, T] bool of the tokens that answer a question."""
        width = length - 2 * ASKED * num_questions
        num_found = max(min(len(self.kinds), width // 2), ASKED * num_questions)
        chosen = torch.rand(num_rows, len(self.kinds)).argsort(1)[:, :num_found]
        needles = self.needles[chosen, torch.randint(self.needles.shape[1], chosen.shape)]
        context = self.others[torch.randint(len(self.others), (num_rows, width))]
        context.scatter_(1, torch.rand(num_rows, width).argsort(1)[:, :num_found], needles)
        kinds_asked = [
            part[:, : ASKED * num_questions].view(num_rows, num_questions, ASKED)
            for part in (self.kinds[chosen], needles)
        ]
        masked = torch.zeros(num_rows, length, dtype=torch.bool)
        masked[:, width:].view(num_rows, num_questions, 2 * ASKED)[..., ASKED:] = True
        return torch.cat((context, torch.cat(kinds_asked, dim=2).flatten(1)), dim=1), masked


def fact(tokenizer: Tokenizer, row: Tensor, is_answer: Tensor) -> dict[str, str]:
    """Return a row with one question as text."""
    question, answer = (tokenizer.decode(row[part].tolist()) for part in (~is_answer, is_answer))
    return {"question": question, "answer": answer.strip()}


def train(network: Network, drawn: Drawn, mask: int, options: argparse.Namespace) -> None:
    """Train in place, on rows of increasing length."""
    module: Any = network
    device, longest, total = torch.device(options.device), max(options.lengths), options.steps
    doubled = (SHORTEST << i for i in count())
    lengths = [*takewhile(lambda length: length < longest, doubled), longest]
    optimizer = torch.optim.AdamW(
        module.parameters(), options.learning_rate, (0.9, 0.98), weight_decay=0.0
    )
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total + 1, cycle_momentum=False
    )
    started, stage, smoothed = time.monotonic(), 0, 10.0
    for step in range(total):
        if smoothed < LEARNT or step >= (stage + 1) * total // len(lengths):
            stage, smoothed = min(stage + 1, len(lengths) - 1), 10.0
        length = lengths[stage]
        num_questions = min(max(length // ROOM, 1), len(drawn.kinds) // ASKED)
        num_rows = max(options.tokens_per_batch // length, 1)
        rows, masked = (x.to(device) for x in drawn.rows(num_rows, length, num_questions))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = network.hidden(rows.masked_fill(masked, mask))[masked]
            loss = F.cross_entropy(network.logits(hidden).float(), rows[masked])
        module.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        rate.step()
        # Reading the loss waits for the device, so read it only from time to time.
        if step % 10 == 0:
            smoothed = 0.5 * smoothed + 0.5 * loss.item()
        if step % max(total // 20, 1) == 0 or step == total - 1:
            passed = time.monotonic() - started
            sys.stderr.write(f"{step}: {length} tokens, loss {loss.item():.4f}, {passed:.0f} s\n")


if __name__ == "__main__":
    sys.exit(main())
