# SPDX-License-Identifier: Apache-2.0
"""Sampling: hidden states of masked rows become candidates."""

from vllm.diffusion.sampling.logprobs import Logprobs
from vllm.diffusion.sampling.noise import NoiseSource, PhiloxNoise
from vllm.diffusion.sampling.sampler import Choice, RowGroup, choose, joined, sample

__all__ = [
    "Choice",
    "Logprobs",
    "NoiseSource",
    "PhiloxNoise",
    "RowGroup",
    "choose",
    "joined",
    "sample",
]
