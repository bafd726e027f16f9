# SPDX-License-Identifier: Apache-2.0
"""config.json of a diffusion language model, checked and completed, and facts derived from it.

Each family has one class. The model and its memory plan both use the `Architecture` of that class.
Releases of different families share a model type (released LLaDA-MoE configurations have "llada"),
so `from_dict` of every class selects the class by `architectures` first.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from transformers import PreTrainedConfig

from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.config_keys import unknown_keys
from vllm.diffusion.request.families import ARCHITECTURES, FAMILIES, family_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.diffusion.core.pages import WindowLayers
    from vllm.diffusion.core.positions import QueryGrowth, Yarn
    from vllm.diffusion.request.families import Family

DEFAULT_BLOCK_LENGTH = 32


class RouterScoring(NamedTuple):
    """Choice and weighting of experts: the attributes of `gather_gemm.Scoring`."""

    is_sigmoid: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    is_normalised: bool = False
    scale: float = 1.0
    in_fp32: bool = False
    window: int = 0
    capacity: int = 0


class Architecture(NamedTuple):
    """The facts that differ between families; the defaults are Llama's.

    Attributes:
        num_embeddings: number of rows of the embedding and of the head.
        rotary_dim: number of rotated channels of a head, the first ones.
        rotates_in_fp32: whether queries and keys are rotated in fp32 instead of the model dtype.
        yarn: YaRN parameters that change the rotary frequencies of `rope_theta`; None for none.
        query_growth: factor of queries that grows with their position; None for none.
        has_qkv_bias, has_bias: whether the projections of queries, keys and values have biases;
            whether all other products have biases.
        norms_each_head, norms_all_heads: whether queries and keys are normed, each head alone or
            all heads together.
        max_qkv: bound of the magnitude of elements of queries, keys and values; None for none.
        embedding_scale, logits_scale: factors of the embeddings and of the logits.
        dense_width: width of the MLPs without experts; 0 if every layer has experts.
        expert_layers: indices of the layers with experts. They have `num_experts` experts, and
            `num_experts_per_tok` of them per row.
        expert_width, shared_expert_width: width of an expert, and of the shared expert, if any.
        scoring: choice and weighting of experts.
        expert_bias_of: the module whose tensor `expert_bias` shifts the choice of experts, if any:
            "mlp" or "mlp.gate".
        has_fused_qkv: whether `self_attn.qkv_proj` is one tensor of the checkpoint.
        layer_names: name of every layer in the checkpoint.
        module_names: maps Llama's module names to different names in the checkpoint: first modules
            of the whole model, then modules of a layer.
        has_equal_layers: whether layers have equal heads. Head groups, rows in host memory, and
            attention that reads keys in their pages require this.
        norms_results: whether the results of attention and MLPs are normed before they are added.
        logits_cap: bound of the magnitude of logits, which a tanh applies in fp32; None for none.
    """

    num_embeddings: int
    rotary_dim: int
    dense_width: int
    layer_names: tuple[str, ...]
    rotates_in_fp32: bool = False
    has_qkv_bias: bool = False
    has_bias: bool = False
    norms_each_head: bool = False
    norms_all_heads: bool = False
    max_qkv: float | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    expert_layers: tuple[int, ...] = ()
    expert_width: int = 0
    shared_expert_width: int = 0
    scoring: RouterScoring = RouterScoring()
    expert_bias_of: str | None = None
    has_fused_qkv: bool = False
    yarn: Yarn | None = None
    query_growth: QueryGrowth | None = None
    module_names: Mapping[str, str] = MappingProxyType({})
    has_equal_layers: bool = True
    norms_results: bool = False
    logits_cap: float | None = None

    def growth_within(self, max_model_len: int) -> QueryGrowth | None:
        """Return the growth of queries if it changes any of `max_model_len` positions, else None.

        A sequence ends with a whole block, so it may be twice as long as prompt and answer.
        """
        growth = self.query_growth
        return growth if growth is not None and 2 * max_model_len > growth.length else None

    def joins_shared_expert(self, *, is_plain: bool) -> bool:
        """Whether the shared expert is stored with the others.

        This requires the same width as the others, and plain weights.
        """
        return is_plain and 0 < self.shared_expert_width == self.expert_width


class DiffusionConfig(PreTrainedConfig):
    """Base of the configuration classes; gives their common facts the same names."""

    has_no_defaults_at_init: ClassVar[bool] = True
    block_length_key: ClassVar[str] = "block_size"

    if TYPE_CHECKING:
        vocab_size: int
        hidden_size: int
        intermediate_size: int
        num_hidden_layers: int
        num_attention_heads: int
        num_key_value_heads: int
        head_dim: int
        rms_norm_eps: float
        rope_theta: float
        tie_word_embeddings: bool
        num_experts: int
        num_experts_per_tok: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the inherited `__init__`, because transformers would generate one without checks."""
        has_own = "__init__" in vars(cls)
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if not has_own:
            del cls.__init__

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration for the checkpoint's architecture, whichever class is called.

        Returns the configuration; with `return_unused_kwargs` also the unused keyword arguments, as
        in transformers.

        Raises:
            ModelConfigError: no architecture of the list is supported, or the configuration of that
                architecture is refused.
        """
        target = _class_of(config_dict, default=cls)
        return super(DiffusionConfig, target).from_dict(config_dict, **kwargs)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Return the keys of config.json that the class reads, or that it ignores as harmless."""
        return frozenset((cls.block_length_key,))

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        """Keys of config.json that no code here reads and that may affect the forward pass."""
        return unknown_keys(vars(self), self.known_keys())

    @property
    def family(self) -> Family:
        """The family of the checkpoint's architecture and model type."""
        family = family_of(self.architectures, self.model_type, vars(self))
        assert family is not None  # `from_dict` refuses any other
        return family

    @property
    def block_length(self) -> int:
        """Default block length in positions, in block-causal families."""
        return int(getattr(self, self.block_length_key, None) or DEFAULT_BLOCK_LENGTH)

    @property
    def cache_heads(self) -> tuple[int, int]:
        """Number and width of key/value heads with room for the keys of any layer."""
        return self.num_key_value_heads, self.head_dim

    def window_layers(self, num_ranks: int) -> WindowLayers | None:
        """Return the layers with a sliding window and the sizes on a rank; None without any."""
        return None

    @property
    def architecture(self) -> Architecture:
        """Facts that determine the model and the plan of its memory."""
        return Architecture(
            num_embeddings=self.vocab_size,
            rotary_dim=self.head_dim,
            dense_width=self.intermediate_size,
            layer_names=tuple(f"model.layers.{i}" for i in range(self.num_hidden_layers)),
        )


