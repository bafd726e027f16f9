# SPDX-License-Identifier: Apache-2.0
"""Parameters and results of sampling rows of logits."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from .filters import Filters
from .philox import TOKEN_NOISE

Score: TypeAlias = Literal["confidence", "entropy", "margin"]

MAX_COLUMNS = 16  # the kernels take the columns by value

# Fields of a record. A record is float64 [R, 8] and summarises a slice of the columns for the whole
# row. Column ids and fp32 numbers are exact in it. t = (logit - maximum) / softmax temperature.
MAXIMUM = 0  # largest logit
COLUMN = 1  # its lowest column, counted over the whole vocabulary
SUM_EXP = 2  # sum of exp(t); SUM_EXP and WEIGHTED ignore excluded columns
WEIGHTED = 3  # sum of exp(t) * t (score "entropy" only)
SECOND = 4  # second largest logit (score "margin" only)
NOISED = 5  # largest noised logit; MAXIMUM if there is no noise
TOKEN = 6  # its lowest column, counted over the whole vocabulary
TOKEN_LOGIT = 7  # the noise-free logit of that column
RECORD_FIELDS = 8


@dataclass(frozen=True)
class Rows:
    """Parameters of rows of logits; a parameter that is a tensor has one value per row, [R].

    Tensors are on the device of the logits, so rows of many requests share one launch.

    Attributes:
        temperature: >= 0, floating [R]; scale of the Gumbel noise with which a row's token is
            sampled. At 0 the token is the best column.
        seed: 64-bit seed of the noise, int64 [R] (its bit pattern).
        step: denoising step, int64 [R].
        positions: int64 [R], canvas position of each row; None: no noise.
        purpose: selects an independent random stream for each kind of draw.
        is_tempered: whether the score is that of ``softmax(logits / temperature)`` (unless the
            temperature is 0).
        epsilon: > 0, fp32 [R]; the entropy is ``-sum p * log(p + epsilon)``.
        columns: at most 16 columns of the whole vocabulary, to which the masks below refer.
        forbidden: int32 [R]; bit i set: ``columns[i]`` reads as -inf.
        excluded: int32 [R]; bit i set: the probability of ``columns[i]`` is 0 (the other columns
            are normalised without it), though it may still be the token.
        filters: filters to apply before sampling; None: no filter. Only `candidates` filters.
    """

    temperature: float | Tensor = 0.0
    seed: int | Tensor = 0
    step: int | Tensor = 0
    positions: Tensor | None = None
    purpose: int = TOKEN_NOISE
    is_tempered: bool = False
    epsilon: float | Tensor = 1e-10
    columns: tuple[int, ...] = ()
    forbidden: int | Tensor = 0
    excluded: int | Tensor = 0
    filters: Filters | None = None

    @property
    def has_noise(self) -> bool:
        """Whether the token of any row may be sampled at a temperature above 0."""
        if self.positions is None:
            return False
        return isinstance(self.temperature, Tensor) or self.temperature > 0


class Sampled(NamedTuple):
    """Results of sampling each row.

    Attributes:
        token: int64 [R], the column with the largest noised logit, the lowest one of a tie.
        score: fp32 [R] (fp64 for fp64 logits). "confidence": the token's probability; 0 where it
            is excluded or no column is finite. "entropy": in nats; +inf where no column is finite.
            "margin": difference of the two largest probabilities; 0 where no column is finite.
        greedy: int64 [R], the column with the largest logit.
    """

    token: Tensor
    score: Tensor
    greedy: Tensor
