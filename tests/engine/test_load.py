# SPDX-License-Identifier: Apache-2.0
"""Each of many mixed requests, too many for one step, gets the answer that it gets alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, record_steps, running, sampling_params

BLOCKS: dict[str, Any] = {"gen_length": 16, "block_length": 8}
KINDS: tuple[dict[str, Any], ...] = (
    {**BLOCKS, "algorithm": "semi_ar", "steps": 8},
    {**BLOCKS, "algorithm": "semi_ar", "steps": 16, "cfg_scale": 1.0},
    {**BLOCKS, "algorithm": "semi_ar", "steps": 4, "temperature": 1.0},
    {**BLOCKS, "algorithm": "semi_ar", "steps": 16, "remasking": "random"},
    {"gen_length": 32, "block_length": 16, "threshold": 0.5, "cache": "dual"},
    {**BLOCKS, "threshold": 0.6, "cache": "prefix"},
    {**BLOCKS, "algorithm": "factor", "cache": "dual"},
    {**BLOCKS, "algorithm": "local_leap"},
    {**BLOCKS, "algorithm": "entropy_threshold", "threshold": 1.0},
    {**BLOCKS, "algorithm": "hierarchy"},
    {**BLOCKS, "algorithm": "multi_block", "cache": "delayed"},
    {"gen_length": 12, "algorithm": "dream", "steps": 6},
    {"gen_length": 8, "algorithm": "semi_ar", "steps": 2, "force_single_batch": True},
)
# Prompt tokens of every fourth request, which hardly fits into a step with others.
LONG = 180
ROOM: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 12}


@dataclass
class Sent:
    """A request of the crowd.

    Attributes:
        step: the engine step at which the request is sent.
        streams: whether outputs are deltas, instead of one final output.
        leaves: steps after which the client disconnects, or None.
    """

    ask: Request
    step: int
    streams: bool
    leaves: int | None
    token_ids: list[int] = field(default_factory=list)
    num_ends: int = 0


def crowd(num_requests: int) -> list[Sent]:
    """Return the same requests every time. One in ten clients disconnects."""
    draw = random.Random(7)
    results = []
    for i in range(num_requests):
        length = LONG if i % 4 == 3 else draw.randint(1, 60)
        parameters = {**KINDS[i % len(KINDS)], "seed": i, "ignore_eos": draw.random() < 0.7}
        ask = Request(random_prompt(length, seed=i), parameters)
        leaves = draw.randint(0, 10) if draw.random() < 0.1 else None
        results.append(Sent(ask, draw.randint(0, 15), draw.random() < 0.5, leaves))
    return results


def serve(engine: Engine, requests: list[Sent]) -> None:
    """Send the requests, step until none is left, and record every output."""
    from vllm.sampling_params import RequestOutputKind

    upstream = engine.llm.llm_engine
    internal: dict[int, str] = {}
    step = 0
    while upstream.has_unfinished_requests() or len(internal) < len(requests):
        for i, sent in enumerate(requests):
            if sent.step == step:
                sampling = sampling_params(sent.ask)
                streamed = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
                sampling.output_kind = streamed[0 if sent.streams else 1]
                prompt: Any = {"prompt_token_ids": sent.ask.prompt}
                internal[i] = upstream.add_request(str(i), prompt, sampling)
            if sent.leaves is not None and step == sent.step + sent.leaves:
                upstream.abort_request([internal[i]], internal=True)
        for output in upstream.step():
            sent = requests[int(output.request_id)]
            sent.token_ids += output.outputs[0].token_ids
            sent.num_ends += output.finished
        step += 1
        assert step < 5000, "some requests never end"


# With 52 requests, each of the 13 kinds has a long prompt once.
@pytest.mark.parametrize(("case", "num_requests"), [("mha", 52), ("dream", 20)])
def test_a_crowd_is_served_as_if_each_were_alone(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    num_requests: int,
) -> None:
    requests = crowd(num_requests)
    with running(checkpoint(case), **ROOM) as engine:
        with monkeypatch.context() as patch:
            steps = record_steps(engine, patch)
            serve(engine, requests)
        assert engine.is_idle()
        stayed = [sent for sent in requests if sent.leaves is None]
        assert {sent.num_ends for sent in stayed} == {1}  # no request is lost or answered twice
        assert max(len(step) for step in steps) > 4  # requests do share steps
        for sent in requests:
            (alone,) = engine.ask(sent.ask)
            if sent.leaves is None:
                assert sent.token_ids == alone.token_ids, sent
            else:
                assert sent.token_ids == alone.token_ids[: len(sent.token_ids)], sent
