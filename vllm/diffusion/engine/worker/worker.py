# SPDX-License-Identifier: Apache-2.0
"""Worker for a diffusion language model, run by upstream's executors on CPU and CUDA."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.config import row_budget, served_model, settings_of
from vllm.diffusion.core import devices, pages
from vllm.diffusion.engine.scheduler.paging import most_positions, scratch_pages, without_scratch
from vllm.diffusion.engine.scheduler.window_paging import (
    num_window_pages,
    pages_within,
    window_layers,
)
from vllm.diffusion.engine.worker.adapter_worker import AdapterWorker
from vllm.diffusion.engine.worker.adapting import AdaptingLoop, load_adapters
from vllm.diffusion.engine.worker.invariance import promise_of
from vllm.diffusion.engine.worker.model_loading import (
    join_ranks,
    load_everywhere,
    load_model,
    make_runner,
    why_no_graphs,
)
from vllm.diffusion.engine.worker.run_ahead import StepLimits
from vllm.diffusion.engine.worker.status import build_info, log_build_info, status_of
from vllm.diffusion.engine.worker.step_graphs import buckets_of
from vllm.diffusion.engine.worker.step_loop import StepLoop
from vllm.diffusion.engine.worker.warm_up import warm_up
from vllm.diffusion.memory.plan import readable
from vllm.diffusion.models.ahead import compile_ahead
from vllm.diffusion.models.transformer import fp8_attention_by
from vllm.diffusion.ops.native_packages import check_builds
from vllm.diffusion.parallel.groups import Ranks
from vllm.diffusion.process import log_filter, watchdog
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    set_custom_all_reduce,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
from vllm.v1.worker.worker_base import CompilationTimes

if TYPE_CHECKING:
    from vllm.diffusion.engine.messages import DiffusionRunnerOutput, DiffusionSchedulerOutput
    from vllm.diffusion.memory import Rates
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(__name__)

# Maximum number of rows that tensor-parallel ranks sum at a time. The memory for it is twice their
# bytes.
_SUMMED_ROWS = 8192


class DiffusionWorker(AdapterWorker):
    """Loads the model and runs denoising steps."""

    def init_device(self) -> None:
        watchdog.follow_parent()  # a forked process has not run the plugin
        log_filter.drop_irrelevant_lines()
        if self.device_config.device_type == "cuda":
            index = self.current_platform.logical_device_id_to_visible_device_id(self.local_rank)
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
            devices.check_card(self.device)
            check_builds()
            self.current_platform.check_if_supports_dtype(self.model_config.dtype)
        else:
            self.device = torch.device("cpu")
            # Upstream's loaders empty the accelerator's cache, which raises an error without an
            # accelerator.
            torch.accelerator.empty_cache = lambda: None
        parallel = self.parallel_config
        set_custom_all_reduce(not parallel.disable_custom_all_reduce)
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
        )
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        self.ranks = Ranks.join(
            parallel.tensor_parallel_size, settings_of(self.vllm_config).sequence_parallel_size
        )
        self.ranks.connect(self.device)

    @log_filter.drop_unwritable_output()
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.load_config.load_format = "dummy"
        device, served = self._device(), served_model(self.vllm_config)
        if served.defaults.get("attention_dtype") == "fp8":
            by = fp8_attention_by(device, self.model_config.hf_config.head_dim)
            logger.info("attention over %d positions or more: fp8, by %s", served.fp8_from, by)
        model, self.weights = load_everywhere(
            self.ranks.every, lambda: load_model(self.vllm_config, self.load_config)
        )
        adapters = load_adapters(self.vllm_config, model)
        agreement = join_ranks(self.ranks, model, device)
        no_graphs = why_no_graphs(model, device, is_eager=self.model_config.enforce_eager)
        self.model_runner = make_runner(
            self.vllm_config,
            model,
            device,
            self.ranks,
            agreement,
            has_graphs=no_graphs is None,
            is_reporting=self.is_driver_worker,
            adapters=adapters,
        )
        self.model_runner.vllm_config = self.vllm_config
        self.model_runner.promise = promise_of(model, self.vllm_config)
        has_reader = adapters is not None and adapters.reader is not None
        loop = AdaptingLoop if has_reader else StepLoop
        self.loop = loop(
            self.model_runner,
            agreement,
            runs_ahead=device.type == "cuda",
            limits=StepLimits(
                rows=buckets_of(model.config).windows[-1],
                holds_for_all=model.config.family.is_open,
            ),
        )
        if self.is_driver_worker:
            budget = self.model_runner.pool.budget_bytes
            log_build_info(self.build_info(), device, budget, no_graphs)
            if self.ranks.sequence.size > 1:
                rows = f"{self.model_runner.planner.search.min_rows:,} rows"
                logger.info(
                    "%d ranks share the rows of steps of at least %s",
                    self.ranks.sequence.size,
                    rows,
                )
            if not model.family.is_block_causal:
                host = readable(self.model_runner.planner.host_bytes)
                logger.info(
                    "cached keys and values: in the pool; %s of host memory for the rest",
                    host,
                )

    def build_info(self) -> dict[str, str]:
        """Return the build and the settings of the engine, for the API server."""
        runner, device = self.model_runner, self._device()
        backends = runner.model.attention_backends(device)
        return build_info(device, backends, runner.pool, has_graphs=runner.graphs is not None)

    def promise(self) -> dict[str, Any]:
        """Return whether answers are batch invariant, and the fingerprint, for the API server."""
        return dict(self.model_runner.promise)

    def capacity(self) -> tuple[int, Rates]:
        """Return the bytes available to steps and caches, and the device's rates.

        For the API server.
        """
        runner = self.model_runner
        return runner.budget_bytes - runner.pages.fixed_bytes, runner.planner.rates

    def status(self) -> dict[str, Any]:
        """Return the activity of this rank, for the server's status page."""
        return status_of(self.model_runner)

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> DiffusionRunnerOutput:
        return self.loop.execute(scheduler_output)

    def execute_dummy_batch(self) -> None:
        """Do nothing, because data-parallel replicas are independent."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model(self) -> torch.nn.Module:
        return self.model_runner.model

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    # Upstream asks every worker for the layout of its KV cache. Only block-causal families describe
    # one.

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        model = self.model_runner.model
        if not model.family.is_block_causal:
            return {}
        layers = window_layers(self.vllm_config)
        num_heads, head_dim = model.num_kv_heads, model.head_dim
        if layers is not None:  # their window pages are not upstream's
            num_heads, head_dim = layers.other_heads
        layer = FullAttentionSpec(
            block_size=pages.PAGE_SIZE,
            num_kv_heads=num_heads,
            head_size=head_dim,
            dtype=model.dtype,
        )
        own = set(range(len(model.layers))) - set(layers.indices if layers else ())
        return {f"layers.{number}": layer for number in sorted(own)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [next(iter(KVCacheLayout)).name]

    def determine_available_memory(self) -> int:
        """Return the bytes of the pages that fit into the pool's share for the cache.

        Pages of drafts and window pages are not included.
        """
        planner = self.model_runner.planner
        cost = planner.shape.window_bytes / planner.shape.cache_bytes
        num_pages = pages_within(self.vllm_config, planner.cached_positions, cost)
        num_pages = without_scratch(self.vllm_config, num_pages)
        return num_pages * pages.PAGE_SIZE * planner.shape.cache_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        num_pages = kv_cache_config.num_blocks
        if kv_cache_config.kv_cache_groups:
            longest = most_positions(num_pages, self.model_config.max_model_len)
            scratch = scratch_pages(self.vllm_config, num_pages)
            most_sequences = self.scheduler_config.max_num_seqs + scratch
            most_entries = most_sequences * pages.num_pages(longest)
            num_windows = num_window_pages(self.vllm_config, num_pages)
            self.model_runner.pages.fix(num_pages, most_entries, scratch, num_windows)

    def reset_encoder_cache(self) -> None:
        pass

    @log_filter.drop_unwritable_output()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        start = time.perf_counter()
        graphs = self.model_runner.graphs
        if graphs is not None:
            compile_ahead(self.model_runner.model, self._device())
            compiled = time.perf_counter()
            warm_up(
                self.model_runner,
                served_model(self.vllm_config),
                row_budget=row_budget(self.vllm_config),
                shows_progress=self.is_driver_worker,
            )
            logger.info(
                "CUDA graphs: %d captured in %.1f s, %.2f GiB; Triton kernels compiled in %.1f s",
                len(graphs),
                time.perf_counter() - compiled,
                graphs.used_bytes / 2**30,
                compiled - start,
            )
        return CompilationTimes(language_model=time.perf_counter() - start, encoder=0.0)

    def synchronize_device(self) -> None:
        if self._device().type == "cuda":
            torch.cuda.synchronize(self.device)

    def _device(self) -> torch.device:
        if self.device is None:
            raise RuntimeError("init_device must run before the model is loaded")
        return self.device
