# SPDX-License-Identifier: Apache-2.0
"""What the device is told of a step keeps its names on the way."""

import numpy as np
import pytest
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.spans import AttentionLayout, PageTable, Span
from vllm.diffusion.engine.worker.batch import SpanGroup
from vllm.diffusion.engine.worker.inputs import (
    SequenceBounds,
    StepInputs,
    bounds_of,
    empty,
    layout_of,
)

SPANS = (Span(0, 3, 10, 17), Span(3, 4, 2, 2), Span(4, 9, 0, 40))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_arrive_under_the_names_that_they_left_under(device: str) -> None:
    inputs = empty(num_rows=5, num_slots=2, num_sequences=3)
    arrays = [inputs.token_ids, inputs.positions, inputs.slot_mapping, *inputs.bounds[0][0]]
    for number, array in enumerate(arrays):
        array[...] = number
    other = np.arange(7)
    found, (alone,) = ops.to_device((inputs, (other,)), torch.device(device))
    assert isinstance(found, StepInputs) and isinstance(found.bounds[0][0], SequenceBounds)
    bounds = found.bounds[0][0]
    tensors = [found.token_ids, found.positions, found.slot_mapping]
    tensors += [*bounds]
    for number, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        assert tensor.device.type == device
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.tolist() == [number] * array.size
    assert alone.tolist() == other.tolist()
    assert ops.to_device((), torch.device(device)) == ()


@pytest.mark.parametrize("is_cached", [False, True])
def test_bounds_of_a_span_group_are_those_of_its_layout(is_cached: bool) -> None:
    group = SpanGroup(slice(0, 9), SPANS, is_cached)
    pages = PageTable(torch.zeros(1, dtype=torch.int32), 64)
    wanted = AttentionLayout.of(SPANS, "cpu")
    given = layout_of(group, ops.to_device(bounds_of(group), torch.device("cpu")), pages)
    assert given.query_ends.tolist() == wanted.query_ends.tolist()
    assert given.key_starts.tolist()[:-1] == wanted.key_starts.tolist()[:-1]  # the last is not read
    assert given.key_counts.tolist() == wanted.key_counts.tolist()
    assert (given.max_queries, given.max_keys, given.spans) == (5, 40, SPANS)
    assert given.pages is (pages if is_cached else None)
