# SPDX-License-Identifier: Apache-2.0
"""Assigns pages of the store to requests with an exact cache (block-causal families).

Upstream's KV cache manager counts the pages, shares the pages of equal prefixes, and evicts the
least recently used pages. A page is published, so that other requests can find it, once a finished
step has made all its positions final. Until then only its own request reads it.

```
positions of a request   [0, num_kept) final | next_rows: next forward | ahead | no page
pages                    published, if whole | its own ........................ |
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.config import row_budget
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE, num_pages
from vllm.diffusion.engine.messages import NewPages
from vllm.diffusion.engine.planning import model_shape
from vllm.diffusion.engine.scheduler.gates import AdmissionGate
from vllm.diffusion.engine.scheduler.window_paging import (
    WindowPages,
    max_scratch_pages,
    num_window_pages,
    window_layers,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats

BLOCKS_AHEAD = 2
MAX_SCRATCH_PAGES, PAGES_PER_SCRATCH = 64, 32
# Separators in a salt: before the block length, the adapter, and the epoch of the weights.
_BLOCKS, _ADAPTER, _WEIGHTS = "|B", "|L", "|W"
# Before the offset of the blocks, behind their length.
_OFFSET = "+"

logger = init_logger(__name__)


def most_positions(num_pages: int, max_model_len: int) -> int:
    """Return the maximum positions of one request in a store of `num_pages` pages.

    Upstream's manager keeps one page for itself. A sequence ends with a whole block, so it may be
    longer than prompt and answer.
    """
    return min((num_pages - 1) * PAGE_SIZE, 2 * max_model_len)


def scratch_pages(vllm_config: VllmConfig, num_pages: int) -> int:
    """Return the number of draft pages in addition to `num_pages` pages for requests."""
    return min(max_scratch_pages(vllm_config, MAX_SCRATCH_PAGES), num_pages // PAGES_PER_SCRATCH)


def without_scratch(vllm_config: VllmConfig, num_pages: int) -> int:
    """Return the number of pages for requests in a store of `num_pages` pages."""
    limit = max_scratch_pages(vllm_config, MAX_SCRATCH_PAGES)
    return num_pages - min(limit, (num_pages + 1) // (PAGES_PER_SCRATCH + 1))


class Paging(AdmissionGate):
    """Gate of requests with pages; assigns the pages of the store.

    Args:
        vllm_config: configuration of the engine.
        kv_cache_config: upstream's configuration, made from the worker's sizes.
        hash_block_size: tokens covered by one hash.
        log_stats: whether statistics are enabled.

    Attributes:
        manager: upstream's manager, which counts the pages.
        num_bytes: bytes of the store.
        windows: pages of layers with a sliding window; None if the model has none.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        hash_block_size: int,
        *,
        log_stats: bool,
    ) -> None:
        self.manager = KVCacheManager(
            kv_cache_config,
            # The manager truncates longer requests.
            max_model_len=kv_cache_config.num_blocks * PAGE_SIZE,
            scheduler_block_size=PAGE_SIZE,
            hash_block_size=hash_block_size,
            enable_caching=vllm_config.cache_config.enable_prefix_caching,
            log_stats=log_stats,
        )
        tensors, count = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
        self._page_bytes = sum(tensor.size for tensor in tensors) // count
        num_scratch = scratch_pages(vllm_config, count)
        self.num_bytes = (count + num_scratch) * self._page_bytes
        self.windows: WindowPages | None = None
        layers = window_layers(vllm_config)
        if layers is not None:
            self.windows = WindowPages(layers, num_window_pages(vllm_config, count))
            shape = model_shape(vllm_config)
            num_windows = self.windows.count + num_scratch
            self.num_bytes += num_windows * PAGE_SIZE * shape.window_bytes
        self._row_budget = row_budget(vllm_config)
        max_model_len = vllm_config.model_config.max_model_len
        self._most_positions = most_positions(kv_cache_config.num_blocks, max_model_len)
        self._new_pages: dict[str, NewPages] = {}
        self._is_short = False  # whether a request waits for pages
        self._epoch = 0  # number of times that cached results were dropped

    def arrived(self, item: RequestState) -> bool:
        """Add the blocks of a request to its hashes if its keys and values depend on them.

        Raises:
            ActivationBudgetError: the request would not fit even alone.
        """
        if not item.is_paged:
            return False
        request, length = item.request, item.demand.length
        if length > self._most_positions:
            available = self._most_positions
            position = self._page_bytes // PAGE_SIZE
            raise ActivationBudgetError(length, length * position, available * position, available)
        if self.windows is not None:
            item.most_rows = item.demand.largest_rows(self._row_budget)
        request.cache_salt = f"{request.cache_salt or ''}{_BLOCKS}"
        self._hash(item)
        if not (self.manager.enable_caching and _shares(item)):
            request.skip_reading_prefix_cache = True
        return True

    def _hash(self, item: RequestState) -> None:
        """Hash the content of a request's pages: its tokens, blocks, adapter and weights."""
        request = item.request
        clients = str(request.cache_salt).rpartition(_BLOCKS)[0]
        salt = f"{clients}{_BLOCKS}{item.params.kept_unit}"
        salt += f"{_OFFSET}{item.block_offset}" if item.block_offset else ""
        salt += f"{_ADAPTER}{item.adapter_key}" if item.adapter_key else ""
        request.cache_salt = salt + (f"{_WEIGHTS}{self._epoch}" if self._epoch else "")
        request.block_hashes.clear()
        request.update_block_hashes()

    def results_dropped(self, items: Sequence[RequestState], epoch: int) -> None:
        self._epoch = epoch
        paged = [item for item in items if item.is_paged]
        if not self.reset(paged):
            logger.warning(
                "prefix cache: not reset, unused entries of the old weights stay until eviction"
            )
        for item in paged:
            self._hash_again(item)

    def adapters_renewed(self, items: Sequence[RequestState]) -> None:
        for item in items:
            if item.is_paged:
                if item.num_pages:
                    self.preempt(item)
                self._hash_again(item)

    def _hash_again(self, item: RequestState) -> None:
        """Hash a request after a change; the cached prefix that it found is no longer valid."""
        self._hash(item)
        if item.request.prefill_stats is not None:
            item.request.prefill_stats.set(item.request.num_prompt_tokens, 0, 0)

    def provide(self, running: Iterable[RequestState], in_flight: Collection[str]) -> None:
        """Reserve pages for every next forward and for some blocks more.

        The reserve is needed because a worker launches one step ahead. The oldest requests come
        first. If there are too few pages, they take the pages of the latest request, unless its
        step is in flight.

        Args:
            running: the running requests.
            in_flight: requests of the step that the worker has launched.
        """
        paged = sorted((item for item in running if item.is_paged), key=lambda item: item.started)
        for item in paged:
            while not self._give(item, _end_of_pages(item)):
                able = (o for o in reversed(paged) if o.num_pages and o.req_id not in in_flight)
                last = next(able, item)
                if last.started <= item.started:
                    break
                self.preempt(last)
        for item in paged:
            _update_has_pages(item)
        ready = [item for item in paged if item.has_pages]
        self._is_short = len(ready) < len(paged)
        # Window pages are large, and a worker needs one more block of them before the next message.
        num_blocks = BLOCKS_AHEAD if self.windows is None else 1
        for item in ready:
            ahead = _end_of_pages(item) + num_blocks * item.params.block_length
            self._give(item, min(ahead, item.demand.length))

    def reserve(self, item: RequestState) -> bool:
        """Give a request the pages of its first forward; return False if there are too few.

        Requests that have started earlier and wait for pages come first.
        """
        if self._is_short or not self._give(item, _end_of_pages(item)):
            return False
        _update_has_pages(item)  # a prefix that was found makes room for more rows
        return True

    def _give(self, item: RequestState, end: int) -> bool:
        """Give a request pages for its positions [0, `end`); return whether it has them now.

        A request without pages starts with the published pages of its prefix.
        """
        if item.num_pages * PAGE_SIZE >= end:
            return True
        request, manager, has_none = item.request, self.manager, item.num_pages == 0
        computed, num_found = None, 0
        if has_none:
            computed, num_found = self._prefix_of(item)
        if self.windows is not None:
            prefix = [] if computed is None else computed.get_block_ids()[0]
            num_more = num_pages(end) - (item.num_pages or len(prefix))
            if not self.windows.has_room(num_more, prefix):
                return False
        num_new = end - request.num_computed_tokens - num_found
        blocks = manager.allocate_slots(
            request, num_new, num_found, computed, delay_cache_blocks=True
        )
        if blocks is None:
            return False
        if has_none:
            self._begin(item, num_found)
        page_ids = manager.get_block_ids(request.request_id)[0][item.num_pages :]
        item.num_pages += len(page_ids)
        window_ids = list[int]()
        if self.windows is not None:
            num_prefix = num_found // PAGE_SIZE
            if has_none:
                window_ids = self.windows.begin(item.req_id, page_ids[:num_prefix])
            window_ids += self.windows.extend(item.req_id, page_ids[num_prefix:])
        earlier = None if has_none else self._new_pages.get(item.req_id)
        num_kept = num_found if has_none else None
        if earlier is not None:
            page_ids, num_kept = earlier.page_ids + page_ids, earlier.num_kept
            window_ids = earlier.window_ids + window_ids
        self._new_pages[item.req_id] = NewPages(page_ids, num_kept, window_ids)
        return True

    def _prefix_of(self, item: RequestState) -> tuple[KVCacheBlocks, int]:
        """Return the published pages of a request's prefix, and the number of their positions."""
        request = item.request
        blocks, num_found, _ = self.manager.get_computed_blocks(request)
        # The last block of a page may end in the next page, whose tokens may differ.
        if num_found and item.block_offset:
            blocks = KVCacheBlocks(tuple(group[:-1] for group in blocks.blocks))
            num_found -= PAGE_SIZE
        if self.windows is None or not num_found:
            return blocks, num_found
        longest = PAGE_SIZE * self.windows.longest_prefix(blocks.get_block_ids()[0])
        if longest < num_found:
            blocks, num_found, _ = self.manager.get_computed_blocks(request, longest)
        return blocks, num_found

    def _begin(self, item: RequestState, num_found: int) -> None:
        """Start a request whose first `num_found` positions are already computed."""
        request = item.request
        self.manager.record_prefix_cache_stats(request, num_found)
        if request.num_preemptions == 0 and request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, num_found, 0)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_found
        _keep(item, num_found)

    def reset(self, running: Iterable[RequestState]) -> bool:
        """Withdraw all published pages; return False if some page is in use.

        Args:
            running: requests that are preempted first.
        """
        for item in running:
            if item.num_pages:
                self.preempt(item)
        return bool(self.manager.reset_prefix_cache())

    def preempt(self, item: RequestState) -> None:
        """Take away a request's pages; it continues when there are enough pages again."""
        request = item.request
        self._free(item)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED)
        request.num_computed_tokens = 0
        _keep(item, 0)
        self._new_pages[item.req_id] = NewPages([], 0)

    def advanced(self, item: RequestState) -> None:
        """Publish the final part of a request's keys and values for other requests."""
        request = item.request
        if item.num_pages == 0 or item.num_kept == request.num_computed_tokens:
            return
        request.num_computed_tokens = item.num_kept
        if self.windows is not None:
            self.windows.trim(item.req_id, item.num_kept)
        if _shares(item):
            self.manager.cache_blocks(request, min(item.num_kept, request.num_tokens))

    def left(self, item: RequestState) -> None:
        """Release the pages of a finished request; published pages stay until they are evicted."""
        if item.num_pages:
            self._free(item)
        self._new_pages.pop(item.req_id, None)

    def _free(self, item: RequestState) -> None:
        self.manager.free(item.request)
        if self.windows is not None:
            self.windows.leave(item.req_id)
        item.num_pages = 0

    def take_new_pages(self) -> dict[str, NewPages]:
        """Return the pages given to requests since the last call."""
        new_pages, self._new_pages = self._new_pages, {}
        return new_pages

    def put_into(self, stats: SchedulerStats) -> None:
        """Write the usage of the store and the prefix cache hits into `stats`."""
        stats.kv_cache_usage = self.manager.usage
        if self.windows is not None:
            stats.kv_cache_usage = max(stats.kv_cache_usage, self.windows.usage)
        prefix_stats = self.manager.make_prefix_cache_stats()
        if prefix_stats is not None:
            stats.prefix_cache_stats = prefix_stats


def _end_of_pages(item: RequestState) -> int:
    """Return the number of positions, from 0, that need pages before the next forward."""
    return item.num_kept + min(item.next_rows, item.most_rows)


def _update_has_pages(item: RequestState) -> None:
    item.has_pages = item.num_pages * PAGE_SIZE >= _end_of_pages(item)


def _keep(item: RequestState, num_kept: int) -> None:
    """Set the number of positions that need not be computed again."""
    item.next_rows += item.num_kept - num_kept
    item.num_kept = num_kept


def _shares(item: RequestState) -> bool:
    """Whether a request's pages hold what their hashes identify: whole blocks of these tokens."""
    params = item.params
    # A scoring request fills no masks, and positions from its first mask on are never final.
    fills_prompt = params.allow_infill and params.score is None
    return PAGE_SIZE % params.kept_unit == 0 and not fills_prompt
