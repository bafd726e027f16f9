# SPDX-License-Identifier: Apache-2.0
"""How a decoding algorithm samples from the logits of sample rows, and scores the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class CandidateScoring:
    """Sampling and scoring of tokens for one decoding algorithm.

    Attributes:
        score: "confidence" is the probability of the chosen token; "negative_entropy" is
            sum p log(p + epsilon); "margin" is the difference of the two largest probabilities.
            Larger is more certain.
        epsilon: added inside the entropy's logarithm.
        draw: "gumbel" adds noise to the logits and scores without temperature (LLaDA);
            "categorical" applies temperature, top-p and top-k first, then samples from the
            remaining distribution and scores it (Dream); "filtered" applies temperature, top-k and
            top-p, in this order, and none of them at temperature 0 (block-causal families).
        scores_all: with "filtered", whether scores use the distribution before top-k and top-p.
        greedy: whether the argmax of the noise-free logits is required, too.
        adjusts_first: whether log probabilities are computed from the logits that the rule has
            changed. Such a rule also applies top-k, top-p and min-p itself.
    """

    score: Literal["confidence", "negative_entropy", "margin"] = "confidence"
    epsilon: float = 0.0
    draw: Literal["gumbel", "categorical", "filtered"] = "gumbel"
    scores_all: bool = False
    greedy: bool = False
    adjusts_first: bool = False

    @cached_property
    def is_categorical(self) -> bool:
        """Whether tokens are sampled from an explicit distribution."""
        return self.draw != "gumbel"


class ScoredTokens(NamedTuple):
    """Log probabilities of R rows for a likelihood request: the extras of `Samples`.

    Attributes:
        named: [k, R], of the tokens that the request names for each row.
        top: [n, R], of the n most likely tokens of each row, the most likely first.
        top_tokens: [n, R], these tokens.
    """

    named: NDArray[Any]
    top: NDArray[Any]
    top_tokens: NDArray[Any]

    @classmethod
    def unpack(cls, rows: NDArray[Any], num_named: int, num_top: int) -> ScoredTokens:
        """Split packed rows into their parts; further rows are ignored."""
        end = num_named + num_top
        return cls(rows[:num_named], rows[num_named:end], rows[end : end + num_top])
