# SPDX-License-Identifier: Apache-2.0
"""The effect of a request's fields on logits and on a distribution, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch


def edited(
    logits: torch.Tensor,
    row: Sequence[int],
    prompt_length: int,
    parameters: dict[str, Any],
    mask: int,
    ends: Collection[int],
    words: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """Return logits [N, V] of the canvas positions of a row after a request's edits.

    `ends` are the ids that end an answer, and `words` are the token ids of bad words.
    """
    prompt, canvas = row[:prompt_length], row[prompt_length:]
    counts = Counter(token for token in canvas if token != mask)
    if not parameters.get("ignore_eos"):
        for end in ends:
            counts.pop(end, None)
    repetition = parameters.get("repetition_penalty", 1.0)
    shaped = logits.float().clone()
    for position, own in enumerate(shaped):
        if "allowed_token_ids" in parameters:
            for token in set(range(len(own))) - set(parameters["allowed_token_ids"]):
                own[token] = -math.inf
        for word in words:
            for place, token in enumerate(word):
                first = position - place
                there = list(canvas[max(first, 0) : first + len(word)])
                if first >= 0 and len(there) == len(word):
                    there[place] = token
                    if there == list(word):
                        own[token] = -math.inf
        if position < parameters.get("min_tokens", 0):
            for token in ends:
                own[token] = -math.inf
        for token, bias in parameters.get("logit_bias", {}).items():
            own[int(token)] += bias
        for token in {*prompt, *counts} - {mask}:
            own[token] = own[token] / repetition if own[token] > 0 else own[token] * repetition
        for token, count in counts.items():
            own[token] -= parameters.get("frequency_penalty", 0.0) * count
            own[token] -= parameters.get("presence_penalty", 0.0)
    return shaped


def filtered(probabilities: Sequence[float], parameters: dict[str, Any], order: str) -> list[float]:
    """Return the distribution of draws, given the distribution at the temperature.

    `order` is "top_k top_p" (top_p applies to the tokens that top_k leaves) or "top_p top_k" (to
    all).
    """
    left = list(probabilities)
    best = max(left)
    left = [p if p >= parameters.get("min_p", 0.0) * best else 0.0 for p in left]
    for name in order.split():
        ranked = sorted(left, reverse=True)
        if name == "top_k" and parameters.get("top_k"):
            least = ranked[min(parameters["top_k"], len(ranked)) - 1]
            left = [p if p >= least else 0.0 for p in left]
        if name == "top_p" and "top_p" in parameters:
            limit = parameters["top_p"] * sum(left)
            left = [p if sum(q for q in left if q > p) < limit else 0.0 for p in left]
    return [p / sum(left) for p in left]
