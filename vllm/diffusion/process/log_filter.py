# SPDX-License-Identifier: Apache-2.0
"""Filters for lines of upstream's log that have no meaning for a diffusion model.

These lines list routes, or name caches, kernels and compilers that these models do not use. Other
filters shorten lines. With `VLLM_LOGGING_LEVEL=DEBUG` all lines are kept.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, redirect_stderr, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from vllm.diffusion import __version__
from vllm.diffusion.core.errors import DiffusionError
from vllm.diffusion.request.families import ARCHITECTURES
from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

# Upstream's loggers, with the beginnings of the lines that are dropped.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "vllm.config.compilation": ("Enabled custom fusions",),
    # The settings are used unchanged, and any number of positions is supported.
    "transformers.generation.configuration_utils": ("The following generation flags",),
    "vllm.config.model": ("Default vLLM sampling parameters", "User-specified max_model_len ("),
    "vllm.config.kernel": ("Final IR op priority",),
    "vllm.config.scheduler": ("Chunked prefill is enabled",),
    "vllm.config.vllm": ("Inductor compilation was disabled",),
    "vllm.distributed.parallel_state": ("world_size=%d rank=%d", "rank %s in world size"),
    "vllm.entrypoints.launchers.api_server.entry": (
        "Supported tasks: %s",
        "Starting vLLM server on",  # logged before with the page's address
    ),
    # The model is not served. This is the client's mistake, and the access log has its status.
    "vllm.entrypoints.openai.chat_completion.batch_serving": ("Error with model %s",),
    "vllm.entrypoints.openai.chat_completion.serving": ("Error with model %s",),
    "vllm.entrypoints.openai.responses.serving": ("Error with model %s",),
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
    "vllm.renderers.hf": ("Detected the chat template content format",),
    "vllm.v1.attention.backends.utils": ("Using %s KV cache layout",),
    "vllm.v1.engine.core": ("init engine (profile",),
    # The checkpoint's tokenizer is used with every adapter.
    "vllm.v1.engine.input_processor": ("vLLM has deprecated support for supporting different",),
}

# Upstream's loggers that print stack traces at an engine's end, and their messages about an ended
# process.
TRACING = (
    *("vllm.v1.engine.async_llm", "vllm.v1.utils", "vllm.entrypoints.anthropic.serving"),
    *(
        "vllm.entrypoints.openai.chat_completion.serving",
        "vllm.entrypoints.openai.completion.serving",
    ),
)
DIED = (" died unexpectedly", " died with exit code ")


class DropByPrefix(logging.Filter):
    """Drops records whose messages start with one of these texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        texts = str(record.msg), record.getMessage()
        return not any(text.startswith(self._beginnings) for text in texts)


class RenameBanner(logging.Filter):
    """Logs program and model in one line instead of upstream's banner."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.funcName == "log_version_and_model":
            record.msg = f"Mosaic {__version__} on vLLM %s, model %s"
        return True


class ShortenConfig(logging.Filter):
    """Shortens an engine's two thousand characters of settings to the settings with an effect."""

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


class DropStackTraces(logging.Filter):
    """Drops the stack traces that each stream logs when an engine or the server ends.

    They only show where the server waited. The line that names the ended process is kept.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, (EngineDeadError, GracefulHTTPError)) or is_loss(error))


class ShortenRefusals(logging.Filter):
    """Logs a refused call of a client, such as an adapter that cannot be loaded, in one line.

    The error names the field, so a stack trace adds nothing.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DiffusionError) and isinstance(error, ValueError):
            record.msg, record.args = "%s: %s", (record.getMessage(), error)
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = None
        return True


def is_loss(error: BaseException | None) -> bool:
    """Return whether this error of upstream's first process reports that another process ended."""
    return isinstance(error, RuntimeError) and any(died in str(error) for died in DIED)


def _is_ours(config: VllmConfig) -> bool:
    return any(name in ARCHITECTURES for name in config.model_config.architectures)


def rename_start_lines() -> None:
    """Rewrite the first log lines of a server and of its engine.

    They are logged before any of our classes runs. Calling it again changes nothing.
    """
    _add_filter("vllm.entrypoints.launchers.launcher", RenameBanner())
    _add_filter("vllm.v1.engine.core", ShortenConfig())


def drop_irrelevant_lines() -> None:
    """Drop lines without meaning from now on, in a process that runs a diffusion model.

    Calling it again changes nothing.
    """
    for name, beginnings in LEFT_OUT.items():
        _add_filter(name, DropByPrefix(beginnings))
    for name in TRACING:
        _add_filter(name, DropStackTraces())
    _add_filter("vllm.v1.engine.core", ShortenRefusals())


def _add_filter(name: str, wanted: logging.Filter) -> None:
    logger = logging.getLogger(name)
    is_there = any(type(present) is type(wanted) for present in logger.filters)
    if not is_there and not init_logger("vllm").isEnabledFor(logging.DEBUG):
        logger.addFilter(wanted)


class BrokenPipeStream:
    """Stream that drops text if it cannot be written."""

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
def drop_unwritable_output() -> Iterator[None]:
    """Drop progress bars if stderr cannot be written: unlike loggers, they fail on a full disk."""
    with redirect_stderr(cast("IO[str]", BrokenPipeStream(sys.stderr))):
        yield
