# SPDX-License-Identifier: Apache-2.0
"""What trainers ask of a worker: its weights, by upstream's names of methods."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.models.weights import stored_weights
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.v1.worker.worker_base import WorkerBase

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.parallel.groups import Ranks


class WeightWorker(WorkerBase):
    """Worker whose weights can be checked and changed between steps."""

    model_runner: DiffusionModelRunner
    ranks: Ranks

    def compute_weight_checksums(self) -> dict[str, str]:
        """Return a digest of each tensor of weights on this rank; names are unique among ranks."""
        prefix = self._rank_name()
        return {
            f"{prefix}{name}": _digest(weight)
            for name, weight in stored_weights(self.model_runner.model).items()
        }

    def _rank_name(self) -> str:
        """Return upstream's name of this rank, with its place among those that divide rows."""
        places = {
            "dp": self.parallel_config.data_parallel_index,
            "pp": get_pp_group().rank_in_group,
            "pcp": get_pcp_group().rank_in_group,
            "tp": get_tp_group().rank_in_group,
        }
        if self.ranks.sequence.size > 1:
            places["sp"] = self.ranks.sequence.rank
        return "".join(f"{name}{place}:" for name, place in places.items())


def _digest(weight: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()
