# SPDX-License-Identifier: Apache-2.0
"""Start of a worker: loads the model, connects its ranks, and creates the runner."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm.config import set_current_vllm_config
from vllm.diffusion import ops
from vllm.diffusion.config import num_replicas
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.planning import make_planner
from vllm.diffusion.engine.worker.adapting import AdaptingRunner, LoadedAdapters
from vllm.diffusion.engine.worker.agreement import Agreement, Barrier
from vllm.diffusion.engine.worker.pool_budget import activation_budget, planning_budget
from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
from vllm.diffusion.memory import (
    ArenaWeights,
    GraphMemory,
    WeightMemory,
    activation_pool,
    rates_of,
)
from vllm.diffusion.memory.plan import readable
from vllm.diffusion.models.config_keys import suspicious_keys
from vllm.diffusion.models.transformer import order_products
from vllm.diffusion.models.weights import quantised_sizes
from vllm.diffusion.parallel.groups import ConnectedGroup
from vllm.diffusion.parallel.host_board import processes_here
from vllm.diffusion.process import watchdog
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import LoadConfig, VllmConfig
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.parallel.groups import RankGroup, Ranks

logger = init_logger(__name__)

# Maximum number of rows that tensor-parallel ranks sum at a time. The memory for it is twice their
# bytes.
_SUMMED_ROWS = 8192


def load_model(
    vllm_config: VllmConfig, load_config: LoadConfig
) -> tuple[DiffusionModel, WeightMemory]:
    """Load the model, prepare it for its first step, and log its size.

    Returns:
        the model, and its weight memory, which can be released if sleep mode is enabled.
    """
    start, dtype = time.perf_counter(), vllm_config.model_config.dtype
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype):
        model: DiffusionModel = get_model_loader(load_config).load_model(
            vllm_config=vllm_config, model_config=vllm_config.model_config
        )
        if load_config.load_format != "dummy":
            _warn_of_broken(model)
    model.is_loaded = True  # dummy weights can also be replaced tensor by tensor
    device = model.rotary_frequencies.device
    memory = WeightMemory(model)
    if vllm_config.model_config.enable_sleep_mode and device.type == "cuda":
        memory = ArenaWeights(model, device)
    order_products(model.layers)
    _ = model.head  # a projection may need memory to choose its kernels
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    config = vllm_config.model_config.hf_config
    unknown = config.unknown_keys
    if unknown and vllm_config.parallel_config.rank == 0:
        logger.warning("config.json: the keys %s are unknown and have no effect", unknown)
        if suspicious := suspicious_keys(vars(config), unknown):
            logger.warning(
                "config.json: the names of %s suggest a model that computes positions in another "
                "way; compare its answers with the code of its authors",
                suspicious,
            )
    seconds = time.perf_counter() - start
    logger.info("model loaded: %s of weights in %.1f s", readable(size), seconds)
    count, quantised, plain = quantised_sizes(model, dtype)
    if count:
        logger.info(
            "quantised: %d matrices as %s, %.2f GiB instead of %.2f GiB; the others are plain",
            count,
            vllm_config.quant_config.get_name(),
            quantised / 2**30,
            plain / 2**30,
        )
    return model, memory


def _warn_of_broken(model: DiffusionModel) -> None:
    """Log a warning if weights contain NaN or infinite numbers, which make all answers noise."""
    plain = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    names = [name for name, p in plain if p.numel() and p.dtype.itemsize > 1]
    # Minimum and maximum both propagate NaN, and neither needs memory.
    ends = [torch.stack(p.detach().aminmax()).float() for n, p in plain if n in {*names}]
    if not ends:
        return
    is_whole = torch.stack(ends).isfinite().all(dim=1).tolist()
    broken = [name for name, whole in zip(names, is_whole, strict=True) if not whole]
    if broken:
        logger.warning(
            "weights: NaN or infinite numbers in %d of %d tensors, first %s; answers will be noise",
            len(broken),
            len(names),
            broken[0],
        )


def load_everywhere(
    ranks: RankGroup, load: Callable[[], tuple[DiffusionModel, WeightMemory]]
) -> tuple[DiffusionModel, WeightMemory]:
    """Return what `load` returns; every rank must call this.

    Raises:
        ServerConfigError: on every rank, if a setting is unusable on one rank. Kernels that one
            rank checks may be in order on the others.
    """
    loaded, refusal = None, None
    try:
        loaded = load()
    except ServerConfigError as error:
        refusal = str(error)
    refusals = [text for text in ranks.all_gather_object(refusal) if text is not None]
    if refusals:
        raise ServerConfigError(refusals[0])
    assert loaded is not None
    return loaded


def join_ranks(ranks: Ranks, model: DiffusionModel, device: torch.device) -> Agreement | None:
    """Set up sums of tensor-parallel ranks; return how several ranks agree on failures."""
    tensor, sequence = ranks.tensor, ranks.sequence
    # With NCCL no rank can end a wait of a GPU. Ranks that divide rows use NCCL on GPUs.
    may_fail = sequence.size == 1 or device.type == "cpu"
    board = ranks.every.join_board() if may_fail else None
    row_bytes = model.hidden_size * model.dtype.itemsize
    summing = board if may_fail else tensor.join_board()
    num_bytes = _SUMMED_ROWS * row_bytes
    ops.join_ranks(device, num_bytes, summing, is_invariant=model.is_batch_invariant)
    if not ranks.are_several:
        return None
    watchdog.follow_ranks(processes_here(get_world_group().cpu_group))
    barriers: list[Barrier] = [ops.tensor_parallel()] if tensor.size > 1 else []
    if isinstance(sequence, ConnectedGroup):
        barriers.append(sequence)
        if board is not None:
            sequence.listen(board)
    return Agreement(*barriers, board=board)


def why_no_graphs(model: DiffusionModel, device: torch.device, *, is_eager: bool) -> str | None:
    """Return why the layers run without CUDA graphs; None if they run with graphs."""
    if device.type != "cuda":
        return "none (no GPU)"
    if is_eager:
        return "none (--enforce-eager)"
    if not envs.use_chunkwise_graph():
        return "none (VLLM_USE_CHUNKWISE_GRAPH=0)"
    if not model.can_be_captured(device):
        return f"none (attention of {model.dtype} heads of {model.head_dim} on this GPU)"
    return None


def make_runner(
    vllm_config: VllmConfig,
    model: DiffusionModel,
    device: torch.device,
    ranks: Ranks,
    agreement: Agreement | None,
    *,
    has_graphs: bool,
    is_reporting: bool,
    adapters: LoadedAdapters | None = None,
) -> DiffusionModelRunner:
    """Create the runner of a loaded model, with the free memory of the device."""
    rates = rates_of(device, ranks.every)
    utilization = vllm_config.cache_config.gpu_memory_utilization
    budget = activation_budget(device, utilization, ranks.every, num_replicas(vllm_config))
    pool = activation_pool(
        budget, device, use_vmm=envs.use_vmm(), chunk_bytes=envs.vmm_chunk_size()
    )
    make: Callable[..., DiffusionModelRunner] = DiffusionModelRunner
    if adapters is not None:
        make = partial(AdaptingRunner, loaded=adapters)
    return make(
        model,
        make_planner(vllm_config, planning_budget(budget), rates, device),
        pool,
        device,
        is_reporting=is_reporting,
        agreement=agreement,
        graph_memory=GraphMemory(device, pool) if has_graphs else None,
        max_model_len=vllm_config.model_config.max_model_len,
        ranks=ranks,
    )
