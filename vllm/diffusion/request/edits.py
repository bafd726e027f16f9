# SPDX-License-Identifier: Apache-2.0
"""Edits of a request's logits, which apply to any algorithm.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edits:
    """Edits of logits, in the order in which they are applied; the defaults change nothing.

    Attributes:
        allowed_token_ids: the only tokens that may be proposed; empty allows all tokens.
        bad_words: sequences of token ids that must not appear in the answer.
        min_tokens: the first `min_tokens` tokens of the answer are none of `end_ids`.
        end_ids: ids that end an answer.
        logit_bias: pairs of a token id and the number added to its logit.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the
            prompt and of committed tokens of the answer.
        frequency_penalty: subtracted from a token's logit for each occurrence in the answer.
        presence_penalty: subtracted from the logit of every token that occurs in the answer.
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
        """Whether logits depend on the tokens that prompt and answer already contain."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
