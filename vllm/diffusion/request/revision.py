# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with a text instead of masks, and revise it.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.language import language_from
from vllm.diffusion.guided.open_window import FREE
from vllm.diffusion.guided.repair import MAX_CELLS, NoStringError, fewest_changes
from vllm.diffusion.request.algorithms import algorithms_for
from vllm.diffusion.request.families import FAMILIES
from vllm.diffusion.request.values import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.guided.automaton import Array
    from vllm.diffusion.guided.guides import Guide, Spec
    from vllm.diffusion.request.families import Family
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.request import Request

DEFAULT_THRESHOLD = 0.1
MAX_ROUNDS = 8
MAX_SLACK = 256  # masks behind a run of masked tokens
# Runs for whose `slack` a canvas without a given length has room.
SLACK_RUNS = 2

Span = tuple[int, int]  # first position and last + 1

# The two forms of the text.
_TEXTS = ("canvas_text", "canvas_token_ids")
# Fields that act only together with a text, with the values that ask for nothing.
_BESIDE_A_TEXT = {
    "pinned": (),
    "noise": None,
    "edit_threshold": None,
    "max_edits": None,
    "edit_rounds": 1,
    "slack": 0,
    "return_diff": False,
}
# Fields that choose tokens by the scores of masked copies.
_OF_SCORES = ("noise", "edit_threshold", "max_edits", "edit_rounds", "slack")


@dataclass(frozen=True)
class Revision:
    """A text on the canvas, and which of its tokens may be masked again.

    Attributes:
        token_ids: the tokens with which the canvas begins; mask tokens are open.
        pinned: positions that never change, ascending and disjoint.
        noise: largest share of the tokens that are masked again; None for no limit.
        threshold: probability below which a token may be masked again; None for no limit.
        max_edits: most tokens that may differ in the end; None for no limit.
        rounds: times that the text is scored and filled.
        broken: positions that are masks from the beginning, because their tokens break the format
            of the answer.
        slack: masks added behind every run of tokens that are masked again.
    """

    token_ids: tuple[int, ...]
    pinned: tuple[Span, ...] = ()
    noise: float | None = None
    threshold: float | None = DEFAULT_THRESHOLD
    max_edits: int | None = None
    rounds: int = 1
    broken: tuple[int, ...] = ()
    slack: int = 0

    @property
    def changes_tokens(self) -> bool:
        """Whether tokens may be masked again at all."""
        return self.noise != 0 and self.threshold != 0 and self.max_edits != 0

    def is_pinned(self, length: int) -> Array:
        """Return whether each of `length` positions never changes, [length] bool."""
        result = np.zeros(length, dtype=np.bool_)
        for start, stop in self.pinned:
            result[start:stop] = True
        return result

    def num_before_end(self, end_ids: frozenset[int]) -> int:
        """Return the number of tokens before the first one that would end an answer."""
        ends = (at for at, token in enumerate(self.token_ids) if token in end_ids)
        return next(ends, len(self.token_ids))


def read_spans(spelling: str, value: Any) -> tuple[Span, ...]:
    """Check a list of [start, stop) pairs, and return them."""
    if not isinstance(value, (list, tuple)):
        raise InvalidParameterError(spelling, value, "wanted a list of [start, stop] pairs")
    for number, span in enumerate(value):
        is_pair = isinstance(span, (list, tuple)) and len(span) == 2
        if not is_pair or not all(type(end) is int for end in span) or not 0 <= span[0] < span[1]:
            wanted = "wanted [start, stop] with 0 <= start < stop"
            raise InvalidParameterError(f"{spelling}[{number}]", span, wanted)
    return tuple((start, stop) for start, stop in value)


def read_text(spelling: str, value: Any) -> str:
    """Check a text, and return it."""
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(spelling, value, "wanted a string, not empty")
    return value


