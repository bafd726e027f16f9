# SPDX-License-Identifier: Apache-2.0
"""Edits of a request's logits, which apply to any algorithm, and the decision about them.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.request.request import Request
    from vllm.diffusion.request.served_model import ServedModel

# Maximum number of token sequences. Each is compared at every masked position.
MAX_BAD_WORDS = 256
# Maximum letters of all bad words together, which bounds the time to tokenise them.
MAX_BAD_LETTERS = 32768
# Number of word lists whose token ids are cached, because a body with many prompts has one list.
MAX_CACHED_WORD_LISTS = 64


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


def edits_of(request: Request) -> Edits | None:
    """Return the edits of logits that a request asks for, or None if there are none.

    Raises:
        InvalidParameterError: naming the field, the given and the expected value.
    """
    values, model, revision = request.values, request.model, request.revision
    min_tokens, max_tokens = values["min_tokens"], request.lengths.max_tokens
    # A revised text keeps its length, unless no token ends an answer or its length may change.
    changes_length = request.algorithm.edits_length or values["slack"] > 0
    keeps_length = not (values["ignore_eos"] or changes_length)
    if revision is not None and keeps_length:
        min_tokens = max(min_tokens, revision.num_before_end(request.end_ids))
    if min_tokens > max_tokens:
        wanted = f"wanted at most max_tokens, {max_tokens}"
        raise InvalidParameterError("min_tokens", min_tokens, wanted)
    repetition = values["repetition_penalty"]
    if repetition <= 0:
        raise InvalidParameterError("repetition_penalty", repetition, "wanted a number above 0")
    bias = values["logit_bias"] or {}
    _check_ids("logit_bias", bias, model.vocab_size)
    edits = Edits(
        allowed_token_ids=_allowed(values["allowed_token_ids"] or (), model),
        bad_words=_bad_words(values["bad_words"] or (), model, request.num_tokens),
        min_tokens=min_tokens,
        end_ids=tuple(sorted(request.end_ids)) if min_tokens else (),
        logit_bias=tuple(sorted((token, value) for token, value in bias.items() if value)),
        repetition_penalty=repetition,
        frequency_penalty=values["frequency_penalty"],
        presence_penalty=values["presence_penalty"],
    )
    allowed = set(edits.allowed_token_ids)
    if allowed and allowed <= {*edits.never, *edits.end_ids}:
        wanted = "wanted a token that neither bad_words nor min_tokens excludes"
        raise InvalidParameterError("allowed_token_ids", sorted(allowed), wanted)
    return None if edits == Edits() else edits


def _allowed(given: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Return the allowed ids, ascending, without the mask token, which no answer contains."""
    _check_ids("allowed_token_ids", given, model.vocab_size)
    allowed = tuple(sorted(set(given) - {model.ids.mask}))
    if given and not allowed:
        wanted = "wanted other token ids than the mask token's"
        raise InvalidParameterError("allowed_token_ids", list(given), wanted)
    return allowed


def _bad_words(
    words: Sequence[str], model: ServedModel, num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words, both at the beginning of a text and after a space.

    Words of more than `num_tokens` tokens, and words of several tokens with the mask token, are
    left out, because no answer contains them.
    """
    if not words:
        return ()
    if model.encode is None:
        raise InvalidParameterError("bad_words", list(words), "wanted a server with a tokenizer")
    limit, num_letters = f"wanted at most {MAX_BAD_WORDS} words", sum(map(len, words))
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameterError("bad_words", list(words), f"{limit}, got {len(words)}")
    if num_letters > MAX_BAD_LETTERS:
        wanted = f"{limit} of {MAX_BAD_LETTERS} letters together, got {num_letters}"
        raise InvalidParameterError("bad_words", list(words), wanted)
    sequences = _spelled(tuple(words), model.encode)
    _check_ids("bad_words", [token for ids in sequences for token in ids], model.vocab_size)
    if len(sequences) > MAX_BAD_WORDS:
        wanted = f"wanted words of at most {MAX_BAD_WORDS} sequences of token ids"
        raise InvalidParameterError("bad_words", list(words), f"{wanted}, got {len(sequences)}")
    if model.family.is_open and any(len(ids) > 1 for ids in sequences):
        # Neighbours of a position are noise until the whole canvas is finished.
        raise InvalidParameterError("bad_words", list(words), "wanted words of one token each")
    mask = model.ids.mask
    return tuple(
        ids for ids in sequences if len(ids) <= num_tokens and (len(ids) == 1 or mask not in ids)
    )


@lru_cache(maxsize=MAX_CACHED_WORD_LISTS)
def _spelled(
    words: tuple[str, ...], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the distinct sequences of token ids of words."""
    return tuple(dict.fromkeys(ids for word in words for ids in _spellings(word, encode)))


def _spellings(word: str, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the token ids of a word, and those after a space if only the first token differs."""
    alone, spaced = (tuple(encode(space + word.lstrip())) for space in ("", " "))
    if not alone:
        raise InvalidParameterError("bad_words", word, "wanted words of at least one token")
    is_other = bool(spaced) and len(spaced) == len(alone) and spaced[0] != alone[0]
    return [alone, spaced] if is_other else [alone]


def _check_ids(name: str, ids: Sequence[int] | Mapping[int, Any], vocab_size: int) -> None:
    outside = sorted(token for token in ids if not 0 <= token < vocab_size)
    if outside:
        wanted = f"wanted token ids from 0 to {vocab_size - 1}"
        raise InvalidParameterError(name, outside, wanted)
