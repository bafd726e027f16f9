# SPDX-License-Identifier: Apache-2.0
"""Selectors: a place between candidates and commit where a request may choose tokens jointly.

A decoding rule takes candidates one by one; output that must match a grammar wants tokens that go
together. A request may therefore carry a `Selector`, which wraps its rule, whichever that is. It
takes part twice in a forward:

1. `adjust_logits`, where logits exist: on the device, part by part, whole rows of all ranks. What
   it makes of them is what tokens are drawn from; it may keep there what a joint choice wants.
2. `select`, when all candidates are on the host: it gives the rule candidates to choose among,
   its own tokens and scores if it likes, and says what is committed of the rule's choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm.diffusion.decoding.base import Array, Candidates, Commit, DecodingRule


class Selector:
    """A request's part in its commits; this one changes nothing. All ranks must decide alike."""

    reads_logits: ClassVar[bool] = False  # `adjust_logits` is to be called

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits to use instead of the rule's `logits`; the host must not wait.

        Called once per forward and sample row, in chunks of rows.

        Args:
            logits: [R, V], all columns; may be overwritten.
            positions: [R] int64, from the start of the canvas.
        """
        return logits

    def select(
        self,
        tokens: Array,
        candidates: Candidates,
        choose: Callable[[Candidates], Commit],
    ) -> Commit:
        """Return what is committed after a forward.

        Args:
            tokens: [T] int64, the sequence before the commit; read only.
            candidates: candidates of the forward.
            choose: the rule's choice among candidates of equal positions, in the rule's order. Must
                be called once, as a rule counts its steps.

        Returns:
            Positions of candidates, and any tokens there. Where the rule commits a token, at least
            one must be committed: rules count on getting on.
        """
        return choose(candidates)


class SelectionError(RuntimeError):
    """A selector broke its contract."""


def select(selector: Selector, rule: DecodingRule, tokens: Array, candidates: Candidates) -> Commit:
    """Return what `selector` commits of `rule`'s choice; arguments as for `Selector.select`.

    Raises:
        SelectionError: the selector broke its contract.
    """
    chosen: list[Commit] = []

    def choose(among: Candidates) -> Commit:
        chosen.append(rule.decide(among))
        return chosen[-1]

    commit = selector.select(tokens, candidates, choose)
    if len(chosen) != 1:
        raise SelectionError(f"selector: asked the rule {len(chosen)} times; wanted once")
    if not np.isin(commit.positions, candidates.positions).all():
        raise SelectionError(
            f"selector: committed positions {commit.positions.tolist()}; wanted some of "
            f"{candidates.positions.tolist()}"
        )
    mask_id = rule.params.mask_id
    rules, selected = (int((c.tokens != mask_id).sum()) for c in (chosen[0], commit))
    if rules and not selected:
        raise SelectionError(
            f"selector: committed nothing where the rule chose {rules} tokens; wanted at least one"
        )
    return commit
