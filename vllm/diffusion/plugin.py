# SPDX-License-Identifier: Apache-2.0
"""Functions that upstream's plugin loaders call, only for registration.

`register` and `platform` run in API server, engine and worker processes, possibly several times.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.diffusion.request.families import DIFFUSION_GEMMA, FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ModelConfig, VllmConfig
    from vllm.diffusion.request.families import Family
    from vllm.engine.arg_utils import EngineArgs


def register() -> None:
    """Register our models, their configurations and tokenizers, and our variables with upstream.

    Every process of a server calls this at its start, so it also starts to watch the parent
    process.
    """
    import vllm.envs
    from vllm.diffusion.core import envs
    from vllm.diffusion.models import tokenizers
    from vllm.diffusion.process import log_filter, watchdog

    watchdog.follow_parent()
    envs.register(vllm.envs.environment_variables)
    log_filter.rename_start_lines()
    tokenizers.register()
    _register_transfer()
    _check_engines_first()
    _register_configurations()
    _register_models()


def _families() -> list[Family]:
    """Return the families that Mosaic serves in this process; vLLM serves all other models."""
    from vllm.diffusion.core import envs

    left = [DIFFUSION_GEMMA] if envs.leaves_gemma() else []
    return [family for family in FAMILIES if family not in left]


def _is_left(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that vLLM serves by the user's wish."""
    names = config.get("architectures") or ()
    left = [family for family in FAMILIES if family not in _families()]
    return any(name in family.architectures for family in left for name in names)


def _refuse_without_kernels(model: str) -> None:
    from vllm.diffusion.core.errors import ServerConfigError
    from vllm.platforms import current_platform

    if not getattr(current_platform, "has_compiled_kernels", True):
        raise ServerConfigError(
            f"VLLM_DLLM_UPSTREAM_GEMMA: given 1; wanted 0 for model {model}: vLLM's own models "
            "need its compiled kernels, and this installation has none"
        )


