# SPDX-License-Identifier: Apache-2.0
"""The table of request fields, checks of given values, and server-wide defaults.

`FIELDS` is derived from `RequestFields`, `AlgorithmParams` and the records of the algorithms.
`vllm.diffusion.request.decision` checks combinations of values.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError, ServerConfigError
from vllm.diffusion.request.algorithms import (
    ALL_ALGORITHMS,
    GUIDED_CACHES,
    REMASKING,
    AlgorithmParams,
    algorithms_for,
)
from vllm.diffusion.request.request_fields import NO_FILTERS, RequestFields
from vllm.diffusion.request.values import Field, in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.families import Family
    from vllm.diffusion.request.served_model import ServedModel

_KINDS = {kind.__name__: kind for kind in (bool, int, float, str, tuple, list, dict)}


def _fields_of(params: type) -> Iterator[Field]:
    """Yield the request fields that a class of parameters declares itself, in its order."""
    # Unlike `dataclasses.fields`, this includes class variables.
    attributes = params.__dataclass_fields__  # type: ignore[attr-defined]
    for name, annotation in inspect.get_annotations(params).items():
        if "param" in attributes[name].metadata:
            kind = next(_KINDS[word] for word in re.findall(r"\w+", annotation) if word in _KINDS)
            yield _of_algorithms(Field(name, kind, **attributes[name].metadata["param"]))


def _of_algorithms(field: Field) -> Field:
    """Add to a field which algorithms use it, and their defaults."""
    name, uses = field.name, field.uses

    def is_listed(algorithm: Algorithm) -> bool:
        return name in algorithm.parameters

    if any(map(is_listed, ALL_ALGORITHMS)):
        uses = is_listed
    users = [a for a in ALL_ALGORITHMS if uses is not None and uses(a)]
    return dataclasses.replace(
        field,
        uses=uses,
        defaults={a.name: a.defaults[name] for a in ALL_ALGORITHMS if name in a.defaults},
        shifted_defaults={
            a.name: a.shifted_defaults[name] for a in ALL_ALGORITHMS if name in a.shifted_defaults
        },
        algorithms=tuple(a.name for a in users if not a.is_block_causal),
        block_algorithms=tuple(a.name for a in users if a.is_block_causal),
    )


PARAMETERS = tuple(_fields_of(AlgorithmParams))  # fields of single algorithms
FIELDS = (*_fields_of(RequestFields), *PARAMETERS)
BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def by_spelling(table: Iterable[Field]) -> dict[str, Field]:
    """Return the parameters of a table by each of their names."""
    return {spelling: field for field in table for spelling in (field.name, *field.aliases)}


SPELLINGS = by_spelling(FIELDS)

# Fields that other servers have, too. A name similar to one of them may be a foreign field, so it
# is not reported as misspelt.
_STANDARD = {"max_tokens", "priority", *(f.name for f in FIELDS if f.in_sampling)}
OWN_SPELLINGS = tuple(name for name, field in SPELLINGS.items() if field.name not in _STANDARD)
_MAX_NAME_LENGTH = 64  # characters of a name that is compared with known names
_ALIKE = 0.8  # minimum similarity of two names, as the share of matching letters


def canonical(given: Mapping[str, Any], also_known: Iterable[str] = ()) -> dict[str, Any]:
    """Check values by the table of all requests, after expanding shorthands; see `checked`."""
    return checked(_expand_shorthands(given), SPELLINGS, also_known)


def checked(
    given: Mapping[str, Any], spellings: Mapping[str, Field], also_known: Iterable[str] = ()
) -> dict[str, Any]:
    """Rename accepted spellings to canonical names and check each value by itself.

    None counts as not given. `also_known` are further names for the suggestions about an unknown
    name.

    Raises:
        InvalidParameterError: a name is unknown, a type or range is wrong, or two spellings of one
            parameter disagree.
    """
    result: dict[str, Any] = {}
    for spelling, value in given.items():
        if value is None:
            continue
        field = spellings.get(spelling)
        if field is None:
            raise unknown(spelling, value, {*spellings, *also_known})
        checked_value = field.checked(spelling, value)
        if result.setdefault(field.name, checked_value) != checked_value:
            raise InvalidParameterError(
                spelling,
                value,
                f"it contradicts another spelling of {field.name}: {result[field.name]!r}",
            )
    return result


def unknown(name: str, value: Any, known: Iterable[str]) -> InvalidParameterError:
    """Return the refusal of an unknown parameter."""
    names = sorted(known)
    meant = near_miss(name, names)
    if meant is not None:
        return InvalidParameterError(name, value, f"unknown parameter; did you mean {meant}?")
    nearest = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], names, n=3, cutoff=0.0)
    hint = f"the nearest are {', '.join(nearest)}; /docs lists all"
    return InvalidParameterError(name, value, f"unknown parameter; {hint}")


def near_miss(name: str, known: Iterable[str] = OWN_SPELLINGS) -> str | None:
    """Return the known name that is almost `name`, ignoring case, dashes and underscores."""
    names = {_letters(other): other for other in sorted(known)}
    matches = difflib.get_close_matches(_letters(name), names, n=1, cutoff=_ALIKE)
    return names[matches[0]] if matches else None


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _expand_shorthands(given: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise algorithm names, and expand parameters that are shorthands for an algorithm.

    A kind of remasking may refer to several algorithms; the decision chooses one.
    """
    expanded = dict(given)
    leaps = expanded.pop("use_local_leap", None)
    if leaps is not None:
        leaps = BY_NAME["use_local_leap"].checked("use_local_leap", leaps)
    algorithm = expanded.get("algorithm")
    if isinstance(algorithm, str):
        algorithm = _snake_case(algorithm)
        algorithm = "adablock" if algorithm == "ada_block" else algorithm
        if algorithm in REMASKING:
            if expanded.get("remasking") not in (None, algorithm):
                raise InvalidParameterError(
                    "remasking", expanded["remasking"], f"it contradicts algorithm: {algorithm!r}"
                )
            expanded["remasking"] = algorithm
            algorithm = "local_leap" if leaps else algorithm
        expanded["algorithm"] = algorithm
    if leaps and expanded.get("algorithm") is None:
        expanded["algorithm"] = "local_leap"
    if leaps is not None and (expanded.get("algorithm") == "local_leap") != leaps:
        raise InvalidParameterError(
            "use_local_leap", leaps, f"it contradicts algorithm: {expanded.get('algorithm')!r}"
        )
    return expanded


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def named_algorithm(request: Mapping[str, Any], *, is_block_causal: bool) -> str | None:
    """Return the algorithm that canonical values name, or None if they name none."""
    name: str | None = request.get("algorithm")
    if request.get("canvas") == "daedal" and name in (None, "threshold") and not is_block_causal:
        return "daedal"
    if name not in REMASKING:
        return name
    if is_block_causal:
        return "low_confidence_dynamic"
    return "semi_ar" if request.get("threshold") is None else "threshold"


