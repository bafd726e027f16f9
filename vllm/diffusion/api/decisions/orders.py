# SPDX-License-Identifier: Apache-2.0
"""Reading a call in several orders, so that answers depend less on the order of options.

Order 1 is the order of the body. Order 2 reverses options and questions. Order 3 rotates options by
half, and order 4 reverses the rotated options, and the questions. A choice with three options in
three orders, or with four in four, is read in all its rotations instead. They start from the sorted
options, so the average is the same for every order in the body.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.api.decisions.calls import BodyQuestion
    from vllm.entrypoints.generate.structured_decisions.question_types import Question

Order = tuple[int, ...]  # indices of options, in the order in which they are shown


def option_orders(item: BodyQuestion, count: int) -> list[Order]:
    """Return the orders in which the options of a question are shown."""
    options = item.question.options
    given = tuple(range(len(options)))
    if item.kind == "choice" and len(options) == count > 2:
        start = sorted(given, key=lambda i: (options[i].name, options[i].description or ""))
        return [(*start[i:], *start[:i]) for i in given]
    half = len(options) // 2
    rotated = given[half:] + given[:half]
    return [given, given[::-1], rotated, rotated[::-1]][:count]


def is_reversed(number: int) -> bool:
    """Return whether an order, counted from 0, reverses the questions."""
    return number % 2 == 1


def in_order(question: Question, order: Order) -> Question:
    """Return a question with its options in an order.

    The letters and numbers of options name their place. The labels yes and no are words, so they
    stay with their options.
    """
    if order == tuple(range(len(order))):
        return question
    options = tuple(question.options[i] for i in order)
    if question.type.name == "noul":
        return replace(question, options=options, labels=tuple(question.labels[i] for i in order))
    return replace(question, options=options)


def undo(order: Order, values: Sequence[float]) -> list[float]:
    """Return values of options that are in an order, in the order of the body."""
    result = [0.0] * len(order)
    for place, option in enumerate(order):
        result[option] = values[place]
    return result
