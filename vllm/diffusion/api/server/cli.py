# SPDX-License-Identifier: Apache-2.0
"""Command line of the server: arguments for defaults of diffusion requests, and error messages.

The defaults are merged into `--additional-config '{"dllm": {...}}'`, which `LLM` accepts as well.
"""

from __future__ import annotations

import errno
import sys
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jinja2 import TemplateSyntaxError
from pydantic import ValidationError

from vllm.diffusion import __version__
from vllm.diffusion.api.adapter_requests import refusal_in
from vllm.diffusion.api.decisions import calibration
from vllm.diffusion.api.rendering import parse
from vllm.diffusion.api.server import lifecycle
from vllm.diffusion.config import check_settings, server_settings
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.process import preflight
from vllm.diffusion.process.log_filter import is_loss
from vllm.diffusion.request import families
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.renderers.chat_utils import load_chat_template
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

logger = init_logger(__name__)

DESCRIPTION = (
    "Serve a language model over HTTP. --help=Diffusion lists the options of diffusion language "
    "models, --help=all lists all options, and --help=max-model-len explains one option."
)
NO_MODEL = (
    "wanted a checkpoint: a folder, or a name on the Hugging Face Hub; without a download: "
    "scripts/make_tiny_model.py creates models/llada-tiny"
)


class ServerParser(FlexibleArgumentParser):
    """Upstream's parser with one-line errors that suggest the closest valid name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is not None:
            self.error(preflight.unknown_flag(flag, self._option_string_actions))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {' '.join(message.removeprefix('argument ').split())}\n")
        raise SystemExit(2)


@contextmanager
def errors_in_one_line(args: Namespace) -> Iterator[None]:
    """Exit with a one-line message on errors that the user can fix while a server runs.

    A failing engine has already logged its errors. The exit status of the
    server signals a supervisor to start another server.
    """
    try:
        yield
        if status := lifecycle.take_status():
            raise SystemExit(status)
    except (KeyError, OSError, TypeError, ValueError, VLLMValidationError) as error:
        if isinstance(error, KeyError) and not str(error.args[0]).startswith("invalid "):
            raise  # a bug of ours; the other KeyErrors are unknown names of upstream's parsers
        logger.debug("the server ended", exc_info=True)
        raise SystemExit(f"error: {one_line(error, args)}") from None
    except RuntimeError as error:
        parser = args.reasoning_parser
        if parser and "reasoning parser" in str(error):
            wanted = f"wanted one that fits the model's tokenizer: {one_line(error, args)}"
            raise SystemExit(f"error: --reasoning-parser: given {parser!r}; {wanted}") from None
        if not is_loss(error):
            raise
        raise SystemExit(f"error: {error}") from None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of diffusion language models."""
    group = parser.add_argument_group(
        "Diffusion", "Settings of diffusion language models: request defaults, ranks, the web page."
    )
    group.add_argument(
        "--dllm-algorithm",
        metavar="NAME",
        help="default decoding algorithm of requests. Full-attention models: "
        f"{', '.join(ALGORITHMS)}. Block-causal models: {', '.join(BLOCK_ALGORITHMS)}",
    )
    group.add_argument(
        "--dllm-algorithm-config",
        metavar="FILE.yaml",
        help="file with default parameters of requests, one `name: value` per line",
    )
    group.add_argument(
        "--sequence-parallel-size",
        metavar="RANKS",
        type=int,
        help="number of GPUs that share the rows of long steps; each holds all weights",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute the same bits for a request, whether it runs alone or with other requests",
    )
    group.add_argument(
        "--version",
        action="version",
        version=f"mosaic {__version__} on vllm {metadata.version('vllm')}",
        help="print the versions of Mosaic and vLLM",
    )
    group.add_argument(
        "--no-page",
        action="store_true",
        help="serve only the API, without the web pages at / and /status",
    )
    group.add_argument(
        "--family",
        metavar="NAME",
        help=f"refuse checkpoints of other families; one of: {', '.join(families.SERVED_AS)}",
    )


def check_arguments(args: Namespace) -> None:
    """Refuse values that upstream would accept now and later fail on or ignore."""
    for name in args.middleware or []:
        try:
            resolve_obj_by_qualname(name)
        except (AttributeError, ImportError, ValueError) as error:
            raise ServerConfigError(
                f"--middleware: given {name!r}; wanted MODULE.NAME that can be imported: {error}"
            ) from None
    if args.logits_processors:
        raise ServerConfigError(
            f"--logits-processors: given {args.logits_processors!r}; wanted none: no processor of "
            "logits runs between the steps of a diffusion language model"
        )
    if args.lora_modules and not args.enable_lora:
        given = " ".join(f"{module.name}={module.path}" for module in args.lora_modules)
        raise ServerConfigError(f"lora_modules: given {given}; wanted enable_lora, too")
    if args.chat_template is not None:
        _check_template(args.chat_template)


def _check_template(given: str) -> None:
    try:
        parse(load_chat_template(given))
    except TemplateSyntaxError as error:
        wanted = f"wanted a Jinja template: line {error.lineno}: {error.message}"
        raise ServerConfigError(f"--chat-template: given {given[:80]!r}; {wanted}") from None
    except (OSError, ValueError, VLLMValidationError):
        # The file cannot be read. Upstream's own check, which follows, reports it.
        return


def fold_into_additional_config(args: Namespace) -> None:
    """Move these arguments into `args.additional_config`.

    Raises:
        ServerConfigError: a file cannot be read, or a setting is unknown or unusable.
    """
    settings: dict[str, Any] = {}
    if args.dllm_algorithm_config is not None:
        settings.update(_read(Path(args.dllm_algorithm_config)))
    if args.dllm_algorithm is not None:
        settings["algorithm"] = args.dllm_algorithm
    if args.sequence_parallel_size is not None:
        settings["sequence_parallel_size"] = args.sequence_parallel_size
    if args.batch_invariant:
        settings["batch_invariant"] = True
    if args.no_page:
        settings["page"] = False
    if args.family is not None:
        settings["family"] = args.family
    additional = args.additional_config or {}
    # Upstream keeps invalid JSON as a string.
    if not isinstance(additional, dict):
        raise ServerConfigError(f"--additional-config: given {additional!r}; wanted a JSON object")
    settings = server_settings(additional) | settings
    check_settings(settings, family=None)
    if settings.get(calibration.SETTING) is not None:
        names = (*(args.served_model_name or ()), args.model)
        calibration.load(settings[calibration.SETTING], names)
    if settings:
        args.additional_config = additional | {"dllm": settings}


def one_line(error: Exception, args: Namespace) -> str:
    """Describe an error that prevented the start in one line."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {args.port} of {args.host} is in use; --port takes another"
    # For upstream's settings, report the first error.
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        message = " ".join(str(fault["msg"]).removeprefix("Value error, ").split())
        if fault["type"] == "value_error" or not fault["loc"]:
            return message
        flag = str(fault["loc"][-1]).replace("_", "-")
        return f"--{flag}: given {fault['input']!r}; {message[0].lower()}{message[1:]}"
    description = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    text = " ".join(description.split()) or type(error).__name__
    if (refusal := refusal_in(error)) is not None:
        return str(refusal)
    is_of_the_hub = isinstance(error, (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError))
    # transformers wraps some of these errors in an OSError.
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