def revision_of(request: Request, spec: Spec | None) -> Revision | None:
    """Return the revision that a request asks for, or None.

    Raises:
        InvalidParameterError: naming the field, the given and the expected value.
    """
    given, family = request.given, request.model.family
    names = [name for name in _TEXTS if name in given]
    limits = [name for name, none in _BESIDE_A_TEXT.items() if given.get(name, none) != none]
    if family.is_open and names == ["canvas_token_ids"]:
        names = []
    if names or limits:
        _check_family(request, [*names, *limits])
    if not names:
        if limits:
            wanted = "wanted canvas_text or canvas_token_ids with it"
            raise InvalidParameterError(limits[0], given[limits[0]], wanted)
        return None
    _check_others(request, names, spec)
    token_ids, borders = _tokens(request)
    noise, threshold = given.get("noise"), given.get("edit_threshold")
    if noise is None and threshold is None:
        threshold = DEFAULT_THRESHOLD
    return Revision(
        token_ids,
        _pinned(request, borders),
        noise,
        threshold,
        given.get("max_edits"),
        request.values["edit_rounds"],
        slack=request.values["slack"],
    )


def limits_for(family: Family) -> tuple[str, ...] | None:
    """Return the fields that decide how much of a text changes; None if no text is revised.

    The family's default algorithm decides them.
    """
    if not revises(family):
        return None
    default = algorithms_for(family)[family.default_algorithm]
    if default.text_rule is None:
        return ("pinned", "noise", "edit_threshold", "max_edits", "slack")
    return ("pinned",)


def revises(family: Family) -> bool:
    """Whether a family's tokens can be scored where they are masked, within their blocks."""
    is_shifted = family.is_block_causal and family.logit_shift > 0
    return not (family.has_causal_context or is_shifted)


def families_that_revise() -> str:
    """Return the names of the families that revise texts, in words."""
    return in_words(family.name for family in FAMILIES if revises(family))


def _check_family(request: Request, names: Sequence[str]) -> None:
    """Refuse what family and algorithm cannot do with a text."""
    given, family, algorithm = request.given, request.model.family, request.algorithm
    if not revises(family):
        revise = f"revises no text, but {families_that_revise()} do"
        wanted = f"wanted none: a model of family {family.name} {revise}"
        raise InvalidParameterError(names[0], given[names[0]], wanted)
    for name in names:
        if name == "slack" and algorithm.edits_length:
            wanted = f"wanted 0: {algorithm.name} inserts and deletes tokens itself"
            raise InvalidParameterError(name, given[name], wanted)
        if algorithm.text_rule is not None and name in _OF_SCORES:
            wanted = f"wanted it left out: {algorithm.name} replaces tokens by editing_threshold"
            raise InvalidParameterError(name, given[name], wanted)


def _check_others(request: Request, names: Sequence[str], spec: Spec | None) -> None:
    given = request.given
    if len(names) > 1:
        raise InvalidParameterError(names[0], given[names[0]], f"wanted either it or {names[1]}")
    if spec is not None and request.algorithm.text_rule is not None:
        raise InvalidParameterError(spec.field, spec.value, f"wanted none with {names[0]}")
    if request.values["slack"]:
        _check_slack(request, spec)
    # A trajectory has no form for tokens that move.
    has_moves = request.algorithm.edits_length or request.values["slack"]
    for name in ("allow_infill", *(("return_trajectory",) if has_moves else ())):
        if given.get(name):
            raise InvalidParameterError(name, given[name], f"wanted false with {names[0]}")


def _check_slack(request: Request, spec: Spec | None) -> None:
    """Refuse `slack` where the tokens behind it must keep their positions, or nothing ends it."""
    given, slack = request.given, request.values["slack"]
    if request.model.ids.pad is None:
        raise InvalidParameterError("slack", slack, "wanted 0: the checkpoint has no end token")
    fixed = spec.field if spec is not None else "suffix_ids" if given.get("suffix_ids") else None
    if fixed is not None:
        raise InvalidParameterError("slack", slack, f"wanted 0 with {fixed}")
    for name in ("complete_blocks", "ignore_eos"):
        if given.get(name):
            raise InvalidParameterError(name, given[name], "wanted false with slack")