def config_classes(families: Iterable[Family] = FAMILIES) -> dict[str, type[DiffusionConfig]]:
    """Return the configuration class to register for each `model_type` of some families.

    If two families share a type, the first family's class is registered.
    """
    classes: dict[str, type[DiffusionConfig]] = {}
    for family in families:
        config_class = config_class_of(family)
        for model_type in family.model_types:
            if model_type not in classes:
                # transformers warns if a class is registered for a different model type than its
                # own
                named = {"model_type": model_type, "__module__": config_class.__module__}
                is_own = config_class.model_type == model_type
                classes[model_type] = (
                    config_class if is_own else type(config_class.__name__, (config_class,), named)
                )
    return classes


def config_class_of(family: Family) -> type[DiffusionConfig]:
    """Return the configuration class of a family."""
    config_class: type[DiffusionConfig] = named_class(family.config_class)
    return config_class


def named_class(path: str) -> Any:
    """Return the class that "module:Class" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _class_of(values: Mapping[str, Any], default: type[DiffusionConfig]) -> type[DiffusionConfig]:
    """Return the configuration class of a config.json, by its first supported architecture."""
    architectures = values.get("architectures")
    if not architectures:
        return default
    family = family_of(architectures, values.get("model_type"), values)
    if family is not None:
        return config_class_of(family)
    wanted = f"one of {', '.join(sorted(ARCHITECTURES))}"
    raise ModelConfigError("architectures", list(architectures), wanted)
