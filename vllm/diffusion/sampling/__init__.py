# SPDX-License-Identifier: Apache-2.0
"""Sampling: turns hidden states of sample rows into candidates."""

from vllm.diffusion.sampling.alone import sample_group
from vllm.diffusion.sampling.editing import LogitEditor, RowEdits
from vllm.diffusion.sampling.row_group import RowGroup
from vllm.diffusion.sampling.sampler import sample

__all__ = ["LogitEditor", "RowEdits", "RowGroup", "sample", "sample_group"]
