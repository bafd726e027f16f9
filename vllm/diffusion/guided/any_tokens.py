# SPDX-License-Identifier: Apache-2.0
"""Joint choices in a language of all strings, which compile all kernels that later choices need."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.samples import Samples
from vllm.diffusion.guided.joint import Joint, choose_all, gather, read_all
from vllm.diffusion.guided.language import Language
from vllm.diffusion.guided.open_window import OPEN, OpenWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROWS = 2
# Kernels are specialised by the number of a state's edges, rounded up to a power of two.
_EDGES = (16, 32, 64)


def kernel_calls(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Yield joint choices, each of which compiles kernels that the others do not.

    Args:
        vocab_size: columns of whole rows of logits.
        dtype: dtype of the logits; edited logits are fp32.
        device: device of the logits.
    """
    for temperature in (0.0, 1.0):
        for kind, edges in ((dtype, _EDGES), (torch.float32, _EDGES[:1])):
            for num_edges in edges:
                language = language_of(vocab_size, num_edges)
                yield functools.partial(_choose, language, temperature, kind, device)


def language_of(vocab_size: int, num_edges: int) -> Language:
    """Return the language of all strings, which the last token ends.

    Args:
        vocab_size: number of tokens.
        num_edges: edges of every state, most of which are unused.
    """
    of_token = np.zeros(vocab_size, dtype=np.int16)
    of_token[-1] = 1
    edges = np.full((2, num_edges), 2, dtype=np.int32)
    targets = np.zeros((2, num_edges), dtype=np.int32)
    edges[0, :2], targets[0, :2] = (0, 1), (0, 1)
    starts, members = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int16)
    return Language(of_token, starts, members, edges, targets, np.zeros(2, dtype=np.int32))


def _choose(
    language: Language, temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Choose for rows of zeros."""
    window = OpenWindow(0, 0, np.full(_ROWS, OPEN, dtype=np.int32), 0)
    joint = Joint(language, window, temperature, 0, 0, is_tempered=False, sets_scores=True)
    gather([joint], [_ROWS])
    logits = torch.zeros(_ROWS, len(language.class_of_token), dtype=dtype, device=device)
    positions = torch.arange(_ROWS, device=device)
    read_all(logits, [(joint, slice(0, _ROWS), positions)])
    choose_all(Samples(torch.zeros(3, _ROWS, dtype=torch.float64, device=device)), [joint])
