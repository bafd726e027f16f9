# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.2 (Bie et al. 2025, arXiv:2512.15745), mini and flash.

LLaDA2's layers, in which rows choose their experts by blocks: the rows of a window of `block_size`
positions choose among the `expert_capacity` experts with the highest score of any of them.
LLaDA2.0 has the same architecture and model type; `expert_capacity` distinguishes the two. Two
tokens, whose ids are only in config.json, delete and insert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config_checks import check_positive, refuse
from vllm.diffusion.models.llada2 import LLaDA2Config

if TYPE_CHECKING:
    from vllm.diffusion.models.config import RouterScoring


class LLaDA22Config(LLaDA2Config):
    """config.json of LLaDA2.2; see `LLaDA2Config`.

    Released files still name groups of experts, which are not used.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **LLaDA2Config.DEFAULTS,
        "block_size": 32,
        "expert_capacity": None,
        "delete_token_id": None,
        "split_token_id": None,
    }
    SIZES: ClassVar[tuple[str, ...]] = tuple(
        key for key in LLaDA2Config.SIZES if key not in ("n_group", "topk_group")
    )

    if TYPE_CHECKING:
        block_size: int
        expert_capacity: int
        delete_token_id: int
        split_token_id: int

    def check_routing(self, values: dict[str, Any]) -> None:
        chosen, experts = values["num_experts_per_tok"], values["num_experts"]
        capacity = values.get("expert_capacity")
        if not isinstance(capacity, int) or not chosen <= capacity <= experts:
            wanted = f"from num_experts_per_tok {chosen} to num_experts {experts}"
            refuse(values, "expert_capacity", wanted)
        check_positive(values, "block_size")
        for key in ("delete_token_id", "split_token_id"):
            token, size = values[key], values["vocab_size"]
            if not isinstance(token, int) or not 0 <= token < size:
                refuse(values, key, f"an id from 0 to vocab_size - 1 = {size - 1}")

    @property
    def scoring(self) -> RouterScoring:
        return super().scoring._replace(
            num_groups=1,
            num_kept_groups=1,
            window=self.block_size,
            capacity=self.expert_capacity,
        )
