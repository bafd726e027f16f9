# SPDX-License-Identifier: Apache-2.0
"""Definition of a request parameter, and the notation of its values.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Field:
    """One request parameter.

    Attributes:
        name: canonical name.
        kind: int, float, bool or str; tuple: a list of token ids; list: a list of words; dict:
            numbers by token id.
        doc: one line for users.
        default: value if a request sets none; None if there is no default or if it depends on other
            values.
        defaults: default by algorithm, for algorithms with their own.
        shifted_defaults: default by algorithm, in families that shift their logits (Dream).
        default_text: description of the default if it is not a single value.
        minimum, maximum: smallest and largest accepted number.
        choices: accepted strings.
        aliases: other spellings.
        algorithms: the algorithms of full-attention families that use it.
        block_algorithms: the algorithms of block-causal families that use it. If both are empty,
            all algorithms use it.
        neutral: values without effect, which are accepted with algorithms that do not use it.
        server_wide: whether it may also be given as a server-wide default.
    """

    name: str
    kind: type
    doc: str
    default: Any = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shifted_defaults: Mapping[str, Any] = field(default_factory=dict)
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    block_algorithms: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()
    server_wide: bool = False

    def default_for(self, algorithm: str, *, is_shifted: bool) -> Any:
        """Return the value in a request that sets none."""
        default = self.defaults.get(algorithm, self.default)
        return self.shifted_defaults.get(algorithm, default) if is_shifted else default

    def users(self, *, is_block_causal: bool) -> tuple[str, ...]:
        """Return the algorithms of a kind of family that use the parameter; empty if all use it."""
        return self.block_algorithms if is_block_causal else self.algorithms

    def is_used_by(self, algorithm: str, *, is_block_causal: bool = False) -> bool:
        if not self.algorithms and not self.block_algorithms:
            return True
        return algorithm in self.users(is_block_causal=is_block_causal)

    @property
    def documented_default(self) -> str:
        """The default as text for users."""
        if self.default_text:
            return self.default_text
        parts = [] if self.default is None else [as_json(self.default)]
        parts += [f"{name} {self.documented_default_for(name)}" for name in self.defaults]
        return "; ".join(parts)

    def documented_default_for(self, algorithm: str) -> str:
        """Return the default with one algorithm, as text for users."""
        text = self.default_text or as_json(self.default_for(algorithm, is_shifted=False))
        if algorithm in self.shifted_defaults:
            text += f" ({as_json(self.shifted_defaults[algorithm])} on Dream)"
        return text


def as_json(value: Any) -> str:
    """Format a value as JSON does, strings without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_words(names: Iterable[str]) -> str:
    """Join names as in "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def as_score(value: float, dtype: str) -> float:
    """Round a threshold to the nearest value of a 16-bit dtype, as PyTorch does in comparisons."""
    if dtype == "float16":
        (rounded,) = struct.unpack("e", struct.pack("e", min(max(value, -65504.0), 65504.0)))
        return float(rounded)
    if dtype != "bfloat16":
        # Scores of other dtypes are compared with the unrounded value.
        return value
    (bits,) = struct.unpack("I", struct.pack("f", min(max(value, -1e38), 1e38)))
    # Round to nearest, ties to even.
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0])
