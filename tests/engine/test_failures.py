# SPDX-License-Identifier: Apache-2.0
"""Failures inside the engine end requests, but never the engine."""

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.models import LLaDAReference

from tests.checkpoint_files import change_weights
from tests.checkpoints import random_prompt
from tests.engine.harness import (
    BLOCKS,
    Engine,
    Request,
    as_request,
    assert_decoded,
    clear_case,
    finish,
    record_steps,
    running,
    start,
)
from vllm.diffusion.engine.worker import model_loading, step_log
from vllm.diffusion.engine.worker.first_forwards import FirstForwards
from vllm.diffusion.memory import PoolExhaustedError
from vllm.diffusion.ops import HostCopy
from vllm.diffusion.sampling import LogitEditor


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.diffusion.decoding.semi_ar import SemiAutoregressive

    prompt, wanted = clear_case(model, 20, **BLOCKS)
    select = SemiAutoregressive.choose

    def fail_in_third_block(self: Any, candidates: Any) -> Any:
        if self.block == 2:
            raise RuntimeError("the rule broke")
        return select(self, candidates)

    with monkeypatch.context() as broken:
        broken.setattr(SemiAutoregressive, "choose", fail_in_third_block)
        (answer,) = engine.ask(as_request(prompt, **BLOCKS))
    assert answer.finish_reason == "error"
    assert answer.token_ids == wanted.ids[: len(answer.token_ids)]
    assert len(answer.token_ids) == 16
    assert "the rule broke" in answer.report["error"]
    assert engine.is_idle()
    (again,) = engine.ask(as_request(prompt, **BLOCKS))
    assert again.token_ids == wanted.ids