def value_of(
    field: Field, given: Mapping[str, Any], algorithm: Algorithm, model: ServedModel
) -> Any:
    """Return the request's value, else the server's if it applies, else our default.

    A server-wide value of a parameter whose scale depends on the algorithm (a threshold) applies
    only to the server-wide algorithm, if there is one.
    """
    name, family = field.name, model.family
    if name in given:
        return given[name]
    has_default = name in model.defaults or name in family.defaults
    if has_default and field.acts(algorithm, model):
        meant_for = model.defaults.get("algorithm", algorithm.name)
        if name in model.defaults and (not field.defaults or meant_for == algorithm.name):
            return model.defaults[name]
        is_for_all = not field.defaults and name not in NO_FILTERS
        if name in family.defaults and (is_for_all or algorithm.name == family.default_algorithm):
            return family.defaults[name]
    return field.default_for(algorithm.name, is_shifted=model.is_shifted)


def server_defaults(
    given: Mapping[str, Any], family: Family | None, also_known: Iterable[str] = ()
) -> dict[str, Any]:
    """Check the server-wide defaults.

    Args:
        given: values under any accepted spelling.
        family: family of the served model; None if it is not known yet, so that only names and
            single values are checked.
        also_known: names of other settings, for the suggestions about an unknown name.

    Raises:
        ServerConfigError: a setting is unknown or unusable.
    """
    try:
        defaults = canonical(given, also_known=also_known)
    except InvalidParameterError as error:
        raise ServerConfigError(f"dllm settings: {error}") from None
    for name in defaults:
        if not BY_NAME[name].server_wide:
            allowed = ", ".join(f.name for f in FIELDS if f.server_wide)
            raise ServerConfigError(
                f"dllm settings: {name} can only be set by requests; allowed: {allowed}"
            )
    if family is None:
        return defaults
    named = named_algorithm(defaults, is_block_causal=family.is_block_causal)
    if named is not None:
        defaults["algorithm"] = named
    _check_together(defaults, algorithms_for(family))
    attention = defaults.get("attention_dtype", "model")
    if family.is_block_causal and attention != "model":
        raise ServerConfigError(
            f"dllm settings: attention_dtype: given {attention}; wanted model: family "
            f"{family.name} is block-causal"
        )
    return defaults


def _check_together(defaults: Mapping[str, Any], algorithms: Mapping[str, Algorithm]) -> None:
    """Refuse server-wide defaults that contradict each other."""
    name, cache = defaults.get("algorithm"), defaults.get("cache")
    if name is not None and name not in algorithms:
        raise ServerConfigError(
            f"dllm settings: algorithm: given {name!r}; wanted {in_words(algorithms)}"
        )
    records = list(algorithms.values()) if name is None else [algorithms[name]]
    allowed = tuple(dict.fromkeys(kind for record in records for kind in record.caches))
    if cache is not None and cache not in allowed:
        whose = "this model" if name is None else f"algorithm {name}"
        raise ServerConfigError(
            f"dllm settings: cache: given {cache!r}; {whose} supports {in_words(allowed)}"
        )
    guided = defaults.get("cfg_scale", 0) > 0
    if cache is not None and cache not in GUIDED_CACHES and guided:
        raise ServerConfigError(f"dllm settings: cache {cache} works with cfg_scale 0 only")
