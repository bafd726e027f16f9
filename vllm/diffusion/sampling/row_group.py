# SPDX-License-Identifier: Apache-2.0
"""Input of sampling: rows of requests, and the part of a model that computes their logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from vllm.diffusion.sampling.filtering import filters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion import ops
    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.sampling.editing import RowEdits


class LogitsModel(Protocol):
    """The part of a model that sampling requires."""

    vocab_start: int  # first column of this rank
    vocab_size: int  # number of columns of all ranks

    @property
    def head_matrix(self) -> torch.Tensor | None:
        """Output matrix [V, D] if logits are its product with normed hidden states; else None."""
        ...

    def final_norm(self, x: torch.Tensor, buffers: Buffers | None) -> torch.Tensor: ...

    def compute_logits(
        self, hidden_states: torch.Tensor, buffers: Buffers | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowGroup:
    """The sample rows of one request.

    Attributes:
        params: parameters of the request, including the seed.
        scoring: scores that its decoding rule needs.
        step: number of the request's step, from 0.
        forbid_mask: whether the mask token must not be proposed.
        rows: R consecutive rows of the hidden states, which predict the masked positions.
        unconditional_rows: rows of these positions in the prompt-masked sequence, with guidance.
        positions: [R] int64, positions relative to the canvas.
        adjust: function of logits [R, V] and canvas positions [R] that returns changed logits.
        token_ids: [R, k] int64 on the host: tokens whose log probabilities are needed.
        joints: choices that bind several rows, each with its rows; they read whole rows of logits,
            and are made after all parts of the step have been read.
        edits: changes of logits that the request asks for; None for none.
        num_extra_draws: number of further draws from the same logits, with the noise of later
            steps.
    """

    params: DiffusionParams
    scoring: CandidateScoring
    step: int
    forbid_mask: bool
    rows: slice
    unconditional_rows: slice | None
    positions: torch.Tensor
    adjust: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    token_ids: ops.Array | None = None
    joints: tuple[tuple[Joint, slice], ...] = ()
    edits: RowEdits | None = None
    num_extra_draws: int = 0

    @property
    def num_top(self) -> int:
        """Number of most likely tokens needed in addition to `token_ids`."""
        return 0 if self.params.score is None else self.params.score.num_top

    @property
    def has_extras(self) -> bool:
        """Whether the request needs more of the logits than candidates."""
        return self.is_alone or self.params.return_trajectory

    @property
    def is_alone(self) -> bool:
        """Whether the request needs something of its logits that no shared launch computes."""
        wants_logprobs = self.params.num_logprobs is not None or self.token_ids is not None
        return self.adjust is not None or wants_logprobs

    @property
    def is_adjusted_in_place(self) -> bool:
        """Whether a launch follows the rule's change of the logits, and neither copies them."""
        wants_others = self.params.has_filters or self.params.has_extras
        return self.scoring.adjusts_first and not wants_others and self.token_ids is None

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Token ids that must not be proposed."""
        never, mask_id = self.params.never_ids, self.params.mask_id
        return (*never, mask_id) if self.forbid_mask else never

    @property
    def counted(self) -> tuple[int, ...]:
        """Forbidden token ids that keep their probability, as in loops that may propose them.

        With filters there are none.
        """
        return () if self.params.has_filters else self.params.forbidden_ids

    @property
    def excluded(self) -> tuple[int, ...]:
        """Token ids that count as probability zero although they may be chosen.

        In the reference, the noisy and the noise-free logits are one tensor at temperature 0, and
        the end-of-sequence column of the noisy logits is masked. So both ids are excluded at
        temperature 0, and otherwise only end-of-turn.
        """
        if not self.params.confidence_eos_eot_inf:
            return ()
        eos = self.params.eos_id if self.params.temperature == 0 else None
        return tuple(token for token in (eos, self.params.eot_id) if token is not None)

    @property
    def filters(self) -> ops.Filters | None:
        """Filters applied to the distribution before a draw; None for none."""
        return filters_of(self.params, self.scoring) if self.params.has_filters else None

    @property
    def seed(self) -> int:
        if self.params.seed is None:
            raise ValueError("seed: must be drawn before sampling, got None")
        return self.params.seed

    def confidence_dtype(self, logits: torch.Tensor) -> torch.dtype:
        """Return the dtype in which scores are computed; edited logits are fp32."""
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        dtype = logits.dtype if self.edits is None else torch.float32
        return dtypes.get(self.params.confidence_dtype, dtype)

    def at_step_offset(self, count: int) -> RowGroup:
        """Return the group as it would be sampled `count` steps later."""
        return replace(self, step=self.step + count) if count else self

    def piece(self, rows: slice) -> RowGroup:
        """Return the group of some of its rows, counted from its first row."""
        token_ids = None if self.token_ids is None else self.token_ids[rows]
        joints = []
        for joint, joint_rows in self.joints:
            start, stop = max(joint_rows.start, rows.start), min(joint_rows.stop, rows.stop)
            if start < stop:
                joints.append((joint, slice(start - rows.start, stop - rows.start)))
        return replace(
            self,
            positions=self.positions[rows],
            token_ids=token_ids,
            joints=tuple(joints),
            edits=None if self.edits is None else self.edits.piece(rows),
        )


def pieces_of(num_rows: int, max_rows: int) -> list[slice]:
    """Cut rows into ranges of at most `max_rows`; at least one range."""
    return [slice(start, start + max_rows) for start in range(0, max(num_rows, 1), max_rows)]
