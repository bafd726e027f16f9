# SPDX-License-Identifier: Apache-2.0
"""Checks that a checkpoint's files are complete and have the format that their names promise.

An interrupted download, a git LFS pointer or an HTML page instead of a file ends the start with
one line before an engine's process is started. Only the beginnings of weight files are read.
Nothing here imports torch or upstream.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import ServerConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
ADAPTER = "adapter_model.safetensors"
_LFS = b"version https://git-lfs"
_KINDS = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def check_files(folder: Path, *, has_weights: bool = True) -> None:
    """Refuse a folder with a file that does not have the format of its name.

    Raises:
        ServerConfigError: naming the file, its size and the reason.
    """
    for name in (*OBJECTS, INDEX):
        if (folder / name).is_file():
            object_of(folder / name)
    # The file is too long to be read twice.
    if (folder / TOKENIZER).is_file():
        beginning = _beginning(folder / TOKENIZER)
        if not beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise _refusal(folder / TOKENIZER, "wanted an object of JSON")
    if has_weights:
        for file in _weights_of(folder):
            _check_weights(file)


def check_mask_token(folder: Path, config: Mapping[str, Any], name: str | None) -> None:
    """Refuse a checkpoint with a tokenizer if none of its files names the mask token.

    Args:
        name: the mask token of the family's releases, which the tokenizer may contain.

    Raises:
        ServerConfigError: naming config.json and its key.
    """
    files = [folder / file for file in (*OBJECTS[2:], TOKENIZER) if (folder / file).is_file()]
    if config.get("mask_token_id") is not None or not files:
        return
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    is_named = re.compile(r'"mask_token"\s*:(?!\s*null\b)').search
    if any(is_named(text) or (name is not None and name in text) for text in texts):
        return
    raise ServerConfigError(
        f"{folder / 'config.json'}: mask_token_id: given nothing; wanted the id of the mask token, "
        "there or as the tokenizer's mask_token"
    )


def _weights_of(folder: Path) -> Iterable[Path]:
    """Return the existing files of weights that upstream would read."""
    index = folder / INDEX
    if index.is_file():
        names = object_of(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
            raise ServerConfigError(f"{index}: weight_map: wanted an object of names of files")
        return [folder / name for name in sorted({*names.values()}) if (folder / name).is_file()]
    files = sorted(folder.glob("*.safetensors"))
    if (folder / ADAPTER) in files:
        raise ServerConfigError(
            f"{folder / ADAPTER}: weights of an adapter in the folder of the model's weights; "
            "wanted a separate folder for them"
        )
    return files or sorted(folder.glob("*.bin"))


def object_of(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file contains.

    Raises:
        ServerConfigError: naming the file, and what it contains.
    """
    _beginning(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ServerConfigError(f"{file}: given no JSON ({error}); wanted an object") from None
    if not isinstance(value, dict):
        given = _KINDS.get(type(value), "a number")
        raise ServerConfigError(f"{file}: given {given}; wanted an object")
    return value


def _beginning(file: Path) -> bytes:
    """Return the first bytes of a file, and refuse an empty file or a placeholder."""
    with open(file, "rb") as opened:
        beginning = opened.read(1024)
    if not beginning:
        raise _refusal(file, "it is empty")
    if beginning.startswith(_LFS):
        raise _refusal(file, "a pointer of git LFS; wanted the file itself: git lfs pull")
    if beginning.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise _refusal(file, "a page of HTML or XML; wanted the file itself")
    return beginning


def _check_weights(file: Path) -> None:
    beginning = _beginning(file)
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    elif beginning.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise _refusal(file, "its end is missing")


def _check_safetensors(file: Path) -> None:
    """Compare the size of a file with its header."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))[0]
        if not 2 <= length <= size - 8:
            is_cut = 2 <= length < 1 << 27  # the maximum header length of the format
            wanted = f"header says {8 + length} at least" if is_cut else "no header of safetensors"
            raise _refusal(file, wanted)
        header = opened.read(length)
    try:
        tensors = {name: x for name, x in json.loads(header).items() if name != "__metadata__"}
        end = max((int(x["data_offsets"][1]) for x in tensors.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise _refusal(file, "no header of safetensors") from None
    if 8 + length + end != size:
        raise _refusal(file, f"header says {8 + length + end}")


def _refusal(file: Path, what: str) -> ServerConfigError:
    return ServerConfigError(f"{file}: {file.stat().st_size} bytes, {what}")
