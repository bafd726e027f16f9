# SPDX-License-Identifier: Apache-2.0
"""Reads adapters in PEFT's format; refuses adapters that the model or the server cannot use."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vllm.diffusion.core.errors import AdapterError
from vllm.logger import init_logger
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from vllm.diffusion.adapters.matrices import Matrices

logger = init_logger(__name__)

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_PREFIX = "base_model.model."
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(\.[^.]+)?\.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST = torch.finfo(torch.float32).max
_MERGED = "or the adapter merged into the checkpoint"
# Fields of adapter_config.json that change the forward pass: the only value that is served.
_ONLY: dict[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
}
# Initialisations that leave the checkpoint's matrices as they are.
_INITIAL = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class LowRank(NamedTuple):
    """The change of one matrix W [out, in]: W + scale * up @ down.

    Attributes:
        down: A [r, in].
        up: B [out, r].
        scale: alpha / r, or alpha / sqrt(r).
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """The tensors of an adapter, checked and in the dtype of the model, on the host.

    Attributes:
        low_ranks: the changed matrices, by their names in the checkpoint.
    """

    low_ranks: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(len(low_rank.down) for low_rank in self.low_ranks.values())

    @property
    def num_bytes(self) -> int:
        return sum(one.down.nbytes + one.up.nbytes for one in self.low_ranks.values())


class Sizes(NamedTuple):
    """What the memory of an adapter depends on.

    Attributes:
        rank: the highest rank of its matrices.
        modules: last parts of the names of the modules that it changes, sorted.
    """

    rank: int
    modules: tuple[str, ...]


def sizes_of(path: str) -> Sizes:
    """Return the sizes of the adapter in a folder.

    Raises:
        AdapterError: the folder has no adapter in PEFT's format.
    """
    with _opened(path) as (given, tensors):
        config = _config_of(given)
        modules = {_module_and_part(name)[0] for name in tensors.names}
        ranks = [config.get_rank_and_scaling(module)[0] for module in modules]
        names = sorted({module.rpartition(".")[2] for module in modules})
        return Sizes(max(ranks, default=config.r), tuple(names))


