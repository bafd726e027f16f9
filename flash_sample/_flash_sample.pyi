# SPDX-License-Identifier: Apache-2.0
"""The compiled module: addresses, sizes and streams as integers; `flash_sample` checks them."""

from collections.abc import Sequence
from typing import Final

SEGMENT_COLUMNS: Final[int]
MAX_EXCLUDED: Final[int]

class DataType:
    FLOAT32: Final[DataType]
    FLOAT16: Final[DataType]
    BFLOAT16: Final[DataType]

def low_confidence(
    *,
    logits: int,
    dtype: DataType,
    row_stride: int,
    num_rows: int,
    num_columns: int,
    excluded: Sequence[int],
    workspace: int,
    column: int,
    confidence: int,
    maximum: int,
    sum_exp: int,
    device: int,
    stream: int,
) -> None: ...
