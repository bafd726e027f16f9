# SPDX-License-Identifier: Apache-2.0
"""Steps whose rows have LoRA adapters: adapters of requests, or the adapter for drafts.

The runner announces which slot each row uses; everything else is in `vllm.diffusion.adapters`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.diffusion.adapters.adapted_rows import StepSlots
from vllm.diffusion.adapters.known_adapters import KnownAdapters, Source
from vllm.diffusion.adapters.lora_flags import reader_of
from vllm.diffusion.adapters.matrices import Shard
from vllm.diffusion.adapters.slot_memory import SlotMemory, slot_bytes
from vllm.diffusion.config import slots_of
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.forward import ForwardPass
from vllm.diffusion.engine.worker.pool_budget import check_slots
from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
from vllm.diffusion.engine.worker.step_loop import StepLoop
from vllm.diffusion.memory.plan import readable
from vllm.diffusion.models.adapted_layers import install_adapters, layer_products
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.adapters.peft_files import AdapterReader
    from vllm.diffusion.core.samples import Samples
    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import (
        DiffusionRunnerOutput,
        DiffusionSchedulerOutput,
        NewCanvas,
    )
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.forward import BodyOutputs, Chunked
    from vllm.diffusion.engine.worker.runner import Outcomes
    from vllm.diffusion.engine.worker.sample_rows import SamplePart, SampleRows
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.memory import HostBuffers, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.lora.request import LoRARequest

logger = init_logger(__name__)


class AdaptingRunner(DiffusionModelRunner):
    """A runner whose requests may have adapters, or whose drafts have one.

    Args:
        loaded: the adapters of this rank.
    """

    def __init__(self, *args: Any, loaded: LoadedAdapters, **options: Any) -> None:
        super().__init__(*args, **options)
        self.adapters, self.reader = loaded
        assert self.model.adapting is not None
        self.adapted = self.model.adapting
        self._rehearses = False
        self.forward = AdaptingForward(self)
        if self.reader is not None:
            self.join(AdapterGuest)

    def chunks(
        self, rows: SampleRows, plan: Plan, host: HostBuffers, body: BodyOutputs | None = None
    ) -> Chunked[torch.Tensor]:
        work = super().chunks(rows, plan, host, body)
        return self.adapted.computing(rows.batch.slots or StepSlots(), work)

    def batch_of(self, items: Sequence[BatchItem]) -> StepBatch:
        batch = super().batch_of(items)
        of_items = tuple([self._slot_of(item) for item in batch.items])
        draft_slot, packing = self.adapted.draft_slot, batch.packing
        if draft_slot is None and of_items.count(None) == len(of_items):
            return batch
        slots = StepSlots(of_items, of_drafts=draft_slot)
        rows = slots.of_ranges(
            (item, end, _num_in_tail(packing.tails[item], first, stop))
            for (item, _, first, stop), end in zip(
                packing.sources, packing.ends.tolist(), strict=True
            )
        )
        return replace(batch, slots=slots._replace(rows=rows)) if rows.runs else batch

    def _slot_of(self, item: BatchItem) -> int | None:
        return 0 if self._rehearses else self.adapters.slot_of_request(item.req_id)

    def rehearsals(self) -> Iterator[None]:
        yield
        # Requests of the warm-up have no adapter. Graphs do not depend on contents, so an empty
        # slot serves.
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False


class AdaptingForward(ForwardPass):
    """A forward pass that samples rows with adapters."""

    def __init__(self, runner: AdaptingRunner) -> None:
        super().__init__(runner.model, runner.pool, runner.caches, runner.ranks)
        self._runner = runner

    def sampled(
        self,
        rows: SampleRows,
        part: SamplePart[Array],
        positions: torch.Tensor,
        hidden: torch.Tensor,
    ) -> Samples[torch.Tensor]:
        slots = (rows.batch.slots or StepSlots()).of_pieces(part.pieces, part.num_drafts)
        with self._runner.adapted.sampling(slots):
            return super().sampled(rows, part, positions, hidden)


class AdapterGuest(StepGuest):
    """Gives each request its adapter from its start to its end."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        assert isinstance(runner, AdaptingRunner) and runner.reader is not None
        self._reader, self._adapters = runner.reader, runner.adapters

    def started(self, canvas: Canvas, new: NewCanvas) -> None:
        if new.adapter is not None:
            self._adapters.start(new.req_id, source_of(new.adapter, self._reader))

    def removed(self, req_id: str) -> None:
        self._adapters.end(req_id)

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        if any(item.req_id in self._adapters.running for item in step.batch.items):
            self._adapters.news.num_steps += 1

    def output_fields(self) -> dict[str, Any]:
        fields, report = dict[str, Any](), self._adapters.take_report()
        if report is not None:
            fields["adapter_report"] = report
        if self._adapters.renewed:
            fields["renewed_adapters"], self._adapters.renewed = self._adapters.renewed, {}
        return fields

    def status(self) -> dict[str, Any]:
        return {"adapters": self._adapters.status()}


