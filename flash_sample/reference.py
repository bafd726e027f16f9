# SPDX-License-Identifier: Apache-2.0
"""PyTorch reference of sampling whole rows of logits.

It defines the results of the kernels, and runs wherever a kernel is missing. Letters: R rows, V
columns. Logits are [R, V] bf16, fp16, fp32 or fp64; the arithmetic is fp32, or fp64 for fp64
logits. Of equal logits the lowest column wins. Columns may be -inf. NaN in a row makes its score
NaN and leaves its token unspecified (but in range).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .filters import kept_by
from .gumbel import noised_best
from .rows import Rows, Sampled, Score


def candidates(logits: Tensor, rows: Rows, score: Score) -> Sampled:
    """Sample each row: token, score and greedy column; see `flash_sample.candidates`.

    Without noise and special columns, the confidence is bit for bit ``softmax(logits.float())``
    gathered at ``argmax(logits)``, as in LLaDA's reference generate loop.
    """
    values = masked(computed(logits), rows.columns, rows.forbidden, 0)
    greedy = token = values.argmax(dim=-1)
    removed = None
    if rows.filters is not None:
        removed = ~kept_by(values, rows.temperature, rows.filters)
    if rows.has_noise:
        drawn = values if removed is None else values.masked_fill(removed, -torch.inf)
        token = noised_best(drawn, rows, 0).column
    kept = masked(values, rows.columns, rows.excluded, 0)
    if removed is not None and rows.filters is not None and rows.filters.are_scored:
        kept = kept.masked_fill(removed, -torch.inf)
    is_empty = kept.amax(dim=-1) == -torch.inf
    if rows.is_tempered:
        kept = tempered(kept, kept.amax(dim=-1), rows)
    probabilities = torch.softmax(kept, dim=-1)
    if score == "entropy":
        scores = entropy(probabilities, rows.epsilon).masked_fill(is_empty, torch.inf)
    elif score == "margin":
        best = probabilities.topk(min(2, probabilities.shape[1]), dim=-1).values
        scores = best[:, 0] - best[:, 1] if best.shape[1] == 2 else best[:, 0]
        scores = scores.masked_fill(is_empty, 0.0)
    else:
        scores = probabilities.gather(-1, token[:, None]).squeeze(-1).masked_fill(is_empty, 0.0)
    return Sampled(token, scores, greedy)


def computed(logits: Tensor) -> Tensor:
    """Convert logits to the dtype of the arithmetic."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def entropy(probabilities: Tensor, epsilon: float | Tensor) -> Tensor:
    if isinstance(epsilon, Tensor):
        epsilon = epsilon[:, None]
    return -(probabilities * torch.log(probabilities + epsilon)).sum(dim=-1)


def bit(mask: int | Tensor, index: int, device: torch.device) -> Tensor:
    """Return whether a bit is set: [R] bool, or [1]."""
    if isinstance(mask, Tensor):
        return (mask >> index & 1).bool()
    return torch.tensor([bool(mask >> index & 1)], device=device)


def masked(values: Tensor, columns: Sequence[int], mask: int | Tensor, first_column: int) -> Tensor:
    """Set to -inf the columns whose bit is set; copy only if one of them lies in this slice."""
    if isinstance(mask, int) and mask == 0:
        return values
    masked = values
    for i, column in enumerate(columns):
        local = column - first_column
        if not 0 <= local < values.shape[1] or (isinstance(mask, int) and not mask >> i & 1):
            continue
        masked = values.clone() if masked is values else masked
        masked[:, local] = masked[:, local].masked_fill(bit(mask, i, values.device), -torch.inf)
    return masked


def tempered(values: Tensor, maximum: Tensor, rows: Rows) -> Tensor:
    """Return ``(values - maximum) / softmax temperature`` by rows; -inf stays -inf, never NaN.

    The maximum is subtracted first: a tiny temperature would otherwise turn finite logits infinite.
    """
    shifted = values - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    if not rows.is_tempered:
        return shifted
    scale = torch.as_tensor(rows.temperature, dtype=values.dtype, device=values.device)
    return shifted / torch.where(scale == 0, 1.0, scale).reshape(-1, 1)
