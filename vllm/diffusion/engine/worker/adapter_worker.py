# SPDX-License-Identifier: Apache-2.0
"""A worker's calls about LoRA adapters, with upstream's method names."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import AdapterError
from vllm.diffusion.engine.worker.adapting import AdaptingRunner, source_of
from vllm.diffusion.engine.worker.weight_worker import (
    RefusedCallError,
    WeightWorker,
    digest_of,
)
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from vllm.diffusion.adapters.known_adapters import KnownAdapter, Source, Stamp
    from vllm.diffusion.adapters.peft_files import Adapter, AdapterReader

logger = init_logger(__name__)


class _AdapterStaging:
    """Reads an adapter in a thread, while steps run.

    Args:
        source: where the adapter comes from.

    Attributes:
        adapter: the adapter, once it is read.
        stamp: its files when the reading began.
        failure: the reason why it cannot be used.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.stamp = source, source.stamp()
        self.adapter: Adapter | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._read, name="adapter", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.adapter = self.source.read()
        except AdapterError as error:
            self.failure = str(error)
        except Exception as error:
            logger.exception("adapter %s could not be read", self.source.name)
            self.failure = f"adapter {self.source.name}: {type(error).__name__}: {error}"

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


class _Load(NamedTuple):
    """A load that `undo_load` can undo: the adapter's number, and what it replaced."""

    number: int
    before: KnownAdapter | None
    evicted: tuple[str, Stamp] | None


class AdapterWorker(WeightWorker):
    """Worker whose adapters come and go between steps."""

    _staging: _AdapterStaging | None = None
    _last_load: _Load | None = None

    def suspend_weights(self, *, keeps: bool) -> None:
        super().suspend_weights(keeps=keeps)
        if isinstance(self.model_runner, AdaptingRunner):
            self.model_runner.adapters.release_slots()

    def resume_weights(self) -> None:
        super().resume_weights()
        if isinstance(self.model_runner, AdaptingRunner):
            self.model_runner.adapters.restore_slots()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, or replace its tensors with `load_inplace`; return whether it is known.

        Nothing changes on any rank if some rank cannot load it.
        """
        runner, failure = self._adapting_runner(), None
        adapters, number = runner.adapters, lora_request.lora_int_id
        started, staged = time.perf_counter(), self._take_staged(lora_request)
        source = source_of(lora_request, self._reader)
        known = adapters.find(number)
        adapter, stamp, is_loaded = None, None, False
        try:
            adapters.check_name(number, source.name)
            is_again = known is not None and not known.is_removed
            is_loaded = is_again and not lora_request.load_inplace
            if not is_loaded:
                adapters.check_room(number)
                stamp, adapter = _read(source, staged)
        except Exception as error:
            failure = error
        failure = self.agree_on_failure(failure)
        if failure is not None:
            if self.rank == self.parallel_config.world_size - 1:
                raise failure
            return False
        if adapter is not None:
            kind = "in_place" if known is not None else "path" if staged is None else "staged"
            kind = "tensors" if source.has_tensors else kind
            self._last_load = _Load(number, known, adapters.evicted.get(number))
            self._install(source, adapter, stamp, kind)
            adapters.note_load(number, time.perf_counter() - started)
        return True

    def undo_load(self, number: int) -> None:
        """Undo the last load if it loaded this adapter, because another replica refused it."""
        last, self._last_load = self._last_load, None
        if last is None or last.number != number:
            return
        if last.before is not None and not last.before.is_removed:
            self._install(last.before.source, last.before.adapter, last.before.stamp, "in_place")
            return
        self.remove_lora(number)
        if last.evicted is not None:
            self._adapting_runner().adapters.evicted[number] = last.evicted

    def forget_load(self) -> None:
        """Free what `undo_load` would need, because all replicas have the last adapter."""
        self._last_load = None

    def _install(self, source: Source, adapter: Adapter, stamp: Stamp, kind: str) -> None:
        """Keep an adapter; its requests begin their next forward without cached results."""
        adapters, number = self._adapting_runner().adapters, source.number
        if number not in adapters.generations:
            adapters.install(source, adapter, stamp, kind)
            return
        # Steps in flight may still read the slot. The scheduler must know of the replacement before
        # the next step.
        pause = self.loop.collect_steps()
        adapters.install(source, adapter, stamp, kind)
        req_ids = [req_id for req_id, used in adapters.running.items() if used == number]
        pause.renew(number, adapters.generations[number], req_ids)

    def remove_lora(self, lora_id: int) -> bool:
        """Make an adapter unknown to new requests; return whether it was known."""
        adapters = self._adapting_runner().adapters
        is_removed = adapters.remove(lora_id)
        if lora_id in adapters.renewed:
            # A new request must not read pages of the old adapter.
            generation = adapters.renewed.pop(lora_id)
            self.loop.collect_steps().renew(lora_id, generation, ())
        return is_removed

    def settle_adapters(self, awaited: list[int], ended: list[str]) -> None:
        """Prepare for a call about adapters.

        Args:
            awaited: numbers of the adapters of waiting requests.
            ended: requests that have ended since the last step.
        """
        adapters = self._adapting_runner().adapters
        adapters.awaited = frozenset(awaited)
        for req_id in ended:
            adapters.end(req_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the adapters that new requests may use."""
        return self._adapting_runner().adapters.numbers

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the host until it is removed; return whether it is known."""
        return self._adapting_runner().adapters.pin(lora_id)

    def compute_weight_checksums(self) -> dict[str, str]:
        checksums = super().compute_weight_checksums()
        if isinstance(self.model_runner, AdaptingRunner):
            for known in self.model_runner.adapters.all:
                for module, low_rank in known.adapter.low_ranks.items():
                    name = f"{self._rank_name()}adapter:{known.source.name}:{module}"
                    checksums[f"{name}.lora_A"] = digest_of(low_rank.down)
                    checksums[f"{name}.lora_B"] = digest_of(low_rank.up)
        return checksums

    def stage_adapter(self, name: str, number: int, path: str) -> None:
        """Begin to read an adapter for the next call of `add_lora`, without delaying steps."""
        self._staging = _AdapterStaging(source_of(LoRARequest(name, number, path), self._reader))

    def staged_adapter(self, name: str) -> str | None:
        """Return None while an adapter is being read, then "", or why it cannot be used."""
        staging = self._staging
        if staging is None or staging.source.name != name:
            return f"adapter {name}: another adapter was staged meanwhile; wanted one at a time"
        return (staging.failure or "") if staging.is_over else None

    def _take_staged(self, request: LoRARequest) -> _AdapterStaging | None:
        """Return the staged adapter if it is that of a request."""
        staging = self._staging
        if staging is None or not staging.is_over:
            return None
        source, self._staging = staging.source, None
        wanted = request.lora_name, request.lora_int_id, request.lora_path
        return staging if (source.name, source.number, source.path) == wanted else None

    @property
    def _reader(self) -> AdapterReader:
        reader = self._adapting_runner().reader
        assert reader is not None
        return reader

    def _adapting_runner(self) -> AdaptingRunner:
        runner = self.model_runner
        if not isinstance(runner, AdaptingRunner) or runner.reader is None:
            raise RefusedCallError("adapters: given none; wanted an engine with enable_lora")
        return runner


def _read(source: Source, staged: _AdapterStaging | None) -> tuple[Stamp, Adapter]:
    if staged is None:
        stamp = source.stamp()
        return stamp, source.read()
    if staged.adapter is None:
        raise AdapterError(staged.failure or f"adapter {source.name}: it was not read")
    return staged.stamp, staged.adapter
