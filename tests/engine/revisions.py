# SPDX-License-Identifier: Apache-2.0
"""Random limits of revised texts, and checks of their answers."""

import random
from collections.abc import Sequence
from typing import Any

from tests.checkpoints import MASK_ID
from tests.engine.harness import Response


def drawn_limits(rng: random.Random, length: int) -> dict[str, Any]:
    """Return random fields of a revision whose text has `length` tokens."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.6:
        fields["noise"] = rng.choice([0, 0.2, 0.5, 1])
    if rng.random() < 0.5:
        fields["edit_threshold"] = rng.choice([0, 0.003, 0.1, 1])
    if rng.random() < 0.5:
        fields["max_edits"] = rng.randint(0, 6)
    if rng.random() < 0.6:
        starts = [rng.randrange(length) for _ in range(rng.randint(1, 3))]
        fields["pinned"] = [[at, rng.randint(at + 1, length)] for at in starts]
    if rng.random() < 0.4:
        fields["edit_rounds"] = rng.randint(2, 4)
    if rng.random() < 0.3:
        fields["complete_blocks"] = True
    if rng.random() < 0.3:
        fields["return_trajectory"] = True
    return fields


def changed_positions(text: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """Return the positions at which an answer has another token than a text; masks do not count."""
    pairs = zip(text, token_ids, strict=False)
    return [at for at, (old, new) in enumerate(pairs) if old not in (MASK_ID, new)]


def assert_recorded(trajectory: Any, text: list[int], answer: Response) -> None:
    """Check that a token that never changed has step 0, and every other token a later one."""
    tokens, steps = trajectory["token_ids"], trajectory["commit_steps"]
    assert tokens[: len(answer.token_ids)] == answer.token_ids
    assert trajectory["num_steps"] == answer.num_steps
    for old, new, step in zip(text, tokens, steps, strict=False):
        assert step > 0 or (step == 0 and old == new) or new == MASK_ID
