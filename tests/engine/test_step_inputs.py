# SPDX-License-Identifier: Apache-2.0
"""Inputs of a step keep their field names on their way to the device."""

import numpy as np
import pytest
import torch

from tests.pages import NO_PAGES
from vllm.diffusion import ops
from vllm.diffusion.core.spans import AttentionLayout, Span, lay_out
from vllm.diffusion.engine.worker.batch import StepInputs
from vllm.diffusion.engine.worker.step_graphs import Bucket

SPANS = [Span(0, 3, 10, 17), Span(3, 4, 2, 2), Span(4, 9, 0, 40)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_arrive_under_the_names_that_they_left_under(device: str) -> None:
    inputs = Bucket(5, 2, is_cached=True).inputs(NO_PAGES, 64, has_blocks=True)
    ((layout,),) = inputs.layouts
    names = ("query_ends", "key_starts", "key_counts", "block_lengths", "firsts")
    arrays = [*inputs[:3], *(getattr(layout, name) for name in names)]
    for number, array in enumerate(arrays):
        array[...] = number
    other = np.arange(7)
    actual, (alone, kept) = ops.to_device((inputs, (other, "kept")), torch.device(device))
    assert isinstance(actual, StepInputs) and isinstance(actual.layouts[0][0], AttentionLayout)
    ((arrived,),) = actual.layouts
    assert (arrived.pages, arrived.max_keys, arrived.rows) == (NO_PAGES, 64, slice(None))
    tensors = [*actual[:3], *(getattr(arrived, name) for name in names)]
    for number, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        assert tensor.device.type == device
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.tolist() == [number] * array.size
    assert (alone.tolist(), kept) == (other.tolist(), "kept")
    assert ops.to_device((), torch.device(device)) == ()


def test_runs_are_laid_out_by_the_place_of_their_keys() -> None:
    """The layout orders spans by their keys, whatever the order of their queries."""
    cached = [Span(100, 102, 64, 70, in_pages=True), Span(7, 8, 0, 9, 4, 8, in_pages=True)]
    own, paged = lay_out([*SPANS, *cached], NO_PAGES)
    wanted = AttentionLayout.of(SPANS, "cpu")
    for name in ("query_ends", "key_starts", "key_counts"):
        assert getattr(own, name).tolist() == getattr(wanted, name).tolist()
    assert (own.max_queries, own.max_keys, own.spans) == (5, 40, SPANS)
    assert (own.rows, own.pages, own.block_lengths, own.firsts) == (slice(0, 9), None, None, None)
    assert (paged.rows, paged.pages, paged.query_ends.tolist()) == (
        slice(9, 12),
        NO_PAGES,
        [0, 2, 3],
    )
    assert (paged.block_lengths.tolist(), paged.firsts.tolist()) == ([0, 4], [0, 8])
