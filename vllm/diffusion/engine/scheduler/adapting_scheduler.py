# SPDX-License-Identifier: Apache-2.0
"""The scheduler of engines with LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.engine.scheduler.adapter_slots import AdapterSlots
from vllm.diffusion.engine.scheduler.scheduler import DiffusionScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.diffusion.engine.messages import DiffusionRunnerOutput, DiffusionSchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs


class AdaptingScheduler(DiffusionScheduler):
    """A scheduler whose requests may have adapters.

    Attributes:
        adapters: the gate of these requests.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **options: Any) -> None:
        super().__init__(vllm_config, *args, **options)
        assert vllm_config.lora_config is not None
        self.adapters = AdapterSlots(vllm_config.lora_config.max_loras)
        # Pages must not be reserved for a request that waits for a slot.
        self._gates = (self.adapters, *self._gates)

    @property
    def awaited_adapters(self) -> frozenset[int]:
        """Numbers of the adapters of waiting requests."""
        return self.adapters.awaited(self._waiting.requests)

    @property
    def ended(self) -> frozenset[str]:
        """Requests whose end the workers do not know yet."""
        return frozenset(self._finished_req_ids)

    def schedule(self, throttle_prefills: bool = False) -> DiffusionSchedulerOutput:
        message = super().schedule(throttle_prefills)
        message.awaited_adapters = self.awaited_adapters
        return message

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_runner_output: DiffusionRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.renewed_adapters:
            self._renew(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _renew(self, done: DiffusionRunnerOutput) -> None:
        """Invalidate the cached results of requests whose adapter was replaced."""
        items = [*self._running.values(), *self._waiting.requests]
        renewed = self.adapters.renew(items, done.renewed_adapters)
        for gate in self._gates:
            gate.adapters_renewed(renewed)
        for item in renewed:
            if not item.is_paged:
                item.next_rows = done.invalidated.get(item.req_id, item.next_rows)
