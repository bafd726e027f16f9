# SPDX-License-Identifier: Apache-2.0
"""The adapter of rows that only draft tokens, in families with causal context.

Nemotron-Labs-Diffusion has it in the folder `linear_spec_lora` of the checkpoint, UNO in `adapter`.
It has a slot of its own, after the slots of the requests' adapters.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's own

from vllm.diffusion.adapters.matrices import Matrices
from vllm.diffusion.adapters.peft_files import CONFIG, AdapterReader, Sizes, sizes_of
from vllm.diffusion.core.errors import AdapterError, ServerConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from vllm.diffusion.adapters.peft_files import Adapter

logger = init_logger(__name__)

SETTING = "draft_adapter"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DraftAdapter:
    """The adapter in a folder, in PEFT's format.

    Attributes:
        path: the folder, or a name on the Hugging Face Hub.
    """

    path: str

    @property
    def sizes(self) -> Sizes:
        """Its rank and modules.

        Raises:
            ServerConfigError: it has another format, or changes other modules.
        """
        return _sizes_in(self.path)

    def check(self, config: Any) -> None:
        """Check everything about it that does not depend on the numbers in its tensors.

        Raises:
            ServerConfigError: as for `read`.
        """
        with _refusing():
            self._reader(config, torch.float32).check(SETTING, self.path)

    def read(self, config: Any, dtype: torch.dtype) -> Adapter:
        """Return its tensors for the model of a configuration.

        Raises:
            ServerConfigError: a tensor has another shape, or no matrix of the model has its name.
        """
        with _refusing():
            return self._reader(config, dtype).read(SETTING, self.path)

    def _reader(self, config: Any, dtype: torch.dtype) -> AdapterReader:
        return AdapterReader(Matrices(config, self.sizes.modules), self.sizes.rank, dtype)


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise refusals of an adapter as errors of the setting."""
    try:
        yield
    except AdapterError as error:
        raise ServerConfigError(f"{SETTING}: {error}") from None


def draft_adapter_in(checkpoint: str, folder: str, revision: str | None) -> DraftAdapter | None:
    """Return the adapter in a folder of a checkpoint; None if it has none.

    Args:
        checkpoint: a folder, or a name on the Hugging Face Hub.
        folder: name of the folder in it.
        revision: revision on the Hub; None for the latest.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        path = _downloaded(checkpoint, folder, revision)
    path /= folder
    return DraftAdapter(str(path)) if (path / CONFIG).is_file() else None


@cache
def _sizes_in(path: str) -> Sizes:
    """Return `DraftAdapter.sizes`; several parts of a start need them."""
    try:
        sizes = sizes_of(path)
    except AdapterError as error:
        raise ServerConfigError(f"{SETTING}: given {path}: {error}") from None
    if not sizes.modules or not set(sizes.modules) <= set(MODULES):
        raise ServerConfigError(
            f"{SETTING}: given target_modules [{', '.join(sizes.modules)}]; "
            f"wanted some of {', '.join(MODULES)}"
        )
    return sizes


@cache
def _downloaded(checkpoint: str, folder: str, revision: str | None) -> Path:
    """Return where a checkpoint on the Hub is stored locally, after its folder was downloaded."""
    try:
        patterns = f"{folder}/*"
        return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HTTPError) as error:
        logger.warning(
            "%s: the folder %s is not available from the Hugging Face Hub: %s",
            checkpoint,
            folder,
            error,
        )
        return Path(checkpoint)
