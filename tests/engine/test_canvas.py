# SPDX-License-Identifier: Apache-2.0
"""Tests a request between two steps: its next forward pass, and the report about its commits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.pages import NO_PAGES, store_with
from vllm.diffusion import ops
from vllm.diffusion.decoding import Candidates
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.worker.batch import build_batch
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.engine.worker.sample_rows import SampleRows
from vllm.diffusion.engine.worker.step_graphs import Bucket, fill
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA, SDAR, Family
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

MASK, EOS = 95, 94
PROMPT = [2 + i % 90 for i in range(8)]


def canvas(family: Family, **parameters: Any) -> Canvas:
    """Return the canvas of a request with 8 prompt positions and 16 masked positions."""
    ids = SpecialIds(mask=MASK, eos=EOS, eot=None, stop=frozenset({EOS}))
    model = ServedModel(family=family, ids=ids, max_model_len=4096, vocab_size=96)
    parameters = {"gen_length": 16, "block_length": 4, "seed": 0, **parameters}
    decided = decision.decide(fields.canonical(parameters), model, PROMPT)
    return Canvas(NewCanvas("a", PROMPT, decided), visibility=family.visibility)


class TorchCalls(TorchFunctionMode):
    """Records the names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("algorithm", ["low_confidence_dynamic", "semi_ar", "joint_threshold"])
def test_no_tensors_stand_between_candidates_and_the_next_launch(algorithm: str) -> None:
    """A tensor costs far more than an array, and there may be hundreds of requests."""
    _, keys = store_with(24, 24)
    made = [canvas(SDAR, algorithm=algorithm, cache="exact") for _ in keys]
    for one, cache in zip(made, keys, strict=True):
        one.assign(cache, 8)
    batch = build_batch(made, 0, NO_PAGES)
    inputs = Bucket(16, 4, is_cached=True).inputs(NO_PAGES, 24, has_blocks=True)
    sampled = ops.HostCopy(torch.rand(3, batch.num_sampled, dtype=torch.float64))
    with TorchCalls() as calls:
        for one, actual in zip(made, SampleRows(batch).candidates_of(sampled), strict=True):
            one.commit(actual)
        assert all(one.measure_next_forward().rows == 4 for one in made)
        fill(inputs, build_batch(made, 0, NO_PAGES))
    assert calls.names == ["numpy"]


def test_a_step_lies_where_the_one_before_did_while_its_windows_are_the_same() -> None:
    _, keys = store_with(24, 24)
    made = [canvas(SDAR, algorithm="semi_ar", steps_per_block=2, cache="exact") for _ in keys]
    for one, cache in zip(made, keys, strict=True):
        one.assign(cache, 8)
    batches = [build_batch(made, 0, NO_PAGES)]
    for _ in range(2):
        for one, target in zip(made, batches[-1].targets, strict=True):
            size = target.eligible.size
            one.commit(Candidates(target.eligible, np.full(size, 7), np.linspace(0.9, 0.5, size)))
        batches.append(build_batch(made, 0, NO_PAGES, batches[-1].packing))
    first, second, third = batches
    assert second.packing is first.packing
    assert third.packing is not first.packing  # the block is finished
    assert second.token_ids.tolist() == [7, 7, MASK, MASK] * 2
    assert third.token_ids.tolist() == [*[7] * 4, *[MASK] * 4] * 2
    alone = build_batch(made[:1], 0, NO_PAGES, third.packing)
    assert alone.items == (made[0],) and alone.positions.tolist() == [*range(8, 16)]


