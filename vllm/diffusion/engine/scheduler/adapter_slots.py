# SPDX-License-Identifier: Apache-2.0
"""Requests with LoRA adapters start only if there is a slot for their adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.engine.scheduler.gates import AdmissionGate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor


class AdapterSlots(AdmissionGate):
    """Gate of requests with adapters: all running requests together use at most `num_slots`.

    A request holds the slot of its adapter from its start to its end, whether it is preempted,
    paused or waits for its turn.
    """

    lacks: WaitsFor = "adapter"
    outlasts_growth = True

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._holders: dict[RequestState, int] = {}  # numbers of their adapters
        # Generations of adapters that were replaced, by their numbers.
        self._generations: dict[int, int] = {}

    def arrived(self, item: RequestState) -> bool:
        number = _number_of(item)
        if number is None:
            return False
        self._use(item, number)
        return True

    def _use(self, item: RequestState, number: int) -> None:
        """Make a request use the present tensors of its adapter from its next step on."""
        generation, following = self._generations.get(number, 0), item.num_steps + 1
        item.adapter_key = f"{number}.{generation}"
        earlier = [(old, first) for old, first in item.adapter_steps if first < following]
        item.adapter_steps = [*earlier, (generation, following)]

    def reserve(self, item: RequestState) -> bool:
        """Return whether the request's adapter has a slot, or a slot is free."""
        held = set(self._holders.values())
        return _number_of(item) in held or len(held) < self._num_slots

    def started(self, item: RequestState) -> None:
        number = _number_of(item)
        if number is not None:
            self._holders[item] = number

    def left(self, item: RequestState) -> None:
        self._holders.pop(item, None)

    def awaited(self, waiting: Iterable[RequestState]) -> frozenset[int]:
        """Return the numbers of the adapters of waiting requests."""
        numbers = (_number_of(item) for item in waiting)
        return frozenset(number for number in numbers if number is not None)

    def renew(
        self, items: Iterable[RequestState], generations: Mapping[int, int]
    ) -> list[RequestState]:
        """Record that adapters were replaced; return the requests that have one of them.

        Args:
            items: all running and waiting requests.
            generations: how often each replaced adapter has been replaced, by its number.
        """
        self._generations |= generations
        affected = [item for item in items if _number_of(item) in generations]
        for item in affected:
            number = _number_of(item)
            assert number is not None
            self._use(item, number)
        return affected


def _number_of(item: RequestState) -> int | None:
    """Return upstream's number of a request's adapter; None if it has none."""
    adapter = item.request.lora_request
    return None if adapter is None else int(adapter.lora_int_id)
