# SPDX-License-Identifier: Apache-2.0
"""Expressions of numbers within bounds, in the notation of JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.guided.regex import regex
from vllm.diffusion.guided.syntax import Byte, Either, Multiple, Then, either, maybe, text, then

if TYPE_CHECKING:
    from decimal import Decimal

    from vllm.diffusion.guided.syntax import Node

MAX_MULTIPLES = 1000  # multiples that are enumerated; also the largest factor
MAX_WHOLE_DIGITS = 27  # digits of bounds of whole numbers; `Decimal` has one more
MAX_BOUND_DIGITS = 12  # leaves a double precision for three more decimals
OPEN_DIGITS = 15  # digits before the point if that side has no bound

INTEGER = regex("-?(0|[1-9][0-9]*)")
NUMBER = regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")


class UnsupportedBoundsError(ValueError):
    """Bounds cannot be enforced; the message has the reason."""


def integers(minimum: int | None, maximum: int | None, factor: int | None) -> Node:
    """Return the whole numbers from `minimum` to `maximum` that `factor` divides.

    None means no restriction.
    """
    if factor is not None and factor != 1:
        return _multiples(minimum, maximum, factor)
    if minimum is None and maximum is None:
        return INTEGER
    if any(len(str(abs(bound or 0))) > MAX_WHOLE_DIGITS for bound in (minimum, maximum)):
        raise UnsupportedBoundsError(f"wanted bounds of at most {MAX_WHOLE_DIGITS} digits")
    return _between(minimum, maximum, 0)


def numbers(minimum: Decimal | None, maximum: Decimal | None, *, above: bool, below: bool) -> Node:
    """Return the expression of decimals between bounds.

    Args:
        minimum, maximum: the bounds; None for no bound.
        above: whether `minimum` itself is excluded.
        below: whether `maximum` itself is excluded.
    """
    if minimum is None and maximum is None:
        return NUMBER
    places = max(_places(minimum), _places(maximum))
    low = None if minimum is None else int(minimum.scaleb(places)) + above
    high = None if maximum is None else int(maximum.scaleb(places)) - below
    for bound in (low, high):
        if bound is not None and len(str(abs(bound))) > MAX_BOUND_DIGITS:
            raise UnsupportedBoundsError(f"wanted bounds of at most {MAX_BOUND_DIGITS} digits")
    more = regex("[0-9]{1,3}") if places else regex(r"\.[0-9]{1,3}")
    options = [_between(low, high, places)]
    # Further decimals lead away from zero, by less than one unit of the last place of the bounds.
    outer_low = 0 if low is None else max(low, 0)
    if high is None or high > outer_low:
        options.append(then(_digits(outer_low, None if high is None else high - 1, places), more))
    outer_high = 0 if high is None else max(-high, 0)
    if low is None or -low > outer_high:
        bottom = None if low is None else -low - 1
        options.append(then("-", _digits(outer_high, bottom, places), more))
    return either(options)


def _multiples(minimum: int | None, maximum: int | None, factor: int) -> Node:
    if not 1 <= factor <= MAX_MULTIPLES:
        raise UnsupportedBoundsError(f"wanted a whole number from 1 to {MAX_MULTIPLES}")
    if minimum is not None and maximum is not None:
        first, last = -(-minimum // factor), maximum // factor
        if last - first >= MAX_MULTIPLES:
            raise UnsupportedBoundsError(
                f"{last - first + 1} multiples lie within the bounds; "
                f"wanted at most {MAX_MULTIPLES}"
            )
        return either(str(factor * number) for number in range(first, last + 1))
    if maximum is None and (minimum is None or minimum <= 0):
        sign = maybe(text("-")) if minimum is None else Then()
        return then(sign, Multiple(factor))
    raise UnsupportedBoundsError("wanted minimum and maximum with it, neither, or minimum: 0")


def _places(bound: Decimal | None) -> int:
    """Return the number of decimals of a bound."""
    return 0 if bound is None else max(-int(bound.normalize().as_tuple().exponent), 0)


def _between(minimum: int | None, maximum: int | None, places: int) -> Node:
    """Return whole numbers of both signs, with a point before the last `places` digits."""
    options: list[Node] = []
    if maximum is None or maximum >= max(minimum or 0, 0):
        options.append(_digits(max(minimum or 0, 0), maximum, places))
    below = None if minimum is None else -minimum
    above = 1 if maximum is None else max(-maximum, 1)
    if below is None or below >= above:
        options.append(then("-", _digits(above, below, places)))
    return either(options) if options else Either()


def _digits(minimum: int, maximum: int | None, places: int) -> Node:
    """Return numbers from 0, with a point before the last `places` digits; None is unbounded."""
    if maximum is None:
        maximum = 10 ** max(OPEN_DIGITS + places, len(str(minimum))) - 1
    options, shortest = [], places + 1
    for length in range(max(len(str(minimum)), shortest), max(len(str(maximum)), shortest) + 1):
        first = max(minimum, 10 ** (length - 1) if length > shortest else 0)
        last = min(maximum, 10**length - 1)
        if first <= last:
            low, high = (str(bound).zfill(length) for bound in (first, last))
            options.append(_of_equal_length(low, high, length - places))
    return either(options) if options else Either()


def _of_equal_length(low: str, high: str, before: int) -> Node:
    """Return digits `low` to `high`; a point follows the first `before` digits if more follow."""
    if not low:
        return Then()
    point = text("." if before == 0 else "")
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    minimum, maximum = "0" * rest, "9" * rest
    if first == last:
        inner = _of_equal_length(low[1:], high[1:], before - 1)
        return then(point, low[0], inner)
    options = []
    if low[1:] != minimum:
        options.append(then(low[0], _of_equal_length(low[1:], maximum, before - 1)))
        first += 1
    if high[1:] != maximum:
        options.append(then(high[0], _of_equal_length(minimum, high[1:], before - 1)))
        last -= 1
    if first <= last:
        digits = Byte(((1 << (last - first + 1)) - 1) << (ord("0") + first))
        options.append(then(digits, _of_equal_length(minimum, maximum, before - 1)))
    return then(point, either(options))
