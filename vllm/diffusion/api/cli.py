# SPDX-License-Identifier: Apache-2.0
"""Server-wide diffusion defaults on the command line.

They end in `--additional-config '{"dllm": {...}}'`, which `vllm serve` and `LLM` take as well.
"""

from __future__ import annotations

import errno
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import ValidationError

from vllm.diffusion import __version__
from vllm.diffusion.algorithms import ALGORITHMS, BLOCK_ALGORITHMS
from vllm.diffusion.config import check_settings, server_settings
from vllm.diffusion.errors import ServerConfigError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


NO_MODEL = (
    "wanted a checkpoint: a folder, or a name on the Hugging Face Hub; for a try without a "
    "download: scripts/make_tiny_model.py makes models/llada-tiny"
)


def want_a_model() -> None:
    """Let `vllm serve` without a model say what it wants, in place of serving upstream's default.

    It says so before upstream looks for its own default on the Hub.
    """
    from vllm.config import ModelConfig
    from vllm.entrypoints.cli.serve import ServeSubcommand

    validate = ServeSubcommand.validate

    def validate_model_first(command: ServeSubcommand, args: Namespace) -> None:
        if args.model_tag is None and args.model == ModelConfig.model:
            raise SystemExit(f"error: {NO_MODEL}; vllm serve models/llada-tiny serves it")
        validate(command, args)

    ServeSubcommand.validate = validate_model_first


def add_arguments(parser: ArgumentParser) -> None:
    """Add `--dllm-algorithm[-config]`, `--sequence-parallel-size` and `--no-page`."""
    group = parser.add_argument_group(
        "Diffusion", "Defaults of requests that do not say; ranks that divide rows; the page."
    )
    group.add_argument(
        "--dllm-algorithm",
        metavar="NAME",
        help=f"decoding algorithm: {', '.join(ALGORITHMS)}; of block-causal models: "
        f"{', '.join(BLOCK_ALGORITHMS)}",
    )
    group.add_argument(
        "--dllm-algorithm-config",
        metavar="FILE.yaml",
        help="parameters of requests, one `name: value` a line",
    )
    group.add_argument(
        "--sequence-parallel-size",
        metavar="RANKS",
        type=int,
        help="GPUs that divide the rows of long steps, each with all weights that one would have",
    )
    group.add_argument(
        "--version",
        action="version",
        version=f"mosaic {__version__} on vllm {metadata.version('vllm')}",
        help="say which versions these are",
    )
    group.add_argument(
        "--no-page", action="store_true", help="serve no web page at / and /status, only the API"
    )


def fold_into_additional_config(args: Namespace) -> None:
    """Move these arguments into `args.additional_config`.

    Raises:
        ServerConfigError: for a file that cannot be read, or an unknown or unusable setting.
    """
    settings: dict[str, Any] = {}
    if args.dllm_algorithm_config is not None:
        settings.update(_read(Path(args.dllm_algorithm_config)))
    if args.dllm_algorithm is not None:
        settings["algorithm"] = args.dllm_algorithm
    if args.sequence_parallel_size is not None:
        settings["sequence_parallel_size"] = args.sequence_parallel_size
    if args.no_page:
        settings["page"] = False
    additional = dict(args.additional_config or {})
    additional["dllm"] = server_settings(additional) | settings
    check_settings(additional["dllm"], family=None)
    args.additional_config = additional


def one_line(error: Exception, args: Namespace) -> str:
    """What stopped the start, in one line."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {args.port} of {args.host} is in use; --port takes another"
    if isinstance(error, ValidationError):  # upstream's settings: the first fault tells most
        fault = error.errors()[0]
        return " ".join(str(fault["msg"]).removeprefix("Value error, ").split())
    text = " ".join(str(error).split()) or type(error).__name__
    is_of_the_hub = isinstance(error, (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError))
    # transformers wraps some of them in an OSError
    if is_of_the_hub or "huggingface.co" in text or text.startswith("Repo id"):
        return f"model {args.model}: no such folder, and not found on the Hugging Face Hub: {text}"
    return text


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ServerConfigError(f"--dllm-algorithm-config: {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        line = str(error).splitlines()[0]
        raise ServerConfigError(f"--dllm-algorithm-config: {path}: not YAML: {line}") from None
    if not isinstance(settings, dict):
        raise ServerConfigError(
            f"--dllm-algorithm-config: {path}: given {settings!r}; wanted `name: value` lines"
        )
    return settings