@dataclass(frozen=True)
class AdapterReader:
    """Reads the adapters that a server accepts.

    Attributes:
        matrices: the matrices that adapters may change.
        max_rank: the highest rank.
        dtype: dtype of the model.
        is_pinned: whether tensors are read into pinned memory, so that the host does not wait
            while a GPU copies them.
    """

    matrices: Matrices
    max_rank: int
    dtype: torch.dtype
    is_pinned: bool = False

    def check(self, name: str, path: str) -> None:
        """Check everything about a folder that does not depend on the numbers in its tensors.

        Raises:
            AdapterError: naming the adapter, and the field or the tensor.
        """
        with _naming(name), _opened(path) as (config, tensors):
            self._places(config, tensors)

    def read(self, name: str, path: str) -> Adapter:
        """Read the adapter in a folder.

        Raises:
            AdapterError: as for `check`, or a tensor has numbers that are not finite.
        """
        with _naming(name), _opened(path) as (config, tensors):
            return self._adapter(config, tensors)

    def take(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """Copy the adapter that a trainer holds in memory.

        Args:
            name: name of the adapter.
            config: content of adapter_config.json.
            tensors: tensors by their names in PEFT's files, on any device.

        Raises:
            AdapterError: as for `read`.
        """
        with _naming(name):
            return self._adapter(config, _Tensors("tensors", dict(tensors)))

    def _adapter(self, given: Mapping[str, Any], tensors: _Tensors) -> Adapter:
        config, places = self._places(given, tensors)
        low_ranks = dict[str, LowRank]()
        for module, parts in places.items():
            down, up = (self._converted(module, part, tensors[parts[part]]) for part in "AB")
            low_ranks[module] = LowRank(down, up, config.get_rank_and_scaling(module)[1])
        return Adapter(low_ranks)

    def _converted(self, module: str, part: str, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the dtype of the model, on the host."""
        copy = torch.empty(tensor.shape, dtype=self.dtype, pin_memory=self.is_pinned)
        copy.copy_(tensor.detach())
        if not copy.isfinite().all():
            raise AdapterError(f"{module}: lora_{part}: wanted finite floating-point numbers")
        return copy

    def _places(
        self, given: Mapping[str, Any], tensors: _Tensors
    ) -> tuple[PEFTHelper, dict[str, dict[str, str]]]:
        """Check an adapter; return its configuration, and tensor names by module and part."""
        config = _config_of(given)
        ranks = [("r", config.r)]
        ranks += [(f"rank_pattern: {key}", rank) for key, rank in config.rank_pattern.items()]
        for field, rank in ranks:
            if rank > self.max_rank:
                raise AdapterError(
                    f"{field}: given {rank}; wanted at most max_lora_rank {self.max_rank}"
                )
        places = dict[str, dict[str, str]]()
        for name in tensors.names:
            module, part = _module_and_part(name)
            self.matrices.find(module)
            if tensors.dtype(name) not in _FLOATS:
                raise AdapterError(f"{module}: lora_{part}: wanted finite floating-point numbers")
            places.setdefault(module, {})[part] = name
        if not places:
            raise AdapterError(f"{tensors.source}: given no tensor; wanted at least one lora_A")
        for module, parts in places.items():
            shapes = tuple(tensors.shape(parts[part]) if part in parts else None for part in "AB")
            self._check_shapes(module, shapes, config.get_rank_and_scaling(module)[0])
        return config, places

    def _check_shapes(self, module: str, shapes: tuple[list[int] | None, ...], rank: int) -> None:
        _, num_rows, num_columns, _ = self.matrices.find(module)
        if shapes == ([rank, num_columns], [num_rows, rank]):
            return
        # The shapes may fit each other, but not the configuration.
        ranks = [shape[0] for shape in shapes[:1] if shape]
        fits = any(shapes == ([r, num_columns], [num_rows, r]) for r in ranks)
        letter = str(rank) if fits else "r"
        given = ", ".join("nothing" if shape is None else str(shape) for shape in shapes)
        raise AdapterError(
            f"{module}: lora_A, lora_B: given {given}; "
            f"wanted [{letter}, {num_columns}], [{num_rows}, {letter}]"
        )


@contextmanager
def _naming(adapter: str) -> Iterator[None]:
    """Put the adapter's name before the message of a refusal."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"adapter {adapter}: {error}") from None


class _Tensors:
    """Tensors in memory or in a file, with their names.

    Args:
        source: where they are, for messages.
        tensors: the tensors, or an open safetensors file.
    """

    def __init__(self, source: str, tensors: Any) -> None:
        self.source, self._tensors = source, tensors
        self.names = list(tensors.keys())
        self._is_file = not isinstance(tensors, dict)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name) if self._is_file else self._tensors[name]
        return tensor

    def shape(self, name: str) -> list[int]:
        if self._is_file:
            return list(self._tensors.get_slice(name).get_shape())
        return list(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None for one that adapters never have."""
        if not self._is_file:
            dtype: torch.dtype | None = getattr(self._tensors[name], "dtype", None)
            return dtype
        return _DTYPES.get(self._tensors.get_slice(name).get_dtype())


_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


def folder_of(path: str) -> Path:
    """Return the folder of an adapter; a name on the Hugging Face Hub is downloaded first."""
    folder = _expanded(path)
    if not _HUB_NAME.fullmatch(path) or folder.is_dir():
        return folder
    try:
        return Path(get_adapter_absolute_path(path))
    except Exception as error:  # the Hub cannot be reached, or has no such name
        logger.warning("adapter %s: not found on the Hugging Face Hub: %s", path, error)
        return folder


def is_below(path: str, root: str) -> bool:
    """Whether a path is inside a folder, after symbolic links are followed."""
    try:
        return _expanded(path).resolve().is_relative_to(Path(root).resolve())
    except (OSError, RuntimeError, ValueError):  # a name that no file can have, or a loop of links
        return False


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no user has the name after "~"
        return Path(path)


@contextmanager
def _opened(path: str) -> Iterator[tuple[dict[str, Any], _Tensors]]:
    """Open the two files of an adapter's folder."""
    folder = folder_of(path)
    refusal = AdapterError(
        f"lora_path: given {path!r}; wanted a folder with {CONFIG} and {SAFETENSORS}"
    )
    try:
        places = [folder / name for name in (SAFETENSORS, *_PICKLED)]
        file = next((place for place in places if place.is_file()), None)
        has_config = (folder / CONFIG).is_file()
    except OSError:  # a name that is too long, or a folder that the server may not read
        raise refusal from None
    if file is None or not has_config:
        raise refusal
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIG}: wanted a JSON object: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG}: given {type(config).__name__}; wanted a JSON object")
    if file.name == SAFETENSORS:
        try:
            opened = safe_open(str(file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{file.name}: wanted a safetensors file: {error}") from None
        with opened as tensors:
            yield config, _Tensors(file.name, tensors)
        return
    yield config, _Tensors(file.name, _unpickled(file))


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises errors of any kind
        kind = type(error).__name__  # torch's text recommends an unsafe way to read the file
        raise AdapterError(f"{file.name}: wanted a file of tensors; reading: {kind}") from None
    content: dict[str, Any] = tensors if isinstance(tensors, dict) else {"": None}
    if not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise AdapterError(f"{file.name}: wanted a dictionary of tensors")
    return content


def _config_of(given: Mapping[str, Any]) -> PEFTHelper:
    """Check the fields of adapter_config.json and return upstream's form of them."""
    for field, only in _ONLY.items():
        value = given.get(field, only)
        if field == "peft_type":
            value = getattr(value, "value", value)  # a member of PEFT's enumeration
        if value != only and (value or only):
            wanted = "none" if only is None else _shown(only)
            wanted += "" if field == "peft_type" else f", {_MERGED}"
            raise AdapterError(f"{field}: given {_shown(value)}; wanted {wanted}")
    initial = given.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower() not in _INITIAL:
        raise AdapterError(f"init_lora_weights: given {initial!r}; wanted true, {_MERGED}")
    fields = dict(given)
    fields["target_modules"] = []  # the tensors show which modules there are
    _check_number("r", given.get("r"), is_rank=True)
    _check_number("lora_alpha", given.get("lora_alpha"), is_rank=False)
    if not isinstance(given.get("use_rslora", False), bool):
        raise AdapterError(f"use_rslora: given {given['use_rslora']!r}; wanted true or false")
    for field in ("rank_pattern", "alpha_pattern"):
        _check_pattern(field, given.get(field), is_rank=field == "rank_pattern")
    try:
        return PEFTHelper.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise AdapterError(f"{CONFIG}: {error}") from None


def _check_pattern(field: str, pattern: Any, *, is_rank: bool) -> None:
    """Check numbers by regular expressions of module names."""
    if not isinstance(pattern, dict | None):
        raise AdapterError(f"{field}: given {pattern!r}; wanted an object of numbers by modules")
    for key, number in (pattern or {}).items():
        try:
            re.compile(key)
        except re.error as error:
            wanted = f"wanted a regular expression: {error}"
            raise AdapterError(f"{field}: given {key!r}; {wanted}") from None
        _check_number(f"{field}: {key}", number, is_rank=is_rank)


def _check_number(field: str, number: Any, *, is_rank: bool) -> None:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    # The comparison excludes NaN, and whole numbers that are no floats.
    is_finite = is_number and -_LARGEST <= number <= _LARGEST
    if not is_finite or (is_rank and (number != int(number) or number < 1)):
        wanted = "a whole number from 1 on" if is_rank else "a finite number"
        shown = "nothing" if number is None else _shown(number)
        raise AdapterError(f"{field}: given {shown}; wanted {wanted}")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _module_and_part(name: str) -> tuple[str, str]:
    """Return the checkpoint's module and the part, "A" or "B", of a tensor's name."""
    bare = name.removeprefix(_PREFIX)
    match = _TENSOR.fullmatch(bare)
    if match is not None:
        return match["module"], match["part"]
    if "lora_embedding_" in bare:
        raise AdapterError(f"lora_embedding_A: given {bare!r}; wanted none, {_MERGED}")
    if "lora_magnitude_vector" in bare:
        raise AdapterError(f"lora_magnitude_vector: given {bare!r}; wanted none, {_MERGED}")
    raise AdapterError(f"{bare}: wanted MODULE.lora_A.weight or MODULE.lora_B.weight")