def test_a_rule_that_cannot_prepare_ends_its_own_request(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """A rule that fails while a batch is built must not end the other requests of the batch."""
    from vllm.diffusion.decoding.semi_ar import SemiAutoregressive

    cases = [clear_case(model, length, **BLOCKS) for length in (20, 33, 12)]
    asks = [as_request(prompt, **BLOCKS) for prompt, _ in cases]
    prepare = SemiAutoregressive.prepare

    def fail_in_third_block(self: Any, tokens: Any) -> Any:
        if self.prompt_length == 33 and self.block == 2:
            raise RuntimeError("the rule broke")
        return prepare(self, tokens)

    with monkeypatch.context() as broken:
        broken.setattr(SemiAutoregressive, "prepare", fail_in_third_block)
        first, ended, last = engine.ask(*asks)
        (alone,) = engine.ask(asks[1])
    assert_decoded([first, last], [cases[0][1], cases[2][1]])
    for answer in (ended, alone):
        assert answer.finish_reason == "error"
        assert "the rule broke" in answer.report["error"]
        assert len(answer.token_ids) >= 16
        assert answer.token_ids == cases[1][1].ids[: len(answer.token_ids)]
    assert engine.is_idle()
    assert_decoded(engine.ask(*asks), [decoded for _, decoded in cases])


def test_a_launch_that_fails_leaves_nothing_switched_on(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    runner = engine.runner

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device broke")

    with monkeypatch.context() as broken:
        broken.setattr(runner.model.layers[1], "mlp_stage", SimpleNamespace(feed_forward=fail))
        (answer,) = engine.ask(as_request(prompt, **BLOCKS))
    assert "the device broke" in answer.report["error"]
    assert engine.is_idle()
    assert runner.pool.used_bytes == runner.caches.reserved_bytes  # no frame is left
    (again,) = engine.ask(as_request(prompt, **BLOCKS))
    assert again.token_ids == wanted.ids


def test_one_with_which_no_step_can_be_launched_ends_alone(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)

    def fail(*_: Any, **_options: Any) -> Any:
        raise RuntimeError("the edits broke")

    monkeypatch.setattr(LogitEditor, "of", fail)
    good, bad = as_request(prompt, **BLOCKS), as_request(prompt, **BLOCKS, presence_penalty=1.0)
    first, ended, last = engine.ask(good, bad, good)
    assert_decoded([first, last], [wanted, wanted])
    assert ended.finish_reason == "error" and "the edits broke" in ended.report["error"]
    assert engine.is_idle()


def test_a_kernel_that_fails_while_the_host_waits_ends_the_requests_of_its_step(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """A GPU reports a failed kernel late. Requests that arrive afterwards are answered."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    wait, waits = HostCopy.wait, []

    def fail_at_fifth(self: HostCopy) -> Any:
        waits.append(self)
        if len(waits) == 5:
            raise RuntimeError("an illegal memory access was encountered")
        return wait(self)

    with monkeypatch.context() as broken:
        broken.setattr(HostCopy, "wait", fail_at_fifth)
        answers = engine.ask(*[as_request(prompt, **BLOCKS)] * 2)
        (after,) = engine.ask(as_request(prompt, **BLOCKS))
    for answer in answers:
        assert answer.finish_reason == "error"
        assert "illegal memory access" in answer.report["error"]
        assert answer.token_ids == wanted.ids[:8]
    assert_decoded([after], [wanted])
    assert engine.is_idle()


def test_a_shared_first_forward_that_cannot_be_sampled_is_computed_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {**BLOCKS, "ignore_eos": True, "temperature": 0.8}
    ask = Request(random_prompt(120), extra, {"temperature": 0.8, "n": 3, "seed": 5})
    (wanted,) = engine.outputs(ask)
    failed = []

    def fail(*arguments: Any) -> Any:
        failed.append(arguments)
        raise PoolExhaustedError("logits", 10, 5)

    monkeypatch.setattr(FirstForwards, "sampled", fail)
    (actual,) = engine.outputs(ask)
    assert len(failed) == 2
    assert [o.token_ids for o in actual.outputs] == [o.token_ids for o in wanted.outputs]
    assert engine.is_idle()


def test_who_was_to_read_the_prompt_of_one_that_failed_computes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel fails before the next requests start.
    monkeypatch.setattr(engine.loop, "runs_ahead", True)
    extra = {**BLOCKS, "ignore_eos": True, "cache": "frozen"}
    ask = Request(random_prompt(120), extra, {"temperature": 0.8, "n": 3, "seed": 5})
    (wanted,) = engine.outputs(ask)
    launch, launched = engine.runner.launch, []

    def fail_for_the_first(req_ids: list[str]) -> Any:
        launched.append(req_ids)
        if len(launched) > 1 and launched[0][0] in req_ids:
            raise PoolExhaustedError("logits", 10, 5)
        return launch(req_ids)

    monkeypatch.setattr(engine.runner, "launch", fail_for_the_first)
    (actual,) = engine.outputs(ask)
    assert [o.finish_reason for o in actual.outputs] == ["error", "length", "length"]
    assert [o.token_ids for o in actual.outputs][1:] == [o.token_ids for o in wanted.outputs][1:]
    assert engine.is_idle()


def test_a_request_that_cannot_start_ends_alone(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fails at its start, for any reason, does not end others of the same step."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    start = engine.runner.start

    def fail_for_one(new: Any) -> None:
        if len(new.prompt_token_ids) == 21:
            raise ValueError("the rule cannot begin")
        start(new)

    monkeypatch.setattr(engine.runner, "start", fail_for_one)
    bad, good = engine.ask(
        as_request(random_prompt(21), **BLOCKS),
        as_request(prompt, **BLOCKS),
    )
    assert bad.finish_reason == "error"
    assert bad.report["error"] == "ValueError: the rule cannot begin"
    assert_decoded([good], [wanted])
    assert engine.is_idle()


def test_a_full_disk_for_logs_ends_nothing(
    engine: Engine,
    model: LLaDAReference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients receive errors even if these cannot be logged."""
    caplog.set_level(logging.INFO, "vllm")  # other tests may have set another level
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    tried = []

    class FullDisk(logging.StreamHandler[Any]):
        def emit(self, record: logging.LogRecord) -> None:
            tried.append(record.levelname)
            super().emit(record)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device broke")

    handler = FullDisk(open("/dev/full", "w", buffering=1))  # noqa: SIM115
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    monkeypatch.setattr(step_log, "SLOW_STEP_MS", 0.0)
    try:
        (good,) = engine.ask(as_request(prompt, **BLOCKS))
        with monkeypatch.context() as broken:
            stage = SimpleNamespace(feed_forward=fail)
            broken.setattr(engine.runner.model.layers[1], "mlp_stage", stage)
            (bad,) = engine.ask(as_request(prompt, **BLOCKS))
    finally:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.stream.close()
    assert {"INFO", "ERROR"} <= set(tried)
    assert_decoded([good], [wanted])
    assert "the device broke" in bad.report["error"]
    assert engine.is_idle()


def test_a_request_that_no_validator_saw_is_refused_by_the_scheduler(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.diffusion.api import validator

    prompt, wanted = clear_case(model, 20, **BLOCKS)
    with monkeypatch.context() as unseen:
        unseen.setattr(validator, "validator_of", lambda _: None)
        bad, good = engine.ask(
            as_request(random_prompt(20), gen_length=32, steps=3, block_length=8),
            as_request(prompt, **BLOCKS),
        )
    assert bad.finish_reason == "error"
    assert bad.token_ids == []
    assert bad.report["error"].startswith("steps: given 3; ")
    assert good.token_ids == wanted.ids
    assert engine.is_idle()


def test_paused_requests_go_on_where_they_were(
    engine: Engine, model: LLaDAReference, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that runs at the pause is finished, and no other step is launched."""
    from vllm.v1.core.sched.interface import PauseState

    prompt, wanted = clear_case(model, 20, **BLOCKS)
    launches = record_steps(engine, monkeypatch)
    upstream = engine.llm.llm_engine
    start(engine, "paused", as_request(prompt, **BLOCKS))
    upstream.step()
    (canvas,) = engine.runner.canvases.values()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    upstream.step()
    upstream.step()
    assert canvas.num_forwards == len(launches) == 1 + runs_ahead
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(engine)["paused"].token_ids == wanted.ids
    assert canvas.num_forwards == wanted.num_forwards == len(launches)
    assert engine.is_idle()


def broken_weights(folder: Path, source: Path) -> Path:
    """Copy a checkpoint and set one norm of every layer to NaN."""
    shutil.copytree(source, folder)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "attn_norm" in name or "input_layernorm" in name:
                tensor.fill_(torch.nan)

    change_weights(folder, change)
    return folder


@pytest.mark.parametrize("family", ["mha", "dream", "sdar", "llada22"])
def test_weights_that_are_no_numbers_are_told_of(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start logs NaN weights, and every client receives an error, also for likelihoods."""
    folder = broken_weights(tmp_path / family, checkpoint(family))
    lengths: dict[str, Any] = {"gen_length": 16, "block_length": 8}
    score = {"positions": [3], "token_ids": [[5, 6]]}
    asks = [
        Request(random_prompt(9), lengths),
        Request(random_prompt(7), {**lengths, "temperature": 1.0, "seed": 3}),
        Request(random_prompt(7), {**lengths, "confidence_dtype": "float64"}),
        Request(random_prompt(5), {**lengths, "return_trajectory": True}, {"logprobs": 2}),
        *([] if family in ("sdar", "llada22") else [Request(random_prompt(8), {"score": score})]),
    ]
    reports: list[str] = []
    monkeypatch.setattr(
        model_loading.logger, "warning", lambda text, *values: reports.append(text % values)
    )
    with running(folder) as engine:
        for answers in (engine.ask(*asks), engine.ask(asks[0])):
            for answer in answers:
                assert answer.finish_reason == "error"
                assert "logits are NaN" in answer.report["error"]
                assert "\n" not in answer.report["error"]
        assert engine.is_idle()
    (line,) = reports
    assert "NaN or infinite" in line and "norm.weight" in line
