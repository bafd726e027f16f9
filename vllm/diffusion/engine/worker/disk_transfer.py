# SPDX-License-Identifier: Apache-2.0
"""Weight updates from files: upstream's transfer engine `disk`, for trainers with a shared folder.

It needs no GPU. It reads safetensors files below the folder that the server configures
(`additional_config`'s `dllm`, `weight_update_root`), and no other files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from vllm.diffusion.config import settings_of
from vllm.diffusion.core.errors import CheckpointError
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """No settings: this engine has no connection to set up."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """Readable safetensors files.

    A message names one file or a folder of files below the server's folder for updates.
    """

    files: list[Path]


class DiskTransfer(WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):
    """Reads the tensors of a trainer from files."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo
    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, object]) -> DiskInitInfo:
        if init_dict:
            raise CheckpointError(
                f"init_info: given {', '.join(init_dict)}; wanted no fields: backend disk"
            )
        return DiskInitInfo()

    def parse_update_info(self, update_dict: dict[str, object]) -> DiskUpdateInfo:
        if set(update_dict) != {"path"}:
            names = ", ".join(update_dict) or "no fields"
            raise CheckpointError(f"update_info: given {names}; wanted path alone: backend disk")
        path = update_dict["path"]
        if not isinstance(path, str):
            raise CheckpointError(f"path: given {path!r}; wanted a string")
        try:
            allowed = allowed_path(path, settings_of(self.vllm_config).weight_update_root)
            return DiskUpdateInfo(readable_files(allowed, given=path))
        except CheckpointError:
            raise
        except (OSError, RuntimeError, ValueError):  # a name that no file can have
            wanted = "wanted a file of safetensors, or a folder"
            raise CheckpointError(f"path: given {path[:80]!r}; {wanted}") from None

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the files that a message of the trainer names.

        Upstream's method would wait for an accelerator.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        self.model.load_weights(tensors_in(update_info.files))


def allowed_path(path: str, root: str | None) -> Path:
    """Return the real path of a file or folder of an update.

    Raises:
        CheckpointError: the path is not below `root`, or there is no `root`.
    """
    if root is None:
        raise CheckpointError(
            f"path: given {path!r}; wanted a server with a folder for updates "
            "(additional_config.dllm.weight_update_root)"
        )
    folder = Path(root).resolve()
    resolved = (folder / path).resolve()
    if not resolved.is_relative_to(folder):
        raise CheckpointError(f"path: given {path!r}; wanted one below weight_update_root {folder}")
    return resolved


def readable_files(path: Path, given: str | None = None) -> list[Path]:
    """Return a safetensors file, or all such files of a folder, after reading their headers.

    Args:
        path: file or folder.
        given: path to quote in errors; by default `path`.

    Raises:
        CheckpointError: there are no files, or a file has another format or is truncated.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    message = f"path: given {given or str(path)!r}; wanted a file of safetensors, or a folder"
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(message)
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{message}; {file.name}: {error}") from error
    return files


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files.

    Raises:
        CheckpointError: a file has another format or is truncated.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file.name}: {error}") from error
