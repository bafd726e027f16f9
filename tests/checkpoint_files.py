# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the files of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a checkpoint."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite each file of a checkpoint after changing its tensors in place."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


def change_json(folder: Path, file: str = "config.json", **values: Any) -> None:
    """Set keys of a JSON file of a checkpoint; None removes a key."""
    content = {**json.loads((folder / file).read_text()), **values}
    for key in [key for key, value in values.items() if value is None]:
        del content[key]
    (folder / file).write_text(json.dumps(content))
