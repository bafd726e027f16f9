# SPDX-License-Identifier: Apache-2.0
"""What a request changes of the logits of its candidates, whatever its algorithm.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edits:
    """Changes of logits, in the order in which they are made; the defaults change nothing.

    Attributes:
        allowed_token_ids: no other token is proposed; empty for all tokens.
        bad_words: token ids that must not follow each other in the answer.
        min_tokens: the first so many tokens of the answer are none of `end_ids`.
        end_ids: ids that end an answer.
        logit_bias: pairs of a token id and what is added to its logit.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            stand in the prompt or in what is committed of the answer.
        frequency_penalty: taken from a token's logit for each time that it stands in the answer.
        presence_penalty: taken from the logit of every token that stands in the answer.
    """

    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def never(self) -> tuple[int, ...]:
        """Tokens that are bad words by themselves."""
        return tuple(word[0] for word in self.bad_words if len(word) == 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether a logit depends on the tokens that stand there already."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
