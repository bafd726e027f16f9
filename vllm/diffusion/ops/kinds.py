# SPDX-License-Identifier: Apache-2.0
"""Choice of the projection for a layer's weight, and of upstream's method for our schemes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

import torch

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.quantisation import BlockScheme, Fp8Scheme, PackedScheme, scheme_of
from vllm.diffusion.ops.blocks import BlockMethod
from vllm.diffusion.ops.fp8 import Fp8HeadMethod, Fp8Method, Fp8Projection
from vllm.diffusion.ops.invariant import INVARIANT, is_invariant
from vllm.diffusion.ops.packed import PackedMethod, PackedProjection
from vllm.diffusion.ops.packed_checkpoints import (
    AwqMethod,
    OrderedMethod,
    OrderedProjection,
    PackedCheckpointMethod,
)
from vllm.diffusion.ops.projection import PlainProjection, Projection
from vllm.diffusion.ops.quantised_projection import QuantisedProjection
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.config import VllmConfig
    from vllm.diffusion.core.quantisation import Scheme
    from vllm.diffusion.ops.projection import ParallelLayer

# Projection by upstream's method, which determines how a weight is stored. All other methods
# multiply themselves.
_KIND_OF_METHOD: dict[type, type[Projection]] = {
    UnquantizedLinearMethod: PlainProjection,
    UnquantizedEmbeddingMethod: PlainProjection,
    Fp8Method: Fp8Projection,
    PackedMethod: PackedProjection,
    PackedCheckpointMethod: PackedProjection,
    OrderedMethod: OrderedProjection,
    AwqMethod: PackedProjection,
    BlockMethod: PackedProjection,
}
_FP8_CAPABILITY = (8, 9)


class SchemeConfig(QuantizationConfig):
    """Quantisation config of one of our schemes, for all linear layers except ignored ones."""

    def __init__(self, scheme: Scheme, *, has_fp8_head: bool = False) -> None:
        super().__init__()
        self.scheme = scheme
        self.has_fp8_head = has_fp8_head
        self._name_of: Callable[[str], str] = str

    def get_name(self) -> str:
        return self.scheme.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SchemeConfig:
        scheme = scheme_of(None, config)
        if scheme is None:
            raise ServerConfigError(
                f"quantization_config: given {config}; wanted a method of docs/quantisation.md"
            )
        return cls(scheme)

    def use_names(self, name_of: Callable[[str], str]) -> None:
        """Set the function that returns the checkpoint's name of a module, for `ignores`."""
        self._name_of = name_of

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return a layer's method; None for an embedding, and for an unquantised head."""
        if not isinstance(layer, LinearBase):
            is_fp8 = self.has_fp8_head and isinstance(layer, ParallelLMHead)
            return Fp8HeadMethod(Fp8Scheme(is_online=True)) if is_fp8 else None
        if self.ignores(prefix):
            return UnquantizedLinearMethod()
        scheme = self.scheme
        if isinstance(scheme, Fp8Scheme):
            return Fp8Method(scheme)
        if isinstance(scheme, BlockScheme):
            return BlockMethod(scheme)
        if scheme.is_made_here:
            return PackedMethod(scheme)
        if scheme.layout == "awq":
            return AwqMethod(scheme)
        return OrderedMethod(scheme) if scheme.has_order else PackedCheckpointMethod(scheme)

    def ignores(self, path: str) -> bool:
        """Return whether a module, or every part of a fused module, is not quantised.

        Raises:
            ServerConfigError: only some of the parts are quantised.
        """
        if self._lists(path):
            return True
        parent, _, name = path.rpartition(".")
        parts = self.packed_modules_mapping.get(name, [name])
        verdicts = {self._lists(f"{parent}.{part}") for part in parts}
        if len(verdicts) > 1:
            raise ServerConfigError(
                f"quantization_config: given some of {parts} as ignored; wanted all or none, "
                "because they are one matrix here"
            )
        return verdicts.pop()

    def _lists(self, path: str) -> bool:
        return any(_is_meant(entry, self._name_of(path)) for entry in self.scheme.ignored)


