# SPDX-License-Identifier: Apache-2.0
"""What sampling is given: rows of requests, and the end of a model that makes logits of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion import ops
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.params import DiffusionParams
    from vllm.diffusion.scoring import Scoring


class LogitsModel(Protocol):
    """The part of a model that sampling needs."""

    vocab_start: int  # first column of this rank
    vocab_size: int  # columns of all ranks

    @property
    def head_matrix(self) -> torch.Tensor | None:
        """[V, D] where the logits are just its product with normed hidden states; else None."""
        ...

    def final_norm(self, x: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowGroup:
    """The sample rows of one request.

    Attributes:
        params: the request's parameters, seed included.
        scoring: what its decoding rule wants to know.
        step: number of the request's forward, from 0.
        forbid_mask: the mask token must not be proposed.
        rows: R consecutive rows of the hidden states, which predict the masked positions.
        unconditional_rows: the same positions in the prompt-masked sequence, when guidance is on.
        positions: [R] int64, positions relative to the canvas.
        adjust: replaces logits [R, V] of canvas positions [R] by what the request makes of them.
        token_ids: [R, k] int64 on the host: tokens whose log probabilities are wanted.
        joints: choices that bind several rows, and which of the rows; they read whole rows of
            logits, and are made when all parts of the step have been read.
    """

    params: DiffusionParams
    scoring: Scoring
    step: int
    forbid_mask: bool
    rows: slice
    unconditional_rows: slice | None
    positions: torch.Tensor
    adjust: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    token_ids: ops.Array | None = None
    joints: tuple[tuple[Joint, slice], ...] = ()

    @property
    def num_top(self) -> int:
        """How many of the most likely tokens are wanted beside those of `token_ids`."""
        return 0 if self.params.score is None else self.params.score.num_top

    @property
    def has_extras(self) -> bool:
        """Whether more is wanted of the logits than candidates."""
        wants_logprobs = self.params.num_logprobs is not None or self.token_ids is not None
        return self.adjust is not None or wants_logprobs

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Token ids that must not be proposed."""
        eos = self.params.eos_id if self.params.logits_eos_inf else None
        mask = self.params.mask_id if self.forbid_mask else None
        return tuple(token for token in (eos, mask) if token is not None)

    @property
    def excluded(self) -> tuple[int, ...]:
        """Token ids whose probability is zero although they may be chosen.

        In the reference the noisy and the noise-free logits are one tensor at temperature 0, and
        its end-of-sequence column is masked in the noisy one: so both ids at temperature 0, else
        only end-of-turn.
        """
        if not self.params.confidence_eos_eot_inf:
            return ()
        eos = self.params.eos_id if self.params.temperature == 0 else None
        return tuple(token for token in (eos, self.params.eot_id) if token is not None)

    @property
    def filters(self) -> tuple[str, ...]:
        """Which of top_p and top_k cut the distribution that tokens are drawn from."""
        params, draw = self.params, self.scoring.draw
        if draw == "gumbel" or (draw == "filtered" and params.temperature == 0):
            return ()
        is_cut = params.top_p is not None and params.top_p < 1
        names = ("top_p" if is_cut else None, None if params.top_k is None else "top_k")
        return tuple(name for name in names if name is not None)

    @property
    def seed(self) -> int:
        if self.params.seed is None:
            raise ValueError("seed: must be drawn before sampling, got None")
        return self.params.seed

    def confidence_dtype(self, logits: torch.Tensor) -> torch.dtype:
        """Precision that the scores are asked in."""
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        return dtypes.get(self.params.confidence_dtype, logits.dtype)

    def piece(self, rows: slice) -> RowGroup:
        """What is asked of some of its rows, counted from its first one."""
        token_ids = None if self.token_ids is None else self.token_ids[rows]
        joints = []
        for joint, own in self.joints:
            start, stop = max(own.start, rows.start), min(own.stop, rows.stop)
            if start < stop:
                joints.append((joint, slice(start - rows.start, stop - rows.start)))
        return replace(
            self, positions=self.positions[rows], token_ids=token_ids, joints=tuple(joints)
        )
