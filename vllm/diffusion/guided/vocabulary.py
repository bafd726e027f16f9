# SPDX-License-Identifier: Apache-2.0
"""Bytes of a tokenizer's tokens, and their trie."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.diffusion.guided.automaton import Array

_SPACE = "\u2581"  # SentencePiece's notation of a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLE = '{"a": [1, 2.5]} The fox'


class VocabularyError(ValueError):
    """The bytes of a tokenizer's tokens cannot be determined; the message has the reason."""


class Level(NamedTuple):
    """Nodes of a trie at equal depth.

    Attributes:
        parents: [N] int64, numbers of their parents in the previous level.
        bytes: [N] uint8, the byte on the edge from the parent.
        end_nodes: [E] int64, nodes of this level where tokens end.
        end_tokens: [E] int64, the tokens that end there.
    """

    parents: Array
    bytes: Array
    end_nodes: Array
    end_tokens: Array


class Vocabulary:
    """Text tokens of a tokenizer.

    Args:
        tokens: bytes of every token id; None for tokens that are not text.
        num_columns: columns of the model's logits; columns after the tokens have no text.
    """

    def __init__(self, tokens: Sequence[bytes | None], num_columns: int) -> None:
        self.tokens = tuple(tokens)
        self.num_columns = num_columns

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Trie of the tokens, level by level from the first byte."""
        return tuple(self._levels())

    def _levels(self) -> Iterator[Level]:
        ids = np.array([i for i, data in enumerate(self.tokens) if data], dtype=np.int64)
        lengths = np.array([len(self.tokens[i] or b"") for i in ids], dtype=np.int64)
        data = np.frombuffer(b"".join(self.tokens[i] or b"" for i in ids), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        nodes, depth = np.zeros(len(ids), dtype=np.int64), 0
        while len(ids):
            keys = nodes * 256 + data[starts + depth]
            distinct, nodes = np.unique(keys, return_inverse=True)
            depth += 1
            ends = lengths == depth
            yield Level(distinct // 256, (distinct % 256).astype(np.uint8), nodes[ends], ids[ends])
            nodes, ids, starts, lengths = (x[~ends] for x in (nodes, ids, starts, lengths))


def vocabulary_of(tokenizer: Any, num_columns: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer of transformers; special and added tokens are not text.

    Raises:
        VocabularyError: the notation of its tokens is unknown.
    """
    spelled: Mapping[str, int] = tokenizer.get_vocab()
    out = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    undo = _spelling(tokenizer)
    tokens: list[bytes | None] = [None] * num_columns
    for token, index in spelled.items():
        if index < num_columns and index not in out:
            tokens[index] = undo(token)
    vocabulary = Vocabulary(tokens, num_columns)
    _check(tokenizer, vocabulary)
    return vocabulary


def _spelling(tokenizer: Any) -> Any:
    """Return the function from a token's name to its bytes that fits the tokenizer's decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        raise VocabularyError(f"a tokenizer of class {type(tokenizer).__name__} has no decoder")
    kinds = set(re.findall(r'"type":\s*"(\w+)"', json.dumps(json.loads(decoder.__getstate__()))))
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _sentence_piece
    raise VocabularyError(f"its decoder is {', '.join(sorted(kinds))}; wanted bytes")


def _symbols() -> dict[str, int]:
    """Map characters of byte-level BPE to bytes; unprintable bytes have characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {chr(byte): byte for byte in plain}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _symbols()


def _byte_level(token: str) -> bytes | None:
    try:
        return bytes(_BYTES[symbol] for symbol in token)
    except KeyError:
        return None


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _check(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Check that the tokens of a text have its bytes, except for a space prepended to it."""
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    written = b"".join(vocabulary.tokens[i] or b"" for i in ids)
    if written.removeprefix(b" ") != _SAMPLE.encode():
        raise VocabularyError(f"its tokens of {_SAMPLE!r} are {written!r}")
