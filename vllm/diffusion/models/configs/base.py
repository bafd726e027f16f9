# SPDX-License-Identifier: Apache-2.0
"""The base of the configuration classes: dispatch by architecture.

One class is registered per `model_type`. Releases of different families share a model type
(released LLaDA-MoE configurations say "llada"), so `from_dict` of every class dispatches on
`architectures` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from vllm.diffusion.errors import ModelConfigError
from vllm.diffusion.families import BY_ARCHITECTURE

if TYPE_CHECKING:
    from collections.abc import Sequence


class DiffusionConfig(PreTrainedConfig):
    """Base of the configuration classes: `from_dict` picks the class by `architectures`."""

    has_no_defaults_at_init: ClassVar[bool] = True

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


CLASS_OF_FAMILY: dict[str, type[DiffusionConfig]] = {}
"""Configuration class of each family, by the family's name; the package fills it."""


def _class_of(
    architectures: Sequence[str] | None, default: type[DiffusionConfig]
) -> type[DiffusionConfig]:
    """The configuration class of the first architecture that we run."""
    if not architectures:
        return default
    for architecture in architectures:
        family = BY_ARCHITECTURE.get(architecture)
        if family is not None:
            return CLASS_OF_FAMILY[family.name]
    wanted = f"one of {', '.join(BY_ARCHITECTURE)}"
    raise ModelConfigError("architectures", list(architectures), wanted)
