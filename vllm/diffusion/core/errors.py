# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the diffusion overlay.

DiffusionError
├── InvalidParameterError   a request asks for something it cannot have (HTTP 400)
│   └── ActivationBudgetError   its steps need more memory than there is
├── ModelConfigError        a checkpoint's config.json describes a model we do not run
├── CheckpointError         tensors are missing from a checkpoint, or not part of the model
├── ServerConfigError       a server-wide setting is unknown or out of range
├── BrokenLogitsError       a model computes what are no numbers
└── RankError               another rank of the engine failed in a step of both
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Longest parts of a refusal, in characters.
MAX_NAME_LENGTH = 200
MAX_GIVEN_LENGTH = 80
MAX_WANTED_LENGTH = 1600


class DiffusionError(Exception):
    """Base of every exception raised by the diffusion overlay."""


class InvalidParameterError(DiffusionError, ValueError):
    """A request parameter is unknown, of the wrong type, out of range or of no effect.

    Attributes:
        field: name of the parameter.
        given: the value that was sent.
        wanted: description of the accepted values.
    """

    def __init__(self, field: str, given: Any, wanted: str) -> None:
        # A client may have made up the name, and `wanted` may repeat another of its values.
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
        required_bytes: least bytes of one of its steps, with what requests keep between steps.
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


class ServerConfigError(DiffusionError, ValueError):
    """A server-wide diffusion setting is unknown or has a value that cannot work."""


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    return _cut(repr(_start_of(value, itertools.count())), MAX_GIVEN_LENGTH)


def _start_of(value: Any, looked_at: Iterator[int]) -> Any:
    """Return as much of a value as can be seen of it: a client may have sent megabytes."""
    if isinstance(value, str):
        return value[: MAX_GIVEN_LENGTH + 1]
    if type(value) not in (list, tuple, dict):
        return value
    lines: list[Any] = []
    for item in value.items() if isinstance(value, dict) else value:
        if next(looked_at) > MAX_GIVEN_LENGTH:  # each of them has a character, at least
            break
        if isinstance(value, dict):
            lines.append((item[0], _start_of(item[1], looked_at)))
        else:
            lines.append(_start_of(item, looked_at))
    return type(value)(lines)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class BrokenLogitsError(DiffusionError):
    """A step of a request has found no number at all."""

    def __init__(self) -> None:
        super().__init__("the model's logits are NaN: wanted numbers; are its weights whole?")


class RankError(DiffusionError):
    """Another rank of the engine failed in a step of both; its own log says how."""


class RankMemoryError(RankError):
    """Another rank has no memory for a step of both."""
