# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of diffusion models whose config.json does not state which model they are.

A checkpoint with the name of another model would be served without an error and with wrong answers,
so it is refused at the start with the name of the model that it is.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.request.families import A2D_KIND, REGULAR_CAUSAL
from vllm.diffusion.request.lengths import DEFAULT_BLOCK
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = init_logger(__name__)

_SDAR = "SDARForCausalLM"
_QWENS = {"Qwen2ForCausalLM": "Qwen2", "Qwen3ForCausalLM": "Qwen3"}
# Numbers of masks of a stride of I-DLM. SDAR has blocks of 4, 8, 16, 32 or 64 positions.
_STRIDES = (1, 2, 3, 7)
# The mask token of I-DLM: the first id that Qwen3's tokenizer does not use.
_QWEN3_MASK = 151669
_UNSUPPORTED = {"EfficientDLM": "Efficient-DLM"}
# Kinds of training of A2D models, whose config.json does not state the kind.
_MASKED, _BLOCKS = "mdlm", "bd3lm"
_BLOCK_SIZE = "block_size"


def refuse_unsupported(
    config: Mapping[str, Any],
    *,
    has_mask_token: Callable[[], bool],
    has_adapter: Callable[[], bool],
    generates: bool,
) -> None:
    """Refuse a checkpoint that would be served as another model.

    Args:
        config: config.json, with the values of `--hf-overrides`.
        has_mask_token: returns whether the tokenizer has a mask token.
        has_adapter: returns whether the checkpoint has a folder `adapter`.
        generates: whether the checkpoint is to generate text.

    Raises:
        ServerConfigError: naming the checkpoint's model.
    """
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    for architecture in named:
        if architecture in _UNSUPPORTED:
            raise ServerConfigError(
                f"{architecture}: this checkpoint is {_UNSUPPORTED[architecture]}, a diffusion "
                "model that is not supported"
            )
    if _SDAR in named:
        _check_sdar(config, has_adapter)
    qwen = next((architecture for architecture in named if architecture in _QWENS), None)
    if qwen is not None and generates and not envs.serves_as_autoregressive():
        reason = _mask_of(config, has_mask_token)
        if reason is not None:
            raise ServerConfigError(
                f"{qwen} with {reason}: this checkpoint is a diffusion model that is not "
                f"supported; VLLM_DLLM_SERVE_AS_AR=1 serves it as a plain {_QWENS[qwen]}"
            )


def missing_values(
    config: Mapping[str, Any], name: str, *, has_draft_adapter: bool = False
) -> dict[str, Any]:
    """Return the values that config.json lacks, or has in addition.

    A plain Qwen3 with an adapter for drafts is an I-DLM. The family of an A2D checkpoint follows
    from `block_size`: only models of block diffusion have one.

    Args:
        config: config.json, with the values of `--hf-overrides`.
        name: the checkpoint's folder, or its name on the Hugging Face Hub.
        has_draft_adapter: whether the server's settings name an adapter for drafts.

    Raises:
        ServerConfigError: the kind of training is given and unknown.
    """
    if has_draft_adapter and "Qwen3ForCausalLM" in (config.get("architectures") or ()):
        values = {"architectures": [_SDAR], REGULAR_CAUSAL: True}
        return values | ({} if "mask_token_id" in config else {"mask_token_id": _QWEN3_MASK})
    if not str(config.get("model_type")).startswith("a2d-"):
        return {}
    kind, block_size = config.get(A2D_KIND), config.get(_BLOCK_SIZE)
    if kind not in (None, _MASKED, _BLOCKS):
        raise ServerConfigError(f"{A2D_KIND}: given {kind}; wanted {_MASKED} or {_BLOCKS}")
    if kind is None:
        kind = _kind_by_name(name) if block_size is None else _BLOCKS
    if kind == _BLOCKS:
        return {} if block_size else {_BLOCK_SIZE: DEFAULT_BLOCK}
    return {} if block_size is None else {_BLOCK_SIZE: None}


def _kind_by_name(name: str) -> str:
    """Return the kind of training of an A2D checkpoint: the last kind that its name contains."""
    last = Path(name).name.lower()
    kind = max(_MASKED, _BLOCKS, key=last.rfind)
    if kind not in last:
        kind = _MASKED
        logger.info(
            "the name of this A2D checkpoint contains neither %r nor %r, so it is served as %r; "
            '--hf-overrides \'{"%s": "%s"}\' selects the other kind',
            *(_MASKED, _BLOCKS, kind, A2D_KIND, _BLOCKS),
        )
    return kind


def _check_sdar(config: Mapping[str, Any], has_adapter: Callable[[], bool]) -> None:
    """Refuse models with SDAR's architecture that may be I-DLM, or that derive from it."""
    if config.get("use_relay"):
        raise ServerConfigError("use_relay: given true; not supported")
    is_causal = config.get(REGULAR_CAUSAL)
    if is_causal is not None:
        return
    block_size = config.get("block_size")
    evidence = f"block_size {block_size}" if block_size in _STRIDES else None
    if evidence is None and has_adapter():
        evidence = "a folder adapter"
    if evidence is not None:
        raise ServerConfigError(
            f"{REGULAR_CAUSAL}: missing in config.json of a checkpoint with {evidence}; wanted "
            f"--hf-overrides '{{\"{REGULAR_CAUSAL}\": true}}' for I-DLM, false for SDAR"
        )


def _mask_of(config: Mapping[str, Any], has_mask_token: Callable[[], bool]) -> str | None:
    """Return why a Qwen checkpoint is a diffusion model, or None if it is not."""
    mask_id = config.get("mask_token_id")
    if mask_id is not None:
        return f"mask_token_id {mask_id}"
    auto_map = config.get("auto_map")
    for path in auto_map.values() if isinstance(auto_map, dict) else ():
        module = str(path).rpartition("--")[2].partition(".")[0]
        if module.startswith("modeling_") and not _is_of_transformers(module) and has_mask_token():
            return f"{module} and a mask token"
    return None


def _is_of_transformers(module: str) -> bool:
    family = module.removeprefix("modeling_")
    try:
        return find_spec(f"transformers.models.{family}.{module}") is not None
    except ImportError:
        return False
