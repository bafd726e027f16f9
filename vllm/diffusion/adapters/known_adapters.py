# SPDX-License-Identifier: Apache-2.0
"""The adapters of a worker: some only on the host, some also in a slot of the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.diffusion.adapters.peft_files import CONFIG, folder_of
from vllm.diffusion.core.errors import AdapterError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from vllm.diffusion.adapters.peft_files import Adapter
    from vllm.diffusion.adapters.slot_memory import SlotMemory

logger = init_logger(__name__)

# Sizes and times of an adapter's files; None for an adapter that came as tensors.
Stamp = tuple[tuple[str, int, int], ...] | None


@dataclass(frozen=True)
class Source:
    """Where an adapter comes from.

    Attributes:
        number: upstream's `lora_int_id`.
        name: name that requests use.
        path: its folder; of no meaning if it came as tensors.
        read: reads and checks the adapter.
        has_tensors: whether it came as tensors, so that it cannot be read again.
    """

    number: int
    name: str
    path: str
    read: Callable[[], Adapter]
    has_tensors: bool = False

    def stamp(self) -> Stamp:
        """Return sizes and times of the files, which change whenever they are written."""
        return None if self.has_tensors else stamp_of(self.path)


def stamp_of(path: str) -> Stamp:
    """Return the sizes and times of the files in an adapter's folder."""
    folder = folder_of(path)
    files = [folder / CONFIG, *sorted(folder.glob("adapter_model.*"))]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@dataclass(eq=False)
class KnownAdapter:
    """An adapter on the host.

    Attributes:
        source: where it comes from.
        adapter: its tensors.
        stamp: its files when they were read.
        is_pinned: whether it is never evicted.
        is_removed: whether only requests that have it may still use it.
    """

    source: Source
    adapter: Adapter
    stamp: Stamp
    is_pinned: bool = False
    is_removed: bool = False


@dataclass
class AdapterReport:
    """What has happened to adapters since the last report, and how many there are.

    Attributes:
        num_known, num_placed: adapters on the host, and in slots of the device.
        slot_bytes: bytes of a slot.
        num_placements: copies to a slot.
        num_evictions: adapters that lost their place on the host.
        num_steps: steps with an adapter.
        loads: number of loads by their kind.
        load_seconds: duration of each load.
    """

    num_known: int = 0
    num_placed: int = 0
    slot_bytes: int = 0
    num_placements: int = 0
    num_evictions: int = 0
    num_steps: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)


