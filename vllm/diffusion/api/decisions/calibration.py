# SPDX-License-Identifier: Apache-2.0
"""Calibration of decisions: a temperature, and perhaps a bias of labels, for each kind of question.

The probability of a label is proportional to exp(l / T + b), where l is the log probability that
the model gives it, T the temperature of its kind, and b its bias. `scripts/calibrate_decisions.py`
fits the temperatures and writes the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.diffusion.core.errors import ServerConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

KINDS = ("predicate", "choice", "score")
SETTING = "decision_calibration"
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.02, 50.0
NUM_BINS = 15  # bins of the expected calibration error
_GOLDEN = (math.sqrt(5) - 1) / 2
_SECTIONS = 80  # steps of the golden section search
_LEAST = 1e-300  # smallest probability whose logarithm is taken

# Label probabilities of a question, and the index of the right label.
Labelled = tuple["Sequence[float]", int]


@dataclass(frozen=True)
class KindCalibration:
    """Calibration of one kind of question."""

    temperature: float = 1.0
    bias: Mapping[str, float] = field(default_factory=dict)

    def applied(self, labels: Sequence[str], probabilities: Sequence[float]) -> list[float]:
        """Return calibrated probabilities of the labels of a question; they sum to 1."""
        logits = [
            math.log(max(p, _LEAST)) / self.temperature + self.bias.get(label, 0.0)
            for label, p in zip(labels, probabilities, strict=True)
        ]
        highest = max(logits)
        weights = [math.exp(value - highest) for value in logits]
        total = math.fsum(weights)
        return [weight / total for weight in weights]


@dataclass(frozen=True)
class Calibration:
    """A calibration file.

    Attributes:
        content: the file.
        kinds: calibration by kind of question.
    """

    content: Mapping[str, Any]
    kinds: Mapping[str, KindCalibration]

    def applied(
        self, kind: str, labels: Sequence[str], probabilities: Sequence[float]
    ) -> list[float]:
        """Return calibrated probabilities of the labels of a question."""
        if kind not in self.kinds:
            return list(probabilities)
        return self.kinds[kind].applied(labels, probabilities)


def load(file: str, model_names: Collection[str]) -> Calibration:
    """Read a calibration file of a served model.

    Args:
        file: its path.
        model_names: names of the model, and its path.

    Raises:
        ServerConfigError: it cannot be read, or is that of another model.
    """
    at = f"dllm settings: {SETTING}: {file}"
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ServerConfigError(f"{at}: wanted a JSON file: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("types"), dict):
        raise ServerConfigError(f"{at}: wanted an object with model and types")
    if content.get("model") not in model_names:
        names = " or ".join(map(repr, model_names))
        raise ServerConfigError(f"{at}: model: given {content.get('model')!r}; wanted {names}")
    kinds = {name: _kind(at, name, value) for name, value in content["types"].items()}
    return Calibration(content, kinds)


def _kind(at: str, name: str, value: Any) -> KindCalibration:
    if name not in KINDS:
        raise ServerConfigError(f"{at}: types: given {name!r}; wanted {', '.join(KINDS)}")
    at = f"{at}: types.{name}"
    if not isinstance(value, dict):
        raise ServerConfigError(f"{at}: wanted an object with temperature")
    temperature: Any = value.get("temperature")
    bias: Any = value.get("bias") or {}
    if not _is_number(temperature) or temperature <= 0:
        raise ServerConfigError(f"{at}.temperature: given {temperature!r}; wanted a number above 0")
    if not isinstance(bias, dict) or not all(map(_is_number, bias.values())):
        raise ServerConfigError(f"{at}.bias: wanted an object of numbers by label")
    return KindCalibration(float(temperature), {label: float(b) for label, b in bias.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fit_temperature(examples: Sequence[Labelled]) -> float:
    """Return the temperature with the least negative log likelihood, by golden section search.

    The logarithm of the temperature is searched, where the likelihood has one maximum.
    """
    groups: dict[int, list[Labelled]] = {}
    for example in examples:
        groups.setdefault(len(example[0]), []).append(example)
    tables = [
        (np.log(np.maximum([p for p, _ in group], _LEAST)), np.array([right for _, right in group]))
        for group in groups.values()
    ]

    def loss(log_temperature: float) -> float:
        return sum(_loss_of(logits / math.exp(log_temperature), right) for logits, right in tables)

    return math.exp(_minimum(loss, math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)))


def _loss_of(logits: np.ndarray, right: np.ndarray) -> float:
    """Return the negative log likelihood of the right labels, summed over the rows of logits."""
    highest = logits.max(axis=1)
    total = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
    return float((total - logits[np.arange(len(right)), right]).sum())


def _minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_left, of_right = loss(left), loss(right)
    for _ in range(_SECTIONS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - _GOLDEN * (high - low)
            of_left = loss(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + _GOLDEN * (high - low)
            of_right = loss(right)
    return (low + high) / 2


def calibration_error(examples: Sequence[Labelled], temperature: float = 1.0) -> float:
    """Return the expected calibration error of the likeliest labels, in bins of equal width."""
    scaled, bins = KindCalibration(temperature), [[0, 0.0, 0.0] for _ in range(NUM_BINS)]
    for probabilities, right in examples:
        values = scaled.applied([""] * len(probabilities), probabilities)
        best = max(values)
        of_bin = bins[min(int(best * NUM_BINS), NUM_BINS - 1)]
        of_bin[0] += 1
        of_bin[1] += best
        of_bin[2] += values.index(best) == right
    return math.fsum(abs(sure - hits) for _, sure, hits in bins) / len(examples)