class AdaptingLoop(StepLoop):
    """A loop that records which adapters waiting requests have."""

    def execute(self, message: DiffusionSchedulerOutput) -> DiffusionRunnerOutput:
        runner = self._runner
        assert isinstance(runner, AdaptingRunner)
        starting = {new.adapter.lora_int_id for new in message.admitted if new.adapter is not None}
        runner.adapters.awaited = message.awaited_adapters | starting
        runner.adapters.forget_removed()
        return super().execute(message)


def _num_in_tail(tail: int | None, first: int, stop: int) -> int:
    """Return how many of the positions from `first` to `stop` - 1 are in a tail."""
    return 0 if tail is None else max(stop - max(first, tail), 0)


def source_of(request: LoRARequest, reader: AdapterReader) -> Source:
    """Return where the adapter of a request comes from.

    Trainers send subclasses with the tensors (`lora_tensors`) and the configuration
    (`peft_config`) in memory.
    """
    name, path = request.lora_name, request.lora_path
    tensors = getattr(request, "lora_tensors", None)
    if tensors is None:
        return Source(request.lora_int_id, name, path, partial(reader.read, name, path))
    config = getattr(request, "peft_config", None) or {}
    read = partial(reader.take, name, config, tensors)
    return Source(request.lora_int_id, name, path, read, has_tensors=True)


class LoadedAdapters(NamedTuple):
    """The adapters of a worker.

    Attributes:
        known: the adapters of requests.
        reader: reads further adapters; None if requests have none.
    """

    known: KnownAdapters
    reader: AdapterReader | None


def load_adapters(vllm_config: VllmConfig, model: DiffusionModel) -> LoadedAdapters | None:
    """Allocate the slots of a loaded model, with the adapter for drafts; None without adapters."""
    sizes = slots_of(vllm_config)
    if sizes is None:
        return None
    device = model.rotary_frequencies.device
    shard = Shard(
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        slice(model.vocab_start, model.vocab_start + model.num_columns),
    )
    numbers = sizes.num_slots, sizes.max_rank
    can_release = vllm_config.model_config.enable_sleep_mode
    # Sleep could not release slots within a weight.
    products = {} if can_release else layer_products(model)
    num_bytes = slot_bytes(sizes.matrices, *numbers, shard, model.dtype, products)
    check_slots(sizes, num_bytes, device, vllm_config.cache_config.gpu_memory_utilization)
    slots = SlotMemory(
        sizes.matrices,
        *numbers,
        shard,
        dtype=model.dtype,
        device=device,
        can_release=can_release,
        products=products,
    )
    draft_slot = None if sizes.draft is None else sizes.num_requested
    install_adapters(model, slots, draft_slot)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the weights that moved
    logger.info("adapters: %d slots of rank %d, %s each", *numbers, readable(num_bytes))
    if sizes.draft is not None and draft_slot is not None:
        adapter, path = sizes.draft.read(model.config, model.dtype), sizes.draft.path
        slots.write(draft_slot, adapter)
        logger.info("drafts use the adapter of rank %d in %s", adapter.rank, path)
    known = KnownAdapters(sizes.num_known, slots, sizes.num_requested)
    return LoadedAdapters(known, reader_of(vllm_config))
