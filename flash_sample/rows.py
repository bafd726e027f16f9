# SPDX-License-Identifier: Apache-2.0
"""Parameters and results of sampling rows of logits."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from .filters import Filters
from .philox import TOKEN_NOISE

Score: TypeAlias = Literal["confidence", "entropy", "margin"]

MAX_COLUMNS = 16  # the kernels take the columns by value

# Fields of a record, the float64 [R, 8] that tells what a slice of the columns means for the whole
# row. Column ids and fp32 numbers are exact in it. t = (logit - maximum) / softmax temperature.
MAXIMUM = 0  # largest logit
COLUMN = 1  # its lowest column, counted over the whole vocabulary
SUM_EXP = 2  # sum of exp(t); excluded columns are left out, as from WEIGHTED
WEIGHTED = 3  # sum of exp(t) * t (score "entropy" only)
SECOND = 4  # second largest logit (score "margin" only)
NOISED = 5  # largest noised logit; MAXIMUM where there is no noise
TOKEN = 6  # its lowest column, counted over the whole vocabulary
TOKEN_LOGIT = 7  # the noise-free logit there
RECORD_FIELDS = 8


@dataclass(frozen=True)
class Rows:
    """Parameters of rows of logits; those that may be tensors then have one value a row, [R].

    Tensors lie on the device of the logits, so rows of many requests share one launch.

    Attributes:
        temperature: >= 0, floating [R]; scale of the Gumbel noise with which a row's token is
            drawn. At 0 the token is the best column.
        seed: 64-bit seed of the noise, int64 [R] (its bit pattern).
        step: denoise step, int64 [R].
        positions: int64 [R], canvas position of each row; None: no noise.
        purpose: separates draws that must not share their numbers.
        is_tempered: whether the score is that of ``softmax(logits / temperature)`` (where that is
            not 0).
        epsilon: > 0, fp32 [R]; the entropy is ``-sum p * log(p + epsilon)``.
        columns: at most 16 columns of the whole vocabulary, to which the masks below refer.
        forbidden: int32 [R]; bit i set: ``columns[i]`` reads as -inf.
        excluded: int32 [R]; bit i set: the probability of ``columns[i]`` is 0 (the rest is
            normalised without it), though it may still be the token.
        filters: what is cut off before the draw; None: nothing. Only `candidates` filters.
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
        """Whether some row's token may be drawn at a temperature above 0."""
        if self.positions is None:
            return False
        return isinstance(self.temperature, Tensor) or self.temperature > 0


class Sampled(NamedTuple):
    """Results of sampling each row.

    Attributes:
        token: int64 [R], the column with the largest noised logit, the lowest of equals.
        score: fp32 [R] (fp64 for fp64 logits). "confidence": the token's probability; 0 where it
            is excluded or no column is finite. "entropy": in nats; +inf where no column is finite.
            "margin": difference of the two largest probabilities; 0 where no column is finite.
        greedy: int64 [R], the column with the largest logit.
    """

    token: Tensor
    score: Tensor
    greedy: Tensor
