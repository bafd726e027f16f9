# SPDX-License-Identifier: Apache-2.0
"""Chunks, head groups and rows in host memory change no token and use the predicted memory."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from make_dummy_checkpoint import write_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.checkpoints import random_prompt
from tests.engine.cases import CUT, PLANS, SHORT, mixed_asks
from tests.engine.harness import Engine, Request, record_plans, running, shrink, tokens
from vllm.diffusion.core.stages import row_bytes
from vllm.diffusion.memory.footprint import Footprint
from vllm.diffusion.memory.plan import ChunkRows, Plan, Residency

FAMILIES = ["gqa", "bias", "dream", "moe_dense_mix"]


@pytest.fixture(scope="module", params=FAMILIES)
def whole(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, list[tuple[list[int], int | None]]]]:
    """Start an engine and return it with its answers without chunks."""
    with running(checkpoint(request.param)) as engine:
        wanted = tokens(engine.ask(*mixed_asks()))
        assert all(len(ids) == 16 for ids, _ in wanted)
        yield engine, wanted


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_mixed_batch_gives_the_same_tokens(
    whole: tuple[Engine, list[tuple[list[int], int | None]]],
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, wanted = whole
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    assert tokens(engine.ask(*mixed_asks())) == wanted
    assert engine.is_idle()
    assert engine.runner.pool.used_bytes == engine.runner.caches.reserved_bytes


def test_memory_of_other_steps_is_given_back_before_a_step_allocates(
    whole: tuple[Engine, list[tuple[list[int], int | None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's cached memory is freed before the `temporaries` of a step, not within them."""
    (engine, _), given_back = whole, list[tuple[str, bool]]()
    pool, account, is_within = engine.runner.pool, engine.runner.account, [False]

    @contextmanager
    def temporaries() -> Iterator[None]:
        is_within[0] = True
        yield
        is_within[0] = False

    def note(name: str) -> None:
        given_back.append((name, is_within[0]))

    for name in ("trim", "drop_unused"):
        monkeypatch.setattr(pool, name, functools.partial(note, name))
    monkeypatch.setattr(pool, "temporaries", temporaries)
    monkeypatch.setattr(account, "_most_rows", 60)
    monkeypatch.setattr(account, "_last_sizes", ())
    for length in (20, 50, 40, 60):  # prompt tokens; the canvas adds 16 rows
        engine.ask(Request(random_prompt(length), SHORT))
    assert given_back == [("drop_unused", False)] * 2
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: CUT)
    engine.ask(Request(random_prompt(60), SHORT))
    assert given_back[2:] == [("trim", False)]


def test_every_head_may_be_a_group(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(checkpoint("mha")) as engine:
        wanted = tokens(engine.ask(*mixed_asks()))
        plan = Plan(Residency(False, 4, host_residual=True), CUT.rows)
        monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
        assert tokens(engine.ask(*mixed_asks())) == wanted


# ---- predicted and measured ----

LONG = {**SHORT, "gen_length": 512, "block_length": 512, "steps": 2}


@pytest.mark.parametrize("family", ["gqa", "dream", "moe_dense_mix"])
def test_measured_peaks_are_the_predicted_ones(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured peaks match the plan, from a pool with room for a whole step to a small one."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    requests = [
        Request(random_prompt(512), LONG),
        Request(random_prompt(200), {**LONG, "cfg_scale": 1.0}),
    ]
    wanted: list[tuple[list[int], int | None]] = []
    seen = set()
    with running(checkpoint(family), max_model_len=2048, max_num_batched_tokens=4096) as engine:
        largest = 0
        for share in (1.0, 0.5, 0.25):
            if largest:
                shrink(engine.runner, int(share * largest))
            actual = record_plans(engine, monkeypatch)
            (answer,) = engine.ask(requests[0])
            wanted = wanted or tokens([answer])
            assert tokens([answer]) == wanted
            largest = largest or max(usage.peak_bytes for _, usage in actual)
            for plan, usage in actual:
                seen.add((plan.is_whole(1024), plan.layout.is_streamed))
                assert usage.peak_bytes <= engine.runner.pool.budget_bytes
                assert usage.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
                assert 0 < usage.average_bytes <= usage.peak_bytes
        assert (True, False) in seen and (False, True) in seen
        actual = record_plans(engine, monkeypatch)
        engine.ask(*requests)
        for plan, usage in actual:
            assert usage.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.05)