def test_a_packing_belongs_to_the_rows_that_only_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts may have another adapter, and a graph gets the slots of its rows with a packing."""
    made = canvas(SDAR, algorithm="semi_ar", steps_per_block=2, cache="none")
    target, window = made.next_forward()
    tails = iter([None, 9, 9, 10])
    monkeypatch.setattr(
        made, "next_forward", lambda: (target._replace(tail_start=next(tails)), window)
    )
    packings = [build_batch([made], 0, NO_PAGES).packing]
    for _ in range(3):
        packings.append(build_batch([made], 0, NO_PAGES, packings[-1]).packing)
    first, second, third, fourth = packings
    assert first is not second and second is third and third is not fourth


def test_the_next_forward_changes_with_the_block_and_with_what_is_kept() -> None:
    _, (keys,) = store_with(24)
    made, seen = canvas(SDAR, algorithm="semi_ar", steps_per_block=4, cache="exact"), []
    made.assign(keys, 8)
    for step in range(6):
        if step == 5:  # its pages were taken away, and the new pages hold fewer positions
            made.assign(keys, 4)
        rows = made.measure_next_forward().rows
        target, window = made.next_forward()
        seen.append((rows, window.forward.window))
        actual = np.full(target.eligible.size, 7), np.linspace(0.9, 0.5, target.eligible.size)
        made.commit(Candidates(target.eligible, *actual))
    assert seen == [*[(4, range(8, 12))] * 4, (8, range(8, 16)), (12, range(4, 16))]


def test_a_report_tells_what_the_commit_left_whatever_is_filled_before_it() -> None:
    """A report lacks the tokens with which `early_stop` fills the canvas for the next step."""
    parameters = {"algorithm": "local_leap", "early_stop": True, "stream_canvas": True}
    made = canvas(LLADA, **parameters, threshold=0.5)
    positions = made.begin().eligible
    made.commit(Candidates(positions, np.full(4, EOS), np.full(4, 0.9)))
    made.begin()
    assert made.tokens.tolist() == [*PROMPT, *[EOS] * 16]
    report = made.report()
    assert report.num_committed == 4 and report.canvas is not None
    assert list(report.canvas.committed) == [1] * 4 + [0] * 12


def test_a_report_tells_of_all_commits_since_the_one_before() -> None:
    made, actual = canvas(LLADA, block_length=1, steps=16, stream_canvas=True), []
    for count in (1, 3, 0, 2):
        for _ in range(count):
            positions = made.begin().eligible
            made.commit(Candidates(positions, 20 + positions, np.full(positions.size, 0.5)))
        actual.append(made.report())
    assert [result.new_token_ids for result in actual] == [[28], [29, 30, 31], [], [32, 33]]
    assert [result.num_steps for result in actual] == [1, 4, 4, 6]
    assert [result.canvas and result.canvas.step for result in actual] == [1, 4, 4, 6]


def test_a_canvas_tells_what_guesses_have_committed() -> None:
    """The first commit of a report comes from the forward pass itself, later ones from drafts."""
    parameters = {
        "block_length": 1,
        "steps": 16,
        "stream_canvas": True,
        "num_speculative_states": 3,
    }
    made = canvas(LLADA, **parameters)
    for count in (1, 3, 2):
        for _ in range(count):
            positions = made.begin().eligible
            made.commit(Candidates(positions, 20 + positions, np.full(positions.size, 0.5)))
        view = made.report().canvas
    assert view is not None and view.guessed is not None
    assert list(view.guessed)[:7] == [0, 0, 1, 1, 0, 1, 0]
    plain = canvas(LLADA, **{**parameters, "num_speculative_states": 0}).report().canvas
    assert plain is None or plain.guessed is None


def test_a_token_keeps_the_probability_with_which_it_was_committed() -> None:
    """A token keeps its probability if an editing rule proposes another token and rejects it."""
    made = canvas(SDAR, algorithm="joint_threshold", stream_canvas=True, editing_threshold=0.8)
    for tokens, scores in (([7] * 4, [0.99] * 4), ([5] * 4, [0.9, 0.6, 0.6, 0.6])):
        positions, logprobs = made.begin().eligible, np.log(scores)
        rows = np.stack([logprobs, np.ones(4)] * 2)
        actual = np.array(tokens), np.array(scores)
        made.commit(Candidates(positions, *actual, logprobs=rows))
    view = made.report().canvas
    assert view is not None
    assert np.frombuffer(view.token_ids, "<i4")[:4].tolist() == [5, 7, 7, 7]
    assert np.frombuffer(view.confidence, "<f4")[:4] == pytest.approx([0.9, 0.99, 0.99, 0.99])


@pytest.mark.parametrize("cache", ["none", "dual", "prefix", "frozen"])
def test_a_promise_of_equal_bits_names_its_exception(cache: str) -> None:
    """An approximate cache that is computed again too early may change the answer."""
    made, promise = canvas(LLADA, cache=cache, steps=16), {"batch_invariant": True}
    made.facts |= promise
    assert made.report().report == promise
    made.invalidate()
    exception = {} if cache == "none" else {"refreshed_early": True}
    assert made.report().report == promise | exception
    plain = canvas(LLADA, cache=cache, steps=16)
    plain.invalidate()
    assert plain.report().report == {}
