# SPDX-License-Identifier: Apache-2.0
"""The log of a start without the lines of upstream's that tell nothing of a diffusion model.

They list routes, or speak of caches, kernels and compilers that these models do not use. With
`VLLM_LOGGING_LEVEL=DEBUG` all of them stay.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, redirect_stderr, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from vllm.diffusion import __version__
from vllm.diffusion.families import ARCHITECTURES
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

# Loggers of upstream's, and how the lines begin that are left out.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "vllm.config.compilation": ("Enabled custom fusions",),
    # Whose settings are used as they are; and positions may be of any number.
    "transformers.generation.configuration_utils": ("The following generation flags",),
    "vllm.config.model": ("Default vLLM sampling parameters", "User-specified max_model_len ("),
    "vllm.config.kernel": ("Final IR op priority",),
    "vllm.config.vllm": ("Inductor compilation was disabled",),
    "vllm.distributed.parallel_state": ("world_size=%d rank=%d", "rank %s in world size"),
    "vllm.entrypoints.launchers.api_server.entry": ("Supported tasks: %s",),
    "vllm.entrypoints.launchers.launcher": ("Available routes are:", "Route: %s"),
    "vllm.entrypoints.scale_out.factories": ("Scale-out endpoints are disabled",),
    "vllm.model_executor.model_loader.base_loader": ("Initializing model took",),
    "vllm.model_executor.model_loader.default_loader": ("Loading weights took",),
    "vllm.model_executor.model_loader.weight_utils": (
        "Filesystem type for checkpoints",
        "Auto-prefetch is disabled",
    ),
    "vllm.plugins": ("Available plugins for group", "- %s -> %s", "Loading plugin", "Loaded end"),
    "vllm.plugins.endpoint_plugins.interface": ("Endpoint plugin overrides",),
    "vllm.v1.attention.backends.utils": ("Using %s KV cache layout",),
    "vllm.v1.engine.core": ("init engine (profile",),
}


class _Without(logging.Filter):
    """Drops records whose messages begin so."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        texts = str(record.msg), record.getMessage()
        return not any(text.startswith(self._beginnings) for text in texts)


class _Named(logging.Filter):
    """Says in one line what is started, in place of upstream's picture."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.funcName == "log_version_and_model":
            record.msg = f"Mosaic {__version__} on vLLM %s, model %s"
        return True


class _Shortened(logging.Filter):
    """Cuts the list of an engine's settings, two thousand characters, to those that act here."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Initializing a V1 LLM engine"):
            return True
        version, config = cast("tuple[str, VllmConfig]", record.args)
        if config.model_config is None or not _is_ours(config):
            return True
        model, parallel = config.model_config, config.parallel_config
        record.msg = (
            "engine of vLLM %s: model %s, %s, %d positions, "
            "%d tensor-parallel and %d sequence-parallel ranks"
        )
        record.args = (
            version,
            model.model,
            str(model.dtype).removeprefix("torch."),
            model.max_model_len,
            parallel.tensor_parallel_size,
            parallel.world_size // parallel.tensor_parallel_size,
        )
        return True


def _is_ours(config: VllmConfig) -> bool:
    return any(name in ARCHITECTURES for name in config.model_config.architectures)


def tell_what_is_ours() -> None:
    """Rewrite the first lines of a server and of its engine, which come before any class of ours.

    Again changes nothing.
    """
    _add_filter("vllm.entrypoints.launchers.launcher", _Named())
    _add_filter("vllm.v1.engine.core", _Shortened())


def leave_out_what_does_not_apply() -> None:
    """From now on, in this process, which runs a diffusion model. Again changes nothing."""
    for name, beginnings in LEFT_OUT.items():
        _add_filter(name, _Without(beginnings))


def _add_filter(name: str, wanted: logging.Filter) -> None:
    logger = logging.getLogger(name)
    is_there = any(type(own) is type(wanted) for own in logger.filters)
    if not is_there and not init_logger("vllm").isEnabledFor(logging.DEBUG):
        logger.addFilter(wanted)


class _Lossy:
    """A stream that loses what cannot be written to it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def losing_what_cannot_be_written() -> Iterator[None]:
    """While progress bars are drawn on stderr: unlike loggers, they fail where its disk is full."""
    with redirect_stderr(cast("IO[str]", _Lossy(sys.stderr))):
        yield
