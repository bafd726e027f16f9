# SPDX-License-Identifier: Apache-2.0
"""Configurations of the families' released checkpoints."""

import copy
from typing import Any

from make_dummy_checkpoint import configuration

from vllm.diffusion.models.dream import DreamConfig
from vllm.diffusion.models.fast_dllm import FastDLLMConfig
from vllm.diffusion.models.idlm import IDLMConfig
from vllm.diffusion.models.llada import LLaDAConfig
from vllm.diffusion.models.llada2 import LLaDA2Config
from vllm.diffusion.models.llada22 import LLaDA22Config
from vllm.diffusion.models.llada_moe import LLaDAMoEConfig
from vllm.diffusion.models.nemotron import NemotronConfig
from vllm.diffusion.models.sdar import SDARConfig
from vllm.diffusion.models.sdar_moe import SDARMoeConfig

RELEASED = {
    "llada": (LLaDAConfig, configuration("llada")),
    "dream": (DreamConfig, configuration("dream")),
    "moe": (LLaDAMoEConfig, configuration("llada-moe")),
    "sdar": (SDARConfig, configuration("sdar", "4b")),
    "idlm": (IDLMConfig, configuration("idlm")),
    "sdar_moe": (SDARMoeConfig, configuration("sdar-moe")),
    "llada2": (LLaDA2Config, configuration("llada2", "mini")),
    "llada22": (LLaDA22Config, configuration("llada22", "mini")),
    "nemotron": (NemotronConfig, configuration("nemotron", "14b")),
    "fast_dllm": (FastDLLMConfig, configuration("fast-dllm")),
}


def make_config(family: str, *without: str, **overrides: Any) -> Any:
    """Build a family's configuration from released values, without some and with some replaced."""
    kind, released = RELEASED[family]
    values = {key: value for key, value in released.items() if key not in without}
    config = kind.from_dict(copy.deepcopy({**values, **overrides}))
    assert isinstance(config, kind)
    return config