def _is_meant(entry: str, path: str) -> bool:
    """Return whether an entry of the ignore list matches a module by path, suffix or pattern."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), path) is not None
    pattern = re.escape(entry).replace(re.escape("*"), ".*")
    return re.search(rf"(^|\.){pattern}$", path) is not None


def use_scheme(vllm_config: VllmConfig, *, has_fp8_head: bool) -> None:
    """Configure upstream to use our methods for our quantisation schemes.

    Raises:
        ServerConfigError: the device, the dtype or the model does not support it.
    """
    model = vllm_config.model_config
    scheme = scheme_of(model.quantization, getattr(model.hf_config, "quantization_config", None))
    if has_fp8_head:
        _check_head(scheme, is_tied=model.hf_config.tie_word_embeddings)
    if scheme is None:
        _check_upstreams(model.quantization)
        return
    is_fp8 = has_fp8_head or isinstance(scheme, Fp8Scheme | BlockScheme)
    if is_fp8 and vllm_config.device_config.device_type == "cuda":
        capability = envs.kernels() or current_platform.get_device_capability()
        if capability is None or tuple(capability) < _FP8_CAPABILITY:
            raise ServerConfigError(
                f"quantization: given {scheme.name}{' with fp8_head' if has_fp8_head else ''}; "
                "wanted int4 or nf4 alone, or a GPU of compute capability 8.9 or later"
            )
        if model.dtype != torch.bfloat16:
            raise ServerConfigError(
                f"dtype: given {model.dtype} with quantization {scheme.name}; wanted bfloat16"
            )
    vllm_config.quant_config = SchemeConfig(scheme, has_fp8_head=has_fp8_head)


def _check_upstreams(name: str | None) -> None:
    """Refuse a method of upstream whose kernels are missing; registered methods are accepted."""
    is_there = getattr(current_platform, "has_compiled_kernels", True)
    # Another package contains its kernels.
    is_there = is_there or name == "torchao"
    if name in get_args(QuantizationMethods) and not is_there:
        raise ServerConfigError(
            f"quantization: given {name}, which needs vLLM kernels that are not installed; wanted "
            "fp8, int4 or nf4 with a plain checkpoint, or none"
        )


def _check_head(scheme: Scheme | None, *, is_tied: bool) -> None:
    wanted = None
    if scheme is None:
        wanted = "--quantization fp8, int4 or nf4 with it"
    elif is_tied:
        wanted = "false: the head is the embedding's matrix (tie_word_embeddings)"
    if wanted is not None:
        raise ServerConfigError(f"dllm settings: fp8_head: given true; wanted {wanted}")


def projection_of(layer: ParallelLayer) -> Projection:
    """Return the projection for a layer's weight, after the weight is loaded and processed."""
    return kind_of(layer)(layer)


def kind_of(layer: ParallelLayer) -> type[Projection]:
    """Return the class of a layer's projection, which is known before its weight is loaded."""
    methods = type(layer.quant_method).__mro__
    kind = next((_KIND_OF_METHOD[m] for m in methods if m in _KIND_OF_METHOD), QuantisedProjection)
    return INVARIANT[kind] if is_invariant(layer) else kind


def repacked_form(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return the format of a checkpoint whose tensors are repacked after loading, or None."""
    for module in modules:
        method = getattr(module, "quant_method", None)
        if isinstance(method, PackedCheckpointMethod | OrderedMethod | AwqMethod):
            return str(method.scheme.layout)
        if isinstance(method, BlockMethod) and method.scheme.scale_name == "weight_scale":
            return "compressed-tensors"
    return None


def kind_of_head(
    quantisation: object | None, *, is_batch_invariant: bool = False
) -> type[Projection]:
    """Return the class of the output head's projection."""
    is_fp8 = isinstance(quantisation, SchemeConfig) and quantisation.has_fp8_head
    kind = Fp8Projection if is_fp8 else PlainProjection
    return INVARIANT[kind] if is_batch_invariant else kind


def kinds_of(
    quantisation: object | None, *, is_batch_invariant: bool = False
) -> tuple[type[Projection], ...]:
    """Return all classes of projections that a model may have, by its quantisation config."""
    if is_batch_invariant:
        return tuple(INVARIANT[kind] for kind in kinds_of(quantisation))
    if quantisation is None:
        return (PlainProjection,)
    if not isinstance(quantisation, SchemeConfig):
        return (QuantisedProjection, PlainProjection)
    scheme = quantisation.scheme
    kind: type[Projection] = Fp8Projection
    if isinstance(scheme, BlockScheme):
        kind = PackedProjection
    elif isinstance(scheme, PackedScheme):
        kind = OrderedProjection if scheme.has_order else PackedProjection
    return (kind, PlainProjection) if scheme.ignored else (kind,)
