# SPDX-License-Identifier: Apache-2.0
"""Requests of many kinds, and checks that an answer has the same bits next to other requests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.engine.harness import DETERMINISTIC, Engine, Request, Response

INVARIANT: dict[str, Any] = {"dllm": {**DETERMINISTIC["dllm"], "batch_invariant": True}}
CACHES = {"dream": ("none", "frozen")}
ALGORITHMS = ("semi_ar", "semi_ar", "threshold", "factor", "hierarchy", "local_leap", "credit")
BLOCK_FAMILIES = ("sdar", "llada2", "nemotron")


def requests(
    count: int, vocabulary: range, *, most_prompt: int, seed: int = 0, family: str = "llada"
) -> list[Request]:
    """Draw requests with prompts and parameters of many kinds."""
    caches = CACHES.get(family, ("none", "dual", "prefix", "frozen"))
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = draw.choices(vocabulary, k=draw.randint(1, most_prompt))
        gen_length = draw.choice((32, 64) if family in BLOCK_FAMILIES else (16, 32))
        extra: dict[str, Any] = {
            "gen_length": gen_length,
            "return_trajectory": True,
            "seed": number,
            "ignore_eos": True,
        }
        if family not in BLOCK_FAMILIES:
            extra["cache"] = caches[number % len(caches)]
        if family == "dream":
            extra["steps"] = draw.choice((8, 16))
        elif family not in BLOCK_FAMILIES:
            extra |= {"block_length": draw.choice((8, 16)), "algorithm": draw.choice(ALGORITHMS)}
            extra |= {"steps": draw.choice((8, 16))} if extra["algorithm"] == "semi_ar" else {}
            if extra["cache"] == "none" and draw.random() < 0.3:
                extra["cfg_scale"] = 1.5
        extra |= draw.choice(({}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}))
        sampling = draw.choice(({}, {}, {"repetition_penalty": 1.2}))
        made.append(Request(prompt, extra, sampling))
    return made


def bits(answer: Response) -> tuple[Any, ...]:
    """Return everything about an answer that rounding can change."""
    trajectory = answer.report["trajectory"]
    return tuple(tuple(trajectory[name]) for name in ("token_ids", "commit_steps", "logprobs"))


def check_beside(
    engine: Engine, asks: Sequence[Request], others: Sequence[Request], counts: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Check that each request's bits are the same alone and next to other requests; return them."""
    alone = [bits(engine.ask(ask)[0]) for ask in asks]
    for count in counts:
        group = max(1, min(len(asks), count + 1))
        for start in range(0, len(asks), group):
            some = asks[start : start + group]
            beside = [*others[: count + 1 - len(some)], *some]
            random.Random(start).shuffle(beside)
            answers = engine.ask(*beside)
            for number, ask in enumerate(some, start):
                assert bits(answers[beside.index(ask)]) == alone[number], (count, number)
    return alone


def check_drafts(engine: Engine, asks: Sequence[Request], alone: Sequence[tuple[Any, ...]]) -> None:
    """Check that drafts change no bit of the requests whose algorithm uses them."""
    for ask, wanted in zip(asks, alone, strict=True):
        if ask.extra.get("algorithm", "semi_ar") == "semi_ar":
            drafting = replace(ask, extra={**ask.extra, "num_speculative_states": 5})
            assert bits(engine.ask(drafting)[0]) == wanted
