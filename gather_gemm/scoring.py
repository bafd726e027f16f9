# SPDX-License-Identifier: Apache-2.0
"""Rule by which a row's logits become a choice of experts and their weights, as data."""

from typing import Any, NamedTuple


class Scoring(NamedTuple):
    """Rule of a mixture of experts; the default is a softmax whose probabilities are the weights.

    Attributes:
        is_sigmoid: whether an expert's score is the sigmoid of its logit, else the softmax over all
            experts; in fp32.
        num_groups, num_kept_groups: experts lie in groups of equal size, one after the other, and
            only those of some groups can be chosen: of the groups whose two best experts, by scores
            with the bias, have the largest sums.
        is_normalised: whether the weights of a row are divided by their sum.
        scale: factor of the weights, after that.
        in_fp32: whether logits, weights and the sum of a row's terms are fp32, and only that sum is
            rounded to the model dtype; else each is rounded by itself.
        window, capacity: each `window` consecutive rows, the last ones maybe fewer, may choose only
            among the `capacity` experts whose best scores in any of these rows, with the bias, are
            the largest; 0 where every row chooses alone.
    """

    is_sigmoid: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    is_normalised: bool = False
    scale: float = 1.0
    in_fp32: bool = False
    window: int = 0
    capacity: int = 0

    def of_rows(self) -> dict[str, Any]:
        """Return the values by their names, without those of windows."""
        return {k: v for k, v in self._asdict().items() if k not in ("window", "capacity")}


SOFTMAX = Scoring()
