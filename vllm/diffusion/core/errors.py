# SPDX-License-Identifier: Apache-2.0
"""The exceptions of Mosaic.

DiffusionError
├── InvalidParameterError   a request has an unsupported parameter (HTTP 400)
│   └── ActivationBudgetError   its steps need more memory than the pool has
├── ModelConfigError        config.json describes a model that Mosaic does not run
├── CheckpointError         tensors are missing from a checkpoint, or are not of the model
├── AdapterError            a LoRA adapter does not fit the model or the server (HTTP 400)
├── ServerConfigError       a server-wide setting is unknown or out of range
├── BrokenLogitsError       a model's logits are NaN
└── RankError               another rank of the engine failed in the same step
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Maximum lengths of the parts of a refusal, in characters.
MAX_NAME_LENGTH = 200
MAX_GIVEN_LENGTH = 80
MAX_WANTED_LENGTH = 1600


class DiffusionError(Exception):
    """Base class of all exceptions that Mosaic raises."""


class InvalidParameterError(DiffusionError, ValueError):
    """A request parameter is unknown, has the wrong type, is out of range or has no effect.

    Attributes:
        field: name of the parameter.
        given: the value that was sent.
        wanted: description of the accepted values.
    """

    def __init__(self, field: str, given: Any, wanted: str) -> None:
        # The client may have invented the name, and `wanted` may repeat another of its values.
        name = field if field.isprintable() else ascii(field)
        name, wanted = _cut(name, MAX_NAME_LENGTH), _cut(wanted, MAX_WANTED_LENGTH)
        super().__init__(f"{name}: given {_short(given)}; {wanted}")
        self.field = field
        self.given = given
        self.wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.given, self.wanted))


class ActivationBudgetError(InvalidParameterError):
    """No plan of a request's steps fits into the activation pool.

    Attributes:
        num_tokens: prompt and canvas of the request.
        required_bytes: minimum bytes of one of its steps, including what requests keep between
            steps.
        budget_bytes: bytes of the pool.
        longest_tokens: prompt and canvas of the longest request of its kind that fits.
    """

    def __init__(
        self, num_tokens: int, required_bytes: int, budget_bytes: int, longest_tokens: int
    ) -> None:
        super().__init__(
            "prompt + gen_length",
            num_tokens,
            f"its steps need {required_bytes} bytes of activation memory, the pool has "
            f"{budget_bytes}; wanted at most {longest_tokens} tokens",
        )
        self.num_tokens = num_tokens
        self.required_bytes = required_bytes
        self.budget_bytes = budget_bytes
        self.longest_tokens = longest_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = (self.num_tokens, self.required_bytes, self.budget_bytes, self.longest_tokens)
        return (type(self), numbers)


class ModelConfigError(DiffusionError, ValueError):
    """A key of config.json is missing or has a value that this implementation does not run.

    Attributes:
        key: the key of config.json.
        given: its value (None when missing).
        wanted: description of the accepted values.
    """

    def __init__(self, key: str, given: Any, wanted: str) -> None:
        super().__init__(f"config.json: {key}: given {_short(given)}; {wanted}")
        self.key = key
        self.given = given
        self.wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.key, self.given, self.wanted))


class CheckpointError(DiffusionError, ValueError):
    """A checkpoint's tensors do not match the model that its config.json describes."""


class AdapterError(DiffusionError, ValueError):
    """A LoRA adapter's files do not fit the model, or the server has no room for it."""


class ServerConfigError(DiffusionError, ValueError):
    """A server-wide diffusion setting is unknown or has a value that cannot work."""


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    return _cut(repr(_start_of(value, itertools.count())), MAX_GIVEN_LENGTH)


def _start_of(value: Any, looked_at: Iterator[int]) -> Any:
    """Return the part of a value that an error can display; a client may have sent megabytes.

    Tuples become lists, because JSON has no tuples.
    """
    if isinstance(value, str):
        return value[: MAX_GIVEN_LENGTH + 1]
    if type(value) not in (list, tuple, dict):
        return value
    lines: list[Any] = []
    for item in value.items() if isinstance(value, dict) else value:
        # Every item has at least one character.
        if next(looked_at) > MAX_GIVEN_LENGTH:
            break
        if isinstance(value, dict):
            lines.append((item[0], _start_of(item[1], looked_at)))
        else:
            lines.append(_start_of(item, looked_at))
    return dict(lines) if isinstance(value, dict) else lines


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class BrokenLogitsError(DiffusionError):
    """The logits of a request's step contain no numbers."""

    def __init__(self) -> None:
        super().__init__("the model's logits are NaN: wanted numbers; are its weights whole?")


class RankError(DiffusionError):
    """Another rank of the engine failed in the same step; its own log has the cause."""


class RankMemoryError(RankError):
    """Another rank has no memory for the step."""
