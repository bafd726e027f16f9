# SPDX-License-Identifier: Apache-2.0
"""Sampling: hidden states of sample rows become candidates."""

from vllm.diffusion.sampling.logprobs import Logprobs
from vllm.diffusion.sampling.row_group import RowGroup
from vllm.diffusion.sampling.sampler import joined, sample, sample_group

__all__ = ["Logprobs", "RowGroup", "joined", "sample", "sample_group"]
