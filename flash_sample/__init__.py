# SPDX-License-Identifier: Apache-2.0
"""Sampling of diffusion language models: from rows of logits to candidate tokens and their scores.

Importing never fails: without the compiled module (`is_built`) everything runs in PyTorch.
"""

from ._ops import entropy, entropy_witht, is_built, low_confidence, low_confidence_partial
from .reference import Partial, confidence, merge

__all__ = [
    "Partial",
    "confidence",
    "entropy",
    "entropy_witht",
    "is_built",
    "low_confidence",
    "low_confidence_partial",
    "merge",
]