def _tokens(request: Request) -> tuple[tuple[int, ...], Sequence[Span]]:
    """Return the tokens of the text, and the borders of each token in the units of `pinned`."""
    model, text = request.model, request.given.get("canvas_text")
    if text is None:
        token_ids: tuple[int, ...] = request.given["canvas_token_ids"]
        if max(token_ids) >= model.vocab_size:
            wanted = f"wanted token ids from 0 to {model.vocab_size - 1}"
            raise InvalidParameterError("canvas_token_ids", max(token_ids), wanted)
        if not set(token_ids).isdisjoint(model.ids.edit):
            wanted = f"wanted none of {list(model.ids.edit)}, which delete and insert"
            raise InvalidParameterError("canvas_token_ids", list(token_ids), wanted)
        return token_ids, [(at, at + 1) for at in range(len(token_ids))]
    if model.encode is None or model.spans is None:
        raise InvalidParameterError("canvas_text", text, "wanted a server with a tokenizer")
    token_ids = tuple(model.encode(text))
    if not token_ids:
        raise InvalidParameterError("canvas_text", text, "wanted at least one token")
    if model.ids.mask in token_ids:
        wanted = f"wanted no mask token, which is token {token_ids.index(model.ids.mask)}"
        raise InvalidParameterError("canvas_text", text, wanted)
    return token_ids, model.spans(text) if "pinned" in request.given else ()


def _pinned(request: Request, borders: Sequence[Span]) -> tuple[Span, ...]:
    """Return the pinned positions; a token with a pinned part is pinned as a whole."""
    spans = request.values["pinned"] or ()
    length = borders[-1][1] if borders else 0
    for number, span in enumerate(spans):
        if span[1] > length:
            wanted = f"wanted start < stop <= {length}"
            raise InvalidParameterError(f"pinned[{number}]", list(span), wanted)
    positions = [
        at
        for at, (start, stop) in enumerate(borders)
        if any(start < end and stop > begin for begin, end in spans)
    ]
    merged = list[list[int]]()
    for at in positions:
        if merged and merged[-1][1] == at:
            merged[-1][1] = at + 1
        else:
            merged.append([at, at + 1])
    if request.algorithm.edits_length and not all(0 in s or len(borders) in s for s in merged):
        wanted = "wanted only the beginning and the end of the text, or algorithm: joint_threshold"
        wanted += ", which keeps positions"
        raise InvalidParameterError("pinned", [list(span) for span in spans], wanted)
    return tuple((start, stop) for start, stop in merged)


def repaired(revision: Revision, spec: Spec, guide: Guide, params: DiffusionParams) -> Revision:
    """Return a revision that masks the fewest tokens so that the answer can match its format.

    Raises:
        InvalidParameterError: the tokens that must stay, or too few changes, exclude every answer.
    """
    language, tokens = language_from(guide.language), np.array(revision.token_ids)
    if len(tokens) * language.num_states > MAX_CELLS:
        wanted = f"wanted at most {MAX_CELLS // language.num_states} with this {spec.field}"
        raise InvalidParameterError("canvas_text", f"{len(tokens)} tokens", wanted)
    can_change = ~revision.is_pinned(len(tokens))
    kinds = np.where(tokens == params.mask_id, FREE, language.class_of_token[tokens])
    try:
        broken = fewest_changes(language, kinds, can_change, params.longest_answer - len(tokens))
    except NoStringError as error:
        start, stop = next(span for span in reversed(revision.pinned) if span[0] <= error.position)
        wanted = f"wanted tokens of the text that {spec.field} admits"
        raise InvalidParameterError("pinned", f"tokens {start} to {stop - 1}", wanted) from None
    if revision.max_edits is not None and len(broken) > revision.max_edits:
        wanted = f"wanted at least {len(broken)}, the number of tokens that break {spec.field}"
        raise InvalidParameterError("max_edits", revision.max_edits, wanted)
    return replace(revision, broken=tuple(broken.tolist()))
