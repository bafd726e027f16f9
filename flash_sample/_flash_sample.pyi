# SPDX-License-Identifier: Apache-2.0
"""The compiled module: addresses, sizes and streams as integers; `flash_sample` checks them."""

from collections.abc import Sequence
from typing import Final

MAX_COLUMNS: Final[int]
RECORD_FIELDS: Final[int]

class DataType:
    FLOAT32: Final[DataType]
    FLOAT16: Final[DataType]
    BFLOAT16: Final[DataType]

class Score:
    CONFIDENCE: Final[Score]
    ENTROPY: Final[Score]
    MARGIN: Final[Score]

class RowParams:
    """Each pair is the address of [R] values, or 0 and one value for all rows."""

    def __init__(
        self,
        *,
        temperature: tuple[int, float],
        seed: tuple[int, int],
        step: tuple[int, int],
        position: tuple[int, int],
        purpose: int,
        is_tempered: bool,
        epsilon: tuple[int, float],
        columns: Sequence[int],
        forbidden: tuple[int, int],
        excluded: tuple[int, int],
    ) -> None: ...

def candidates(
    *,
    rows: RowParams,
    logits: int,
    dtype: DataType,
    row_stride: int,
    num_rows: int,
    num_columns: int,
    first_column: int,
    score: Score,
    has_noise: bool,
    whole: int,
    share: int,
    record: int,
    token: int,
    value: int,
    greedy: int,
    device: int,
    stream: int,
) -> None: ...
def merge(
    *,
    rows: RowParams,
    records: int,
    num_slices: int,
    num_rows: int,
    score: Score,
    record: int,
    token: int,
    value: int,
    greedy: int,
    device: int,
    stream: int,
) -> None: ...
def uniform(
    *,
    rows: RowParams,
    num_rows: int,
    first_column: int,
    num_columns: int,
    numbers: int,
    device: int,
    stream: int,
) -> None: ...
