# SPDX-License-Identifier: Apache-2.0
"""The rule that turns a row's logits into a choice of experts and their weights, as data."""

from typing import Any, NamedTuple


class Scoring(NamedTuple):
    """Rule of a mixture of experts; the default is a softmax whose probabilities are the weights.

    Attributes:
        is_sigmoid: whether an expert's score is the sigmoid of its logit, else the softmax over all
            experts; in fp32.
        num_groups, num_kept_groups: consecutive experts form groups of equal size. Only experts of
            the `num_kept_groups` groups with the largest sums of their two best scores (with the
            bias) can be chosen.
        is_normalised: whether the weights of a row are divided by their sum.
        scale: factor of the weights, applied last.
        in_fp32: whether logits, weights and the sum of a row's terms are fp32, and only that sum is
            rounded to the model dtype; otherwise each of them is rounded.
        window, capacity: every `window` consecutive rows (the last window may have fewer) may
            choose
            only among `capacity` experts. These are the experts with the largest best score, with
            the bias, in any of these rows. 0: every row chooses alone.
        logit_scale: factor of the logits, in fp32.
    """

    is_sigmoid: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    is_normalised: bool = False
    scale: float = 1.0
    in_fp32: bool = False
    window: int = 0
    capacity: int = 0
    logit_scale: float = 1.0

    @property
    def is_compiled(self) -> bool:
        """Whether a compiled router can apply this rule."""
        return not self.window and self.logit_scale == 1.0

    def of_rows(self) -> dict[str, Any]:
        """Return the fields by name that a compiled router requires."""
        others = ("window", "capacity", "logit_scale")
        return {k: v for k, v in self._asdict().items() if k not in others}


SOFTMAX = Scoring()
