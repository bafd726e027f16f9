# SPDX-License-Identifier: Apache-2.0
"""What a decoding algorithm wants to know of every masked row (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Purposes of a request's random numbers; each has its own stream.
TOKEN = 0  # Gumbel noise of a token, one per column
REMASKING = 1  # score of random remasking
CATEGORICAL = 2  # draw of a token from its distribution, one per column
COMMIT = 3  # whether a position is committed
CHOICE = 4  # which positions are committed


@dataclass(frozen=True)
class Scoring:
    """How tokens are drawn and scored for one decoding algorithm.

    Attributes:
        score: "confidence" is the probability of the chosen token; "negative_entropy" is
            sum p log(p + epsilon); "margin" the difference of the two largest probabilities.
            Larger is more certain.
        epsilon: added inside the entropy's logarithm.
        draw: "gumbel" adds noise to the logits and scores without temperature (LLaDA);
            "categorical" applies temperature, top-p and top-k first and draws from what is left,
            and scores that (Dream).
        greedy: the argmax of the noise-free logits is wanted too.
    """

    score: Literal["confidence", "negative_entropy", "margin"] = "confidence"
    epsilon: float = 0.0
    draw: Literal["gumbel", "categorical"] = "gumbel"
    greedy: bool = False
