# SPDX-License-Identifier: Apache-2.0
"""AdaBlock (arXiv:2509.26432): blocks that end after a delimiter, with Fast-dLLM's threshold.

A whole forward pass at the start of a block determines its length and commits like every other one.
With a cache, the later forward passes are windows, as in `fast_dllm`.

Deviations from the published code for Dream: candidates are drawn and scored as for LLaDA, the
forward pass that sizes a block commits the same tokens with and without a cache, and a window
starts one token early.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

from reference.decode import (
    CONFIDENCE,
    Candidates,
    Decoded,
    LogitModel,
    Loop,
    Margin,
    Options,
    Select,
    Selection,
    best_first,
    by_threshold,
    order_margin,
)
from reference.fast_dllm import block_logits

if TYPE_CHECKING:
    from reference.models import KeyValues

WINDOW = 0.25  # share of the canvas


def adablock(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    delimiter_ids: Collection[int],
    delimiter_threshold: float = float("inf"),
    threshold: float = 0.9,
    cache: str = "none",
    **options: Any,
) -> Decoded:
    """Decode the whole canvas; `block_length` is the length of blocks without a delimiter.

    For other keywords see Options. Raises RuntimeError if the model predicts the mask.
    """
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    start, block = loop.prompt_len, 0
    while start < len(loop.row):
        kv: KeyValues | None = None
        logits, kv = block_logits(loop, cache, start, start, kv)
        reach = min(start + int(WINDOW * gen_length), len(loop.row))
        proposals = loop.propose(logits, loop.masked(start, reach), CONFIDENCE)
        delimiters = [i for i, token in enumerate(proposals.tokens) if token in delimiter_ids]
        end, margins = min(start + block_length, len(loop.row)), []
        if delimiters:
            scores = [proposals.scores[i] for i in delimiters]
            best, *others = best_first(scores)
            margins = [Margin("threshold", 0, abs(scores[best] - delimiter_threshold), 1.0)]
            margins += [order_margin(scores, best, other)._replace(candidate=0) for other in others]
            if scores[best] >= delimiter_threshold:
                end = proposals.positions[delimiters[best]] + 1
        loop.decide(block, logits, loop.masked(0, end), _also(by_threshold(threshold), margins))
        loop.check_change()
        while loop.num_masked(start, end):
            logits, kv = block_logits(loop, cache, start, end, kv)
            eligible = loop.masked(start if cache != "none" else 0, end)
            loop.decide(block, logits, eligible, by_threshold(threshold))
            loop.check_change()
        start, block = end, block + 1
    return loop.result()


def _also(select: Select, margins: list[Margin]) -> Select:
    """Return `select` with the close decisions `margins` added to its own."""

    def both(candidates: Candidates) -> Selection:
        accepted, own, plain = select(candidates)
        return Selection(accepted, [*own, *margins], plain)

    return cast("Select", both)
