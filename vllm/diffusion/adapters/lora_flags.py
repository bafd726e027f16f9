# SPDX-License-Identifier: Apache-2.0
"""What a server's flags say about adapters, and the sizes of their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.diffusion.adapters.matrices import Matrices
from vllm.diffusion.adapters.peft_files import AdapterReader
from vllm.diffusion.core.errors import ServerConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig
    from vllm.diffusion.adapters.draft_adapter import DraftAdapter

logger = init_logger(__name__)

_NO_TOWER = "wanted none: there is neither tower nor classifier"
# Flags of upstream that have no meaning here: attribute, and the end of the refusal.
_REFUSED = {
    "enable_mixed_moe_lora_format": "wanted false: experts take no adapters",
    "enable_moe_shared_loras": "wanted false: experts take no adapters",
    "enable_tower_connector_lora": _NO_TOWER,
    "default_mm_loras": _NO_TOWER,
    "max_lora_cls_labels": _NO_TOWER,
}
_WITHOUT_EFFECT = ("fully_sharded_loras", "specialize_active_lora")


def check_flags(vllm_config: VllmConfig) -> None:
    """Refuse flags about adapters that cannot be served.

    Raises:
        ServerConfigError: naming the flag.
    """
    lora, model = vllm_config.lora_config, vllm_config.model_config
    if lora is None:
        return
    if lora.lora_dtype not in (None, "auto", model.dtype):
        given = str(lora.lora_dtype).removeprefix("torch.")
        raise ServerConfigError(
            f"lora_dtype: given {given}; wanted auto: adapters have the model's dtype"
        )
    for name, wanted in _REFUSED.items():
        value = getattr(lora, name, None)
        if value:
            raise ServerConfigError(f"{name}: given {_shown(value)}; {wanted}")
    ignored = [name for name in _WITHOUT_EFFECT if getattr(lora, name, False)]
    if ignored:
        logger.info(
            "%s: no effect, because adapters need no further sum over ranks", ", ".join(ignored)
        )
    names = Matrices(model.hf_config).last_names
    unknown = [name for name in lora.target_modules or () if name not in names]
    if unknown:
        raise ServerConfigError(
            f"lora_target_modules: given {unknown[0]!r}; wanted some of {', '.join(names)}"
        )


def reader_of(vllm_config: VllmConfig) -> AdapterReader | None:
    """Return the reader of a server's adapters; None without `enable_lora`."""
    lora, model = vllm_config.lora_config, vllm_config.model_config
    if lora is None:
        return None
    matrices = matrices_of(lora, model.hf_config)
    is_on_gpu = vllm_config.device_config.device_type == "cuda"
    return AdapterReader(matrices, lora.max_lora_rank, model.dtype, is_pinned=is_on_gpu)


def matrices_of(lora: LoRAConfig, config: Any) -> Matrices:
    """Return the matrices that a server's adapters may change."""
    return Matrices(config, lora.target_modules)


class SlotSizes(NamedTuple):
    """Sizes of the slots of an engine.

    Attributes:
        matrices: the matrices that some adapter may change.
        num_requested: number of slots for adapters of requests.
        max_rank: highest rank of an adapter.
        draft: the adapter for drafts, whose slot follows; None without one.
        num_known: maximum number of adapters in host memory.
    """

    matrices: Matrices
    num_requested: int
    max_rank: int
    draft: DraftAdapter | None
    num_known: int = 0

    @property
    def num_slots(self) -> int:
        return self.num_requested + (self.draft is not None)

    def known_bytes(self, dtype: torch.dtype) -> int:
        """Return the maximum bytes that a rank's adapters take in host memory."""
        sizes = (matrix.num_rows + matrix.num_columns for matrix in self.matrices.all.values())
        return self.num_known * self.max_rank * sum(sizes) * dtype.itemsize


def slot_sizes(vllm_config: VllmConfig, draft: DraftAdapter | None) -> SlotSizes | None:
    """Return the sizes of the slots; None in an engine without adapters."""
    lora, config = vllm_config.lora_config, vllm_config.model_config.hf_config
    if lora is None:
        if draft is None:
            return None
        return SlotSizes(Matrices(config, draft.sizes.modules), 0, draft.sizes.rank, draft)
    modules, rank = lora.target_modules, lora.max_lora_rank
    if draft is not None:
        modules = modules and [*modules, *draft.sizes.modules]
        rank = max(rank, draft.sizes.rank)
    num_known = lora.max_cpu_loras or lora.max_loras
    return SlotSizes(Matrices(config, modules), lora.max_loras, rank, draft, num_known)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
