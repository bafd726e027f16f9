# SPDX-License-Identifier: Apache-2.0
"""Description of a request field, checks of its value, and the notation of values.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.request import Request
    from vllm.diffusion.request.served_model import ServedModel

MAX_BIAS = 100.0  # limit of a logit's bias, as in OpenAI's API
# Limit of a number that multiplies or divides logits, which would not be finite beyond it.
MAX_FACTOR = 1_000_000
# Logits that are divided by a lower temperature would not be finite.
MIN_TEMPERATURE = 1e-20
MAX_DIGITS = 18  # digits of a token id


@dataclass(frozen=True)
class Field:
    """One request field; `param` declares it.

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
        uses: whether an algorithm uses it; None if all do.
        applies: whether it has an effect on a model, if the algorithm uses it.
        algorithms: the algorithms of full-attention families that use it.
        block_algorithms: the algorithms of block-causal families that use it. If both are empty,
            all algorithms use it.
        neutral: values without effect, which are accepted with algorithms that do not use it.
        server_wide: whether it may also be given as a server-wide default.
        in_sampling: whether upstream's `SamplingParams` has it as well.
        needs: special tokens without which it is refused.
        refuse: describes the accepted values if the request or the model conflicts with a given
            value; returns None if there is no conflict.
        resolve: converts a given or default value to the value of `DiffusionParams`.
        read: checks and converts a given value, in place of the check of its kind.
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
    uses: Callable[[Algorithm], bool] | None = None
    applies: Callable[[Algorithm, ServedModel], bool] | None = None
    algorithms: tuple[str, ...] = ()
    block_algorithms: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()
    server_wide: bool = False
    in_sampling: bool = False
    needs: tuple[Literal["eos", "eot"], ...] = ()
    refuse: Callable[[Any, Request], str | None] | None = None
    resolve: Callable[[Any, Request], Any] | None = None
    read: Callable[[str, Any], Any] | None = None

    def default_for(self, algorithm: str, *, is_shifted: bool) -> Any:
        """Return the value in a request that sets none."""
        default = self.defaults.get(algorithm, self.default)
        return self.shifted_defaults.get(algorithm, default) if is_shifted else default

    def is_used_by(self, algorithm: str, *, is_block_causal: bool = False) -> bool:
        users = self.block_algorithms if is_block_causal else self.algorithms
        return self.uses is None or algorithm in users

    def acts(self, algorithm: Algorithm, model: ServedModel) -> bool:
        """Return whether the field has an effect with an algorithm on a model."""
        is_used = self.uses is None or self.uses(algorithm)
        return is_used and (self.applies is None or self.applies(algorithm, model))

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

    def checked(self, spelling: str, value: Any) -> Any:
        """Return `value` converted to `kind`.

        Raises:
            InvalidParameterError: naming `spelling`.
        """
        if self.read is not None:
            return self.read(spelling, value)
        if self.kind in _READERS:
            return _READERS[self.kind](spelling, value)
        if self.kind is str:
            if not isinstance(value, str) or value not in self.choices:
                wanted = f"wanted one of: {', '.join(self.choices)}"
                raise InvalidParameterError(spelling, value, wanted)
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            kind = "whole" if self.kind is int and not isinstance(value, (int, float)) else "finite"
            raise InvalidParameterError(spelling, value, f"wanted a {kind} number")
        if self.kind is int:
            if value != int(value) or not -(2**63) <= value < 2**64:
                raise InvalidParameterError(spelling, value, "wanted a whole number of 64 bits")
            value = int(value)
        if self.minimum is not None and value < self.minimum:
            raise InvalidParameterError(spelling, value, f"wanted at least {as_json(self.minimum)}")
        if self.maximum is not None and value > self.maximum:
            raise InvalidParameterError(spelling, value, f"wanted at most {as_json(self.maximum)}")
        return self.kind(value)


def param(doc: str, **description: Any) -> Any:
    """Declare an attribute of `RequestFields` or `AlgorithmParams`.

    Args:
        doc: one line for users.
        description: further attributes of `Field`. Name and kind come from the attribute.
    """
    return dataclasses.field(metadata={"param": {"doc": doc, **description}})


def derived(of: Callable[[Request], Any]) -> Any:
    """Declare an attribute of `DiffusionParams` that no request sets.

    Args:
        of: returns its value for a request.
    """
    return dataclasses.field(metadata={"derived": of})


def _flag(spelling: str, value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise InvalidParameterError(spelling, value, "wanted true or false")
    return bool(value)


def _token_ids(spelling: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(type(token) is int and 0 <= token < 2**63 for token in value):
        raise InvalidParameterError(spelling, value, "wanted a list of token ids")
    return tuple(value)


def _by_token(spelling: str, value: Any) -> dict[int, float]:
    """Return numbers by token id, clipped to -100 and 100; JSON has the ids as strings."""
    wanted = "wanted an object of token ids and numbers"
    if not isinstance(value, dict):
        raise InvalidParameterError(spelling, value, wanted)
    biases = {}
    for token, bias in value.items():
        is_id = type(token) is int or (isinstance(token, str) and token.isdecimal())
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_id or not is_number or not _is_finite(bias) or len(str(token)) > MAX_DIGITS:
            raise InvalidParameterError(spelling, {token: bias}, wanted)
        biases[int(token)] = min(max(float(bias), -MAX_BIAS), MAX_BIAS)
    return biases


def _words(spelling: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(word, str) and word.strip() for word in value):
        raise InvalidParameterError(spelling, value, "wanted a list of words, none of them empty")
    return tuple(dict.fromkeys(value))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer outside the range of float
        return False


# Checks of the kinds whose values are no numbers and no choices.
_READERS: dict[type, Callable[[str, Any], Any]] = {
    bool: _flag,
    tuple: _token_ids,
    dict: _by_token,
    list: _words,
}


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