# ---- all memory, including memory outside the pool ----


class LiveBytes(TorchDispatchMode):
    """Measures the peak bytes of tensors that are made within it, whoever allocated them.

    Args:
        weights: tensors that existed before.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._weights = {StorageWeakRef(weight.untyped_storage()) for weight in weights}
        self._live: dict[StorageWeakRef, int] = {}  # bytes of each storage
        self._total = 0  # bytes, including storages that were freed since the last clean-up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        if self._total > self.peak:
            self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
            self._total = sum(self._live.values())
            self.peak = max(self.peak, self._total)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        actual = StorageWeakRef(storage)
        if actual not in self._live and actual not in self._weights:
            self._live[actual] = storage.nbytes()
            self._total += storage.nbytes()


@pytest.mark.parametrize(("host_residual", "head_groups"), [(False, 1), (True, 2)])
def test_nothing_grows_with_the_sequence_but_what_is_resident(
    head_groups: int,
    host_residual: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the planned resident buffers grow with the sequence.

    Chunks are short here, so that any other buffer of all rows would exceed the bound. The smallest
    of them, the rotary tables, would take an eighth of a MiB.
    """
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    prompt, request = (
        random_prompt(960),
        {**SHORT, "gen_length": 64, "block_length": 64, "steps": 1},
    )
    with running(checkpoint("mha"), max_model_len=1024) as engine:
        footprint = Footprint(engine.runner.planner.shape)
        layout = Residency(False, head_groups, host_residual)
        planned = 1024 * row_bytes(footprint.resident(layout))
        plan = Plan(layout, ChunkRows(32, 32, 32, 5))
        monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
        with LiveBytes(engine.runner.model.parameters()) as live:
            engine.ask(Request(prompt, request))
        on_host = engine.runner.host.num_bytes
        assert on_host == (1024 * 256 * min(head_groups, 2) if host_residual else 0)
        assert planned <= live.peak - on_host <= planned + 120_000


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("use_vmm", ["0", "1"])
def test_plans_on_a_gpu_give_the_same_tokens(
    use_vmm: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, pinned memory and buffers, whose layout changes with every plan, change no token."""
    monkeypatch.setenv("VLLM_USE_VMM", use_vmm)
    with running(checkpoint("mha"), enforce_eager=True) as engine:
        wanted = tokens(engine.ask(*mixed_asks()))
        for plan in PLANS.values():
            with monkeypatch.context() as planned:
                planned.setattr(engine.runner.planner, "plan", lambda *_, plan=plan: plan)
                assert tokens(engine.ask(*mixed_asks())) == wanted
        assert tokens(engine.ask(*mixed_asks())) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("use_vmm", ["0", "1"])
@pytest.mark.parametrize("uses_host", ["0", "1"])
def test_long_steps_on_a_gpu_stay_within_the_pool(
    use_vmm: str, uses_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of the LLaDA-8B shape with 32,768 tokens fit into 32 KiB and 16 KiB per token."""
    length = 32_768
    kibibytes = 16 if uses_host == "1" else 32
    for name, value in {
        "VLLM_USE_VMM": use_vmm,
        "VLLM_USE_HOST_RESIDUAL": uses_host,
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_ACTIVATION_POOL_SIZE_BYTES": str(kibibytes * 1024 * length),
    }.items():
        monkeypatch.setenv(name, value)
    write_checkpoint(tmp_path, "llada", num_layers=2)
    settings = {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": length}
    with running(tmp_path, **settings, enforce_eager=True) as engine:
        actual = record_plans(engine, monkeypatch)
        half = length // 2
        parameters = {**SHORT, "gen_length": half, "block_length": half, "steps": 2}
        # Most tokens of the dummy checkpoint have no text. For each of them, upstream's detokenizer
        # decodes the whole prompt again, which takes half a minute.
        (answer,) = engine.ask(Request([5] * half, parameters, {"detokenize": False}))
        assert len(answer.token_ids) == half
        for plan, usage in actual:
            assert plan.layout.host_residual == (uses_host == "1")
            assert usage.peak_bytes <= engine.runner.pool.budget_bytes
            assert usage.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.1)
            assert 0 < usage.average_bytes <= usage.peak_bytes
            # This compares two predictions, because the measured average is weighted by time, which
            # depends on the load of the machine.
            assert plan.predicted_peak_bytes <= 1.25 * plan.predicted_average_bytes