def _register_transfer() -> None:
    """Register the transfer of weights by files; its module is imported at first use."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "disk" not in WeightTransferEngineFactory._registry:
        module = "vllm.diffusion.engine.worker.disk_transfer"
        WeightTransferEngineFactory.register_engine("disk", module, "DiskTransfer")


def _check_engines_first() -> None:
    """Refuse an engine that cannot start, before upstream searches the Hub for a model."""
    from vllm.diffusion.config import Settings, server_settings
    from vllm.diffusion.core import envs
    from vllm.diffusion.core.errors import ServerConfigError
    from vllm.diffusion.process import preflight
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_checked(engine: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        # The error is reported to the user here, instead of in the engine's process.
        envs.check()
        speculation = (engine.speculative_config, engine.spec_method, engine.spec_model)
        preflight.check_model(
            engine.model, is_speculating=any(speculation), load_format=str(engine.load_format)
        )
        _check_names(engine)
        try:
            config = create(engine, *args, **kwargs)
        except ImportError as error:  # a quantisation, loader or parser from a missing package
            reason = " ".join(str(error).split())
            raise ServerConfigError(f"model {engine.model}: {reason}") from error
        # It refuses an unknown --load-format.
        get_model_loader(config.load_config)
        family = Settings.of(server_settings(config.additional_config)).family
        if family is not None:
            hf_config = config.model_config.hf_config
            named = hf_config.architectures, hf_config.model_type, vars(hf_config)
            preflight.check_family(engine.model, family, *named)
        return config

    EngineArgs.create_engine_config = create_checked


def _check_names(engine: EngineArgs) -> None:
    """Refuse a diffusion model that has the name of another model, before it is configured.

    If only the name of a checkpoint states which model it is, overrides of config.json say so.
    """
    from vllm.diffusion.config import Settings, server_settings
    from vllm.diffusion.process import other_names
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    config = get_hf_file_to_dict("config.json", engine.model, engine.revision)
    if not isinstance(config, dict):
        return
    if _is_left(config):
        _refuse_without_kernels(engine.model)
        return
    overrides = engine.hf_overrides if isinstance(engine.hf_overrides, dict) else {}
    settings = Settings.of(server_settings(engine.additional_config))
    missing = other_names.missing_values(
        {**config, **overrides},
        engine.model,
        has_draft_adapter=settings.draft_adapter is not None,
    )
    if missing:
        overrides = engine.hf_overrides = {**overrides, **missing}

    def has_mask_token() -> bool:
        tokenizer = engine.tokenizer or engine.model
        revision = engine.tokenizer_revision or engine.revision
        files = ("tokenizer_config.json", "special_tokens_map.json")
        contents = (get_hf_file_to_dict(name, tokenizer, revision) for name in files)
        return any((content or {}).get("mask_token") for content in contents)

    def has_adapter() -> bool:
        name = "adapter/adapter_config.json"
        return get_hf_file_to_dict(name, engine.model, engine.revision) is not None

    other_names.refuse_unsupported(
        {**config, **overrides},
        has_mask_token=has_mask_token,
        has_adapter=has_adapter,
        generates=engine.runner != "pooling" and engine.convert in ("auto", "none"),
    )


def _register_configurations() -> None:
    """Register configuration classes by model type, and the hooks that adapt an engine's config."""
    from transformers import AutoConfig

    from vllm.diffusion.models import llamas
    from vllm.diffusion.models.config import DiffusionConfig, config_classes
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    class LlamaModelConfig(VerifyAndUpdateConfig):
        """Upstream's hook for Llama, whose name some checkpoints of our families have."""

        @staticmethod
        def verify_and_update_model_config(model_config: ModelConfig) -> None:
            llamas.register_llama(model_config)
            if isinstance(model_config.hf_config, DiffusionConfig):
                _register_quantisation()

    class DiffusionModelConfig(LlamaModelConfig):
        """Hook for our architectures, which runs while the engine is configured."""

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            from vllm.diffusion import ops
            from vllm.diffusion.api import validator
            from vllm.diffusion.config import configure, settings_of

            configure(vllm_config)
            ops.use_scheme(vllm_config, has_fp8_head=settings_of(vllm_config).fp8_head)
            validator.install()

    for model_type, config_class in config_classes(_families()).items():
        _CONFIG_REGISTRY[model_type] = config_class
        # Upstream registers it where it reads a configuration; tokenizers need it in other
        # processes, too.
        AutoConfig.register(model_type, config_class, exist_ok=True)
    for family in _families():
        MODELS_CONFIG_MAP.update(dict.fromkeys(family.architectures, DiffusionModelConfig))
    MODELS_CONFIG_MAP.setdefault("LlamaForCausalLM", LlamaModelConfig)


def _register_quantisation() -> None:
    """Register our ways to quantise, once a model of ours is configured.

    Other models keep what upstream does with these names.
    """
    from vllm.diffusion import ops
    from vllm.diffusion.core.quantisation import BITSANDBYTES, ONLINE
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    for name in {*ONLINE, BITSANDBYTES} - set(QUANTIZATION_METHODS):
        register_quantization_config(name)(ops.SchemeConfig)


def _register_models() -> None:
    from vllm.diffusion.models.config import named_class
    from vllm.model_executor.models import ModelRegistry

    # The class is registered itself, not by name. For a name, upstream would start another
    # process, once on every machine, which imports everything to inspect the class.
    for family in _families():
        for architecture in family.architectures:
            ModelRegistry.register_model(architecture, named_class(family.model_class))


def platform() -> str | None:
    """Return the platform of this machine, or None to use one of upstream's.

    Upstream's platform is used on a CUDA machine with upstream's compiled kernels, on other
    accelerators, and in CPU builds of upstream.
    """
    import importlib.metadata
    import importlib.util

    import torch

    if torch.version.hip is not None or torch.xpu.is_available():
        return None
    if torch.cuda.is_available():
        if importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
            return None
        return "vllm.diffusion.process.platform.DiffusionCudaPlatform"
    if "cpu" in importlib.metadata.version("vllm"):
        return None
    return "vllm.diffusion.process.platform.DiffusionCpuPlatform"
