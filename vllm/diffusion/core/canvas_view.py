# SPDX-License-Identifier: Apache-2.0
"""The canvas of a request after a forward, for clients that watch it being denoised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CanvasView:
    """The canvas of N positions after a forward; packed, as it crosses processes in every step.

    Attributes:
        step: number of the step, from 1.
        token_ids: N int32, little-endian: the committed token, else the latest proposal, else the
            mask token.
        committed: N bytes, 1 where the token is committed.
        confidence: N fp32, little-endian: the model's probability of the token in the forward that
            proposed it; NaN if no forward has proposed it.
        guessed: N bytes, 1 where an accepted draft committed the token; None for requests without
            drafts.
        entropies: N fp32, little-endian: entropy of each position's distribution, in nats; None for
            models with a mask token.
    """

    step: int
    token_ids: bytes
    committed: bytes
    confidence: bytes
    guessed: bytes | None = None
    entropies: bytes | None = None
