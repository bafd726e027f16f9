# SPDX-License-Identifier: Apache-2.0
"""The fewest tokens of a text change so that it becomes a string of a language."""

import itertools
import random
import re

import numpy as np
import pytest

from tests.guided.support import TOKENS, bytes_of, language_of
from vllm.diffusion.guided.open_window import FREE
from vllm.diffusion.guided.regex import regex
from vllm.diffusion.guided.repair import NoStringError, fewest_changes

PATTERNS = ["(a|bc)*1?", "[abc]{2,4}", "ab+c?|1+", "(abc|cab)1*", "a(b|c){0,3}"]
LENGTH = 4
MASK = -1


def strings(pattern: str, length: int) -> list[tuple[int, ...]]:
    """Return all sequences of `length` tokens whose text matches."""
    sequences = itertools.product(range(len(TOKENS)), repeat=length)
    texts = ((ids, bytes_of(ids)) for ids in sequences)
    return [ids for ids, text in texts if text is not None and re.fullmatch(pattern, text.decode())]


def differ(text: list[int], ids: tuple[int, ...]) -> list[int]:
    return [at for at, token in enumerate(text) if token not in (MASK, ids[at])]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("left", [0, 1])
def test_against_all_strings(pattern: str, left: int) -> None:
    language, rng = language_of(regex(pattern)), random.Random(3)
    everything = strings(pattern, LENGTH + left)
    for _ in range(100):
        text = [rng.choice([*range(len(TOKENS)), MASK]) for _ in range(LENGTH)]
        kinds = np.array([FREE if t == MASK else language.class_of_token[t] for t in text])
        can_change = np.array([token == MASK or rng.random() < 0.8 for token in text])
        fitting = [ids for ids in everything if can_change[differ(text, ids)].all()]
        if not fitting:
            with pytest.raises(NoStringError) as error:
                fewest_changes(language, kinds, can_change, left)
            upto = error.value.position + 1
            some = [ids for ids in everything if can_change[differ(text[:upto], ids)].all()]
            assert not some or upto == LENGTH
            continue
        changed = fewest_changes(language, kinds, can_change, left).tolist()
        assert len(changed) == min(len(differ(text, ids)) for ids in fitting)
        assert any(set(differ(text, ids)) <= set(changed) for ids in fitting)
        assert can_change[changed].all()


def test_a_text_of_the_language_stays() -> None:
    language = language_of(regex("ab+c?|1+"))
    for ids in strings("ab+c?|1+", LENGTH):
        kinds = language.class_of_token[list(ids)]
        assert not len(fewest_changes(language, kinds, np.ones(LENGTH, dtype=bool), 0))
