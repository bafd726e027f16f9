# SPDX-License-Identifier: Apache-2.0
"""Simple forms of `candidates`: one score, for callers whose rows need no other parameters."""

from collections.abc import Sequence

from torch import Tensor

from ._ops import check_logits, checked_candidates
from .philox import TOKEN_NOISE
from .rows import MAX_COLUMNS, Rows


def low_confidence(logits: Tensor, *, excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and its softmax probability.

    This is the score of a masked position in low-confidence remasking (Nie et al., "Large Language
    Diffusion Models", arXiv:2502.09992).

    Args:
        logits: [R, V] as for `candidates`.
        excluded: At most 16 columns whose probability is taken as 0 (the others are normalised
            without them). They may still be the best column.

    Returns:
        token: int64 [R], the column of the largest logit, the lowest one of a tie.
        confidence: fp32 [R] (fp64 for fp64 logits), its probability; 0 where the token is
            excluded, and where the row has no finite logit (the token is then 0). NaN or +inf in
            a row makes it NaN; the token is then in range, but otherwise unspecified.

    Raises:
        ValueError: The logits are not as above, or ``excluded`` is too long or out of range.
    """
    name = "low_confidence"
    check_logits(name, logits)
    _check_excluded(name, excluded, logits.shape[1])
    rows = Rows(columns=tuple(excluded), excluded=(1 << len(excluded)) - 1)
    return checked_candidates(name, logits, rows, "confidence")[:2]


def entropy(logits: Tensor, *, epsilon: float | Tensor = 1e-10) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and the entropy of the row's softmax.

    Args:
        logits: [R, V] as for `candidates`.
        epsilon: Positive, float or fp32 [R]; the entropy is ``-sum p * log(p + epsilon)``.

    Returns:
        token: int64 [R], the column of the largest logit, the lowest one of a tie.
        entropy: fp32 [R] (fp64 for fp64 logits), in nats; +inf where the row has no finite logit.

    Raises:
        ValueError: The logits are not as above, or ``epsilon`` is not positive.
    """
    return checked_candidates("entropy", logits, Rows(epsilon=epsilon), "entropy")[:2]


def entropy_witht(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int = TOKEN_NOISE,
    epsilon: float | Tensor = 1e-10,
) -> tuple[Tensor, Tensor]:
    """Sample a column of each row at a temperature, and compute the row's entropy at it.

    Rows of one call may belong to different requests.

    Args:
        logits: [R, V] as for `candidates`.
        temperature: >= 0, float or [R] floating. At 0 the token is the best column and the
            entropy that of the plain softmax.
        seed: 64-bit seed, int or int64 [R] (its bit pattern).
        step: Denoising step, int or int64 [R].
        positions: int64 [R], canvas position of each row.
        purpose: Selects an independent random stream for each kind of draw.
        epsilon: As for `entropy`.

    Returns:
        token: int64 [R].
        entropy: fp32 [R] (fp64 for fp64 logits), of ``softmax(logits / temperature)``, in nats;
            +inf where the row has no finite logit.

    Raises:
        ValueError: An argument is not as above. Temperatures on a GPU are not checked.
    """
    rows = Rows(
        temperature, seed, step, positions, purpose=purpose, is_tempered=True, epsilon=epsilon
    )
    return checked_candidates("entropy_witht", logits, rows, "entropy")[:2]


def margin(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and the margin of its two largest probabilities.

    Args:
        logits: [R, V] as for `candidates`.

    Returns:
        token: int64 [R], the column of the largest logit, the lowest one of a tie.
        margin: fp32 [R] (fp64 for fp64 logits); 0 where the row has no finite logit.

    Raises:
        ValueError: The logits are not as above.
    """
    return checked_candidates("margin", logits, Rows(), "margin")[:2]


def _check_excluded(name: str, excluded: Sequence[int], num_columns: int) -> None:
    if len(excluded) > MAX_COLUMNS:
        raise ValueError(
            f"{name}: excluded must hold at most {MAX_COLUMNS} columns, got {len(excluded)}"
        )
    outside = [c for c in excluded if not 0 <= c < num_columns]
    if outside:
        raise ValueError(
            f"{name}: excluded columns must be >= 0 and < {num_columns}, got {outside}"
        )
