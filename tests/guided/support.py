# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies, and languages over them."""

from typing import Any

from vllm.diffusion.guided.automaton import build
from vllm.diffusion.guided.language import Ends, Language, over_tokens
from vllm.diffusion.guided.syntax import Node
from vllm.diffusion.guided.vocabulary import Vocabulary

TOKENS: tuple[bytes | None, ...] = (b"a", b"b", b"c", b"ab", b"bc", b"abc", b"1", None, None, None)
EOS, EOT = 8, 9


def language_of(node: Node, tokens: tuple[bytes | None, ...] = TOKENS) -> Language:
    vocabulary = Vocabulary(tokens, len(tokens))
    return over_tokens(build(node), vocabulary, Ends(len(tokens) - 2, (len(tokens) - 1,)))


def bytes_of(token_ids: Any, tokens: tuple[bytes | None, ...] = TOKENS) -> bytes | None:
    """Return the text of an answer, or None if a token follows its end or has no text."""
    ids = list(token_ids)
    eos, eot = len(tokens) - 2, len(tokens) - 1
    ends = [i for i, token in enumerate(ids) if token in (eos, eot)]
    if ends and any(token != eos for token in ids[ends[0] + 1 :]):
        return None
    parts = [tokens[token] for token in (ids[: ends[0]] if ends else ids)]
    return None if None in parts else b"".join(part or b"" for part in parts)
