# SPDX-License-Identifier: Apache-2.0
"""config.json of a diffusion language model, checked and completed, and the facts that follow.

Of each family there is one class. The model that is built and the plan of its memory both ask it
for the facts below; what a family does not say is as in Llama. Releases of different families share
a model type (released LLaDA-MoE configurations say "llada"), so `from_dict` of every class
dispatches on `architectures` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from vllm.diffusion.errors import ModelConfigError
from vllm.diffusion.families import BY_ARCHITECTURE, FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.families import Family


class DiffusionConfig(PreTrainedConfig):
    """Base of the configuration classes.

    Every one has, by these names, `hidden_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads`, `head_dim`, `vocab_size`, `rms_norm_eps`, `rope_theta`,
    `tie_word_embeddings` and, where `dense_width` is not its own, `intermediate_size`; and where
    layers have experts `num_experts`, `num_experts_per_tok` and `expert_intermediate_size`.

    Attributes:
        CHECKPOINT_NAMES: names of modules in the checkpoint where they are not Llama's, by Llama's:
            of the whole model first, then within a layer.
    """

    has_no_defaults_at_init: ClassVar[bool] = True
    CHECKPOINT_NAMES: ClassVar[dict[str, str]] = {}

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
        expert_intermediate_size: int

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration of the checkpoint's architecture, whatever class is asked.

        Returns the configuration (with the unused keyword arguments where
        `return_unused_kwargs` is true, as in transformers).

        Raises:
            ModelConfigError: no architecture of the list is one that we run, or the
                configuration of that architecture is refused.
        """
        target = _class_of(config_dict.get("architectures"), default=cls)
        return super(DiffusionConfig, target).from_dict(config_dict, **kwargs)

    @property
    def family(self) -> Family:
        """The family of the checkpoint's architecture."""
        architectures = self.architectures or []
        return next(BY_ARCHITECTURE[a] for a in architectures if a in BY_ARCHITECTURE)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding and of the head."""
        return self.vocab_size

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head, the first ones."""
        return self.head_dim

    @property
    def rotates_in_fp32(self) -> bool:
        """Queries and keys are rotated in fp32, else in the model dtype."""
        return False

    @property
    def has_qkv_bias(self) -> bool:
        """The projections of queries, keys and values have biases."""
        return self.has_bias

    @property
    def has_bias(self) -> bool:
        """All other products have biases."""
        return False

    @property
    def norms_each_head(self) -> bool:
        """Queries and keys are normed, every head alone."""
        return False

    @property
    def norms_all_heads(self) -> bool:
        """Queries and keys are normed, all heads together."""
        return False

    @property
    def qkv_bound(self) -> float | None:
        """Most that an element of queries, keys and values may be, either way; None for no end."""
        return None

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return 1.0

    @property
    def logits_scale(self) -> float:
        """What logits are multiplied by."""
        return 1.0

    @property
    def dense_width(self) -> int:
        """Width of the MLPs that are no experts; 0 where every layer has experts."""
        return self.intermediate_size

    @property
    def has_expert_bias(self) -> bool:
        """A bias shifts the choice of experts."""
        return False

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts; else it has one dense MLP."""
        return False

    def checkpoint_layer(self, layer: int) -> str:
        """The name of a layer in the checkpoint."""
        return f"model.layers.{layer}"


def config_classes() -> dict[str, type[DiffusionConfig]]:
    """The configuration class to register for each `model_type`; of two families the first's."""
    classes: dict[str, type[DiffusionConfig]] = {}
    for family in FAMILIES:
        config_class = config_class_of(family)
        for model_type in family.model_types:
            if model_type not in classes:
                # transformers warns where a class has another model type than it is registered for
                named = {"model_type": model_type, "__module__": config_class.__module__}
                is_own = config_class.model_type == model_type
                classes[model_type] = config_class if is_own else type(
                    config_class.__name__, (config_class,), named
                )
    return classes


def config_class_of(family: Family) -> type[DiffusionConfig]:
    """The configuration class that a family's record names."""
    module, _, name = family.config_class.partition(":")
    config_class: type[DiffusionConfig] = getattr(import_module(module), name)
    return config_class


def _class_of(
    architectures: Sequence[str] | None, default: type[DiffusionConfig]
) -> type[DiffusionConfig]:
    """The configuration class of the first architecture that we run."""
    if not architectures:
        return default
    for architecture in architectures:
        if architecture in BY_ARCHITECTURE:
            return config_class_of(BY_ARCHITECTURE[architecture])
    wanted = f"one of {', '.join(BY_ARCHITECTURE)}"
    raise ModelConfigError("architectures", list(architectures), wanted)