class KnownAdapters:
    """Owner of the adapters of a worker.

    Adapters of running requests (`running`) are never evicted and keep their slots. Adapters of
    waiting requests (`awaited`) are evicted only if a starting request leaves no other choice.

    Args:
        most: most adapters on the host.
        slots: memory of the device.
        num_slots: number of its slots, from 0, for these adapters.

    Attributes:
        evicted: name, and the files that were read, of each adapter that has lost its place.
        running: numbers of the adapters of running requests, one entry for each request.
        awaited: numbers of the adapters of waiting requests.
        generations: how often the tensors of an adapter have been replaced or removed, by its
            number. Cached results of another generation are never used.
        renewed: the generations of adapters that were removed since the last message.
        news: what has happened since the last report.
    """

    def __init__(self, most: int, slots: SlotMemory, num_slots: int) -> None:
        self._most, self._slots = most, slots
        self._known: dict[int, KnownAdapter] = {}  # least recently used first
        self._placed: list[int | None] = [None] * num_slots  # numbers, by slot
        self._slots_by_use: dict[int, None] = dict.fromkeys(range(num_slots))
        self.evicted: dict[int, tuple[str, Stamp]] = {}
        self.running: dict[str, int] = {}
        self.awaited: Set[int] = frozenset()
        self.generations: dict[int, int] = {}
        self.renewed: dict[int, int] = {}
        self.news, self._last_report = AdapterReport(), AdapterReport()

    @property
    def numbers(self) -> set[int]:
        """Numbers of the adapters that new requests may use."""
        return {number for number, known in self._known.items() if not known.is_removed}

    @property
    def all(self) -> list[KnownAdapter]:
        """All adapters on the host, least recently used first."""
        return list(self._known.values())

    def release_slots(self) -> None:
        """Release the memory of all slots; adapters keep their slots and stay on the host."""
        self._slots.release()

    def restore_slots(self) -> None:
        """Allocate the memory of all slots again, with their adapters."""
        self._slots.restore()

    def find(self, number: int) -> KnownAdapter | None:
        """Return an adapter; None if it is not on the host."""
        return self._known.get(number)

    def slot_of(self, number: int) -> int | None:
        """Return the slot of an adapter; None if it has none."""
        return self._placed.index(number) if number in self._placed else None

    # ---- arrival and end of adapters ----

    def check_name(self, number: int, name: str) -> None:
        """Refuse a number that another adapter has.

        Raises:
            AdapterError: naming both.
        """
        known = self._known.get(number)
        if known is not None and known.source.name != name and self._is_alive(known):
            raise AdapterError(
                f"lora_int_id: given {number} for {name!r}; wanted another number: "
                f"it is the number of {known.source.name!r}"
            )

    def _is_alive(self, known: KnownAdapter) -> bool:
        return not known.is_removed or known.source.number in self.running.values()

    def install(self, source: Source, adapter: Adapter, stamp: Stamp, kind: str) -> None:
        """Keep an adapter that was read, in place of another one that had its number.

        Args:
            source: where it comes from.
            adapter: its tensors.
            stamp: its files when they were read.
            kind: label of the count of loads.

        Raises:
            AdapterError: there is no room on the host.
        """
        number, before = source.number, self._known.get(source.number)
        if before is None:
            self._make_room(number)
        known = KnownAdapter(source, adapter, stamp)
        if before is not None:
            known.is_pinned = before.is_pinned and not before.is_removed
        self._known.pop(number, None)
        self.evicted.pop(number, None)
        self._known[number] = known
        self.news.loads[kind] = self.news.loads.get(kind, 0) + 1
        slot = self.slot_of(number)
        if slot is not None:
            self._slots.write(slot, adapter)
        self.generations[number] = self.generations.get(number, -1) + 1

    def note_load(self, number: int, seconds: float) -> None:
        """Record and log that an adapter was loaded."""
        known, slot = self._known[number], self.slot_of(number)
        self.news.load_seconds.append(seconds)
        logger.info(
            "adapter %s: rank %d, %d modules, %.1f MB, %.2f s, %s",
            known.source.name,
            known.adapter.rank,
            len(known.adapter.low_ranks),
            known.adapter.num_bytes / 1e6,
            seconds,
            "no slot" if slot is None else f"slot {slot}",
        )

    def read_again(self, source: Source) -> None:
        """Read an adapter that is not on the host, because a request names it.

        Raises:
            AdapterError: it came as tensors, its files are gone or have changed, or there is no
                room.
        """
        name, stamp = self.evicted.get(source.number, (source.name, source.stamp()))
        if name != source.name:
            stamp = source.stamp()
        wanted = "wanted a new load with load_inplace"
        if stamp is None:
            raise AdapterError(
                f"adapter {source.name}: its tensors were dropped to make room "
                f"(max_cpu_loras {self._most}); {wanted}"
            )
        if stamp != source.stamp() and source.stamp():
            raise AdapterError(
                f"adapter {source.name}: lora_path: given {source.path!r}, whose files have "
                f"changed since they were loaded; {wanted}"
            )
        adapter = source.read()
        generation = self.generations.get(source.number)
        self.install(source, adapter, stamp, "path")
        if generation is not None:
            self.generations[source.number] = generation  # the tensors are the same

    def remove(self, number: int) -> bool:
        """Make an adapter unknown to new requests; return whether there was one."""
        known = self._known.get(number)
        if known is None or known.is_removed:
            return self.evicted.pop(number, None) is not None and known is None
        known.is_removed, known.is_pinned = True, False
        self.forget_removed()
        return True

    def forget_removed(self) -> None:
        """Free the memory of removed adapters that no request has."""
        in_use = {*self.running.values(), *self.awaited}
        for number, known in list(self._known.items()):
            if known.is_removed and number not in in_use:
                self._drop(number)
                # Another adapter may get its number.
                self.generations[number] += 1
                self.renewed[number] = self.generations[number]

    def pin(self, number: int) -> bool:
        """Never evict an adapter; return whether it is known."""
        known = self._known.get(number)
        if known is None or known.is_removed:
            return False
        known.is_pinned = True
        return True

    def check_room(self, number: int) -> None:
        """Check that the host has room for an adapter, perhaps in place of another one.

        Raises:
            AdapterError: requests use all adapters, or they are pinned.
        """
        is_full = number not in self._known and len(self._known) >= self._most
        if is_full and self._evictable(self.awaited) is None:
            raise AdapterError(
                f"max_cpu_loras: given {self._most}, all in use; wanted one to unload"
            )

    def _evictable(self, awaited: Set[int]) -> int | None:
        """Return the least recently used adapter that may be evicted, removed ones first."""
        busy = {*self.running.values(), *awaited}
        free = [n for n, known in self._known.items() if n not in busy and not known.is_pinned]
        return min(free, key=lambda n: not self._known[n].is_removed, default=None)

    def _make_room(self, number: int) -> None:
        """Evict an adapter if the host has no room for another one.

        A request that starts may take the place of an adapter that only waiting requests have.
        """
        if len(self._known) < self._most:
            return
        evictable = self._evictable(self.awaited)
        if evictable is None and number in self.running.values():
            evictable = self._evictable(frozenset())
        if evictable is None:
            self.check_room(number)
        else:
            self._evict(evictable)

    def _evict(self, number: int) -> None:
        known = self._known[number]
        if not known.is_removed:
            self.evicted[number] = known.source.name, known.stamp
            self.news.num_evictions += 1
            logger.info("adapter %s: evicted from host memory", known.source.name)
        self._drop(number)

    def _drop(self, number: int) -> None:
        del self._known[number]
        slot = self.slot_of(number)
        if slot is not None:
            self._placed[slot] = None
            self._slots.write(slot, None)

    # ---- requests ----

    def start(self, req_id: str, source: Source) -> None:
        """Give a request that starts its adapter, in a slot, until `end`.

        Raises:
            AdapterError: the adapter cannot be read, or another one has its number.
        """
        number = source.number
        self.check_name(number, source.name)
        self.running[req_id] = number
        started, is_known = time.perf_counter(), number in self._known
        if not is_known:
            self.read_again(source)
        known = self._known[number] = self._known.pop(number)  # most recently used
        self._place(number, known.adapter)
        if not is_known:
            self.note_load(number, time.perf_counter() - started)

    def end(self, req_id: str) -> None:
        """Release the adapter of a request that has ended."""
        if self.running.pop(req_id, None) is not None:
            self.forget_removed()

    def slot_of_request(self, req_id: str) -> int | None:
        """Return the slot of a running request; None if it has no adapter."""
        number = self.running.get(req_id)
        return None if number is None else self.slot_of(number)

    def _place(self, number: int, adapter: Adapter) -> None:
        slot = self.slot_of(number)
        if slot is None:
            running = {*self.running.values()} - {number}
            free = [s for s in self._slots_by_use if self._placed[s] not in running]
            empty = [s for s in free if self._placed[s] is None]
            if not free:
                raise AdapterError("max_loras: all slots are in use; wanted a slot to be free")
            slot = (empty or free)[0]
            self._placed[slot] = number
            self._slots.write(slot, adapter)
            self.news.num_placements += 1
        del self._slots_by_use[slot]
        self._slots_by_use[slot] = None

    def status(self) -> list[dict[str, Any]]:
        """Return what the server's status page shows of each adapter."""
        running = list(self.running.values())
        return [
            {
                "name": known.source.name,
                "id": number,
                "path": "tensors" if known.source.has_tensors else known.source.path,
                "rank": known.adapter.rank,
                "modules": len(known.adapter.low_ranks),
                "bytes": known.adapter.num_bytes,
                "slot": self.slot_of(number),
                "generation": self.generations[number],
                "pinned": known.is_pinned,
                "running": running.count(number),
            }
            for number, known in self._known.items()
            if not known.is_removed or number in running
        ]

    def take_report(self) -> AdapterReport | None:
        """Return what has happened since the last call; None if nothing has."""
        self.news.num_known = len(self._known)
        self.news.num_placed = sum(number is not None for number in self._placed)
        self.news.slot_bytes = self._slots.slot_bytes
        if self.news == self._last_report:
            return None
        report = self.news
        self._last_report = AdapterReport(report.num_known, report.num_placed, report.slot_bytes)
        self.news = replace(self._last_report, loads={}, load_seconds=[])
        return report
