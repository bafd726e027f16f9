# SPDX-License-Identifier: Apache-2.0
"""Progress bars on a terminal; in other outputs, such as a log file, a line every ten seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterable

LINE_INTERVAL_S = 10.0


class _Lines:
    """Stream that writes each state of a bar as a separate line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress(steps: Iterable[Any] | None, name: str, total: int | None = None) -> Any:
    """Return a tqdm bar over `steps`, or a bar of `total` steps that the caller updates."""
    if sys.stderr.isatty():
        return tqdm(steps, desc=name, total=total)
    return tqdm(
        steps,
        desc=name,
        total=total,
        file=_Lines(),
        mininterval=LINE_INTERVAL_S,
        maxinterval=LINE_INTERVAL_S,
        bar_format="{desc}: {n_fmt} of {total_fmt} steps in {elapsed}{postfix}",
    )
