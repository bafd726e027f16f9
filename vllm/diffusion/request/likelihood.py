# SPDX-License-Identifier: Apache-2.0
"""Requests that compute log probabilities of given tokens and commit nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCORE = "score"  # key of SamplingParams.extra_args that holds a `ScoreRequest`

# Keys of a score request that may be left out, with their types.
_OPTIONAL: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "num_top": (int,),
        "cfg_scale": (int, float),
        "context_length": (int,),
        "shares_prefix": (bool,),
    }
)

# other parameters that such a request may have
BESIDE_A_SCORE = frozenset({"priority", "timeout_s"})
# Values under which such a request is decided first: the smallest canvas, and masks in the prompt.
SCORED_AS: Mapping[str, Any] = MappingProxyType({"gen_length": 1, "allow_infill": True})

# Values of the other parameters of such a request: the unmodified model, and no canvas.
ONLY_READ: Mapping[str, Any] = MappingProxyType(
    {
        "remasking": "low_confidence",
        "cache": "none",
        "gen_length": 0,
        "max_tokens": 0,
        "steps": 1,
        "temperature": 0.0,
        "min_p": 0.0,
        "top_p": None,
        "top_k": None,
        "edits": None,
        "cfg_scale": 0.0,
        "logits_eos_inf": False,
        "confidence_eos_eot_inf": False,
        "confidence_dtype": "float32",
        "allow_infill": True,
        "seed": 0,
        "stop_ids": frozenset(),
        "stream_canvas": False,
        "return_trajectory": False,
        "return_entropy": False,
        "complete_blocks": False,
        "logprobs": None,
    }
)


@dataclass(frozen=True)
class ScoreRequest:
    """Positions whose logits are computed without committing anything, and the tokens to score.

    Attributes:
        positions: positions of the prompt, ascending, masked or not.
        token_ids: at least one token for every position.
        num_top: number of most likely tokens to report at every position in addition.
        cfg_scale: guidance; above 0, a second sequence with masked context is computed.
        context_length: number of positions, from 0, that are masked in the second sequence.
        shares_prefix: whether keys and values of positions before the first mask are shared with
            other requests, in block-causal families. All scored positions are masked then.
        group: name of a group of requests that share a step.
        group_size: number of requests in the group.
    """

    positions: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    num_top: int = 0
    cfg_scale: float = 0.0
    context_length: int = 0
    shares_prefix: bool = False
    group: str = ""
    group_size: int = 1


@dataclass(frozen=True)
class TokenScores:
    """Result of a scoring request; lists are in the order of its positions.

    Attributes:
        logprobs: log probabilities of the requested tokens, fp32, under the model's distribution
            over all tokens, independent of the request's temperature.
        likeliest: the token with the largest logit; the lowest id among equals.
        top_tokens: the requested number of most likely tokens, the most likely first.
        top_logprobs: log probabilities of `top_tokens`.
    """

    logprobs: list[list[float]]
    likeliest: list[int]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]


def likelihood_request(given: Any, prompt_length: int, vocab_size: int) -> ScoreRequest:
    """Check and convert `{"positions": [...], "token_ids": [[...], ...]}`.

    `num_top`, and `cfg_scale` with `context_length`, are optional keys.

    Raises:
        InvalidParameterError: the structure is wrong, or a position or token does not exist.
    """
    wanted = {"positions", "token_ids"}
    if not isinstance(given, dict) or not wanted <= given.keys() <= wanted | _OPTIONAL.keys():
        raise InvalidParameterError(SCORE, given, "wanted positions and token_ids")
    positions, token_ids = given["positions"], given["token_ids"]
    if not _are_below(positions, prompt_length) or list(positions) != sorted(set(positions)):
        raise InvalidParameterError(
            f"{SCORE}.positions",
            positions,
            f"wanted ascending positions from 0 to {prompt_length - 1}",
        )
    if not isinstance(token_ids, list | tuple) or len(token_ids) != len(positions):
        raise InvalidParameterError(
            f"{SCORE}.token_ids", token_ids, f"wanted {len(positions)} lists, one a position"
        )
    for ids in token_ids:
        if not _are_below(ids, vocab_size):
            raise InvalidParameterError(
                f"{SCORE}.token_ids", ids, f"wanted token ids from 0 to {vocab_size - 1}"
            )
    return ScoreRequest(
        tuple(positions),
        tuple(tuple(ids) for ids in token_ids),
        **_options(given, prompt_length, vocab_size),
    )


def _options(given: Mapping[str, Any], prompt_length: int, vocab_size: int) -> dict[str, Any]:
    """Return the given optional keys, checked."""
    maxima = {"num_top": vocab_size, "cfg_scale": math.inf, "context_length": prompt_length}
    maxima["shares_prefix"] = True
    options = {name: given[name] for name in _OPTIONAL if name in given}
    for name, value in options.items():
        kinds = _OPTIONAL[name]
        if type(value) not in kinds or not 0 <= value <= maxima[name] or value == math.inf:
            kind = "a finite number" if float in kinds else "a whole number"
            limit = "" if maxima[name] == math.inf else f" to {maxima[name]}"
            raise InvalidParameterError(f"{SCORE}.{name}", value, f"wanted {kind} from 0{limit}")
    return options


def _are_below(numbers: Any, bound: int) -> bool:
    """Return whether the value is a list of at least one whole number from 0 to `bound` - 1."""
    if not isinstance(numbers, list | tuple) or not numbers:
        return False
    return all(type(number) is int and 0 <= number < bound for number in numbers)
