# SPDX-License-Identifier: Apache-2.0
"""Checks that end a start early if environment and command line show that it cannot succeed.

A server runs them before the imports that take seconds, and before its engine's process is
started, so nothing here imports torch or upstream. Errors that need upstream's parser or the
checkpoint are reported later (`api/server/cli.py`, `plugin.py`).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.process.checkpoint_files import check_files, check_mask_token, object_of
from vllm.diffusion.process.upstream_flags import UPSTREAM_FLAGS
from vllm.diffusion.request import families
from vllm.diffusion.request.algorithms import ALGORITHM_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

OURS = "vllm.entrypoints.api_server"
_UPSTREAMS = ("vllm", "vllm.entrypoints.cli.main")  # the installed program, and its module
_ONLY_TOLD = frozenset({"-h", "--help", "--version"})
_SPECULATION = (
    *("--speculative-config", "-sc"),
    *("--spec-method", "--spec-model", "--spec-tokens"),
)
OUR_FLAGS = frozenset(
    {
        *("dllm-algorithm", "dllm-algorithm-config", "sequence-parallel-size", "version"),
        *("no-page", "family", "help", "batch-invariant"),
    }
)
_OTHER_TOKENS = ("--tokenizer", "--hf-overrides", "--skip-tokenizer-init", "--hf-config-path")
_FILES_OF_FORMAT = ("auto", "hf", "safetensors", "pt", "fastsafetensors")
_HUB_TIMEOUT_S = 5.0


class _Flag(NamedTuple):
    wanted: str
    is_usable: Callable[[str], bool]


def _is_port(value: str) -> bool:
    return re.fullmatch(r"\d{1,5}", value, re.ASCII) is not None and int(value) < 1 << 16


def _is_share(value: str) -> bool:
    with suppress(ValueError):
        return 0 < float(value) <= 1
    return False


def _is_length(value: str) -> bool:
    """Return whether upstream accepts the value as a length."""
    is_number = re.fullmatch(r"\d*[1-9]\d*[KMGT]?|\d+(\.\d+)?[kmgt]", value, re.ASCII)
    return is_number is not None or value == "-1" or value.lower() == "auto"


def _is_yaml(value: str) -> bool:
    return value.endswith((".yaml", ".yml")) and Path(value).is_file()


def _is_object(value: str) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(value), dict)
    return False


def _is_file(value: str) -> bool:
    return Path(value).is_file()


_A_FILE = _Flag("an existing file", _is_file)
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_FLAGS = {
    "--additional-config": _Flag("a JSON object", _is_object),
    "--dllm-algorithm": _Flag(f"one of {', '.join(ALGORITHM_NAMES)}", ALGORITHM_NAMES.__contains__),
    "--dllm-algorithm-config": _A_FILE,
    "--log-config-file": _A_FILE,
    "--reasoning-parser-plugin": _A_FILE,
    "--tool-parser-plugin": _A_FILE,
    "--dtype": _Flag(f"one of {', '.join(_DTYPES)}", _DTYPES.__contains__),
    "--port": _Flag("a whole number from 0 to 65535", _is_port),
    "--max-model-len": _Flag("tokens, as 4096 or 4k, or auto", _is_length),
    "--gpu-memory-utilization": _Flag("a number above 0, at most 1", _is_share),
    "--config": _Flag("an existing .yaml or .yml file", _is_yaml),
}


def check() -> None:
    """Exit with one line if this program is a server that cannot start; must run before imports."""
    words = server_arguments()
    if words is None or _ONLY_TOLD.intersection(word.partition("=")[0] for word in words):
        return
    try:
        envs.check()
        _check_arguments(words)
    except ServerConfigError as error:
        raise SystemExit(f"error: {error}") from None


def server_arguments() -> list[str] | None:
    """Return the arguments of this program if it is a server (ours or `vllm serve`), else None."""
    if not sys.argv or "--multiprocessing-fork" in sys.orig_argv:  # a child process of a server
        return None
    program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    # Python has not found the module yet.
    if program == "-m":
        program = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if program == OURS:
        return words
    return words[1:] if program in _UPSTREAMS and words[:1] == ["serve"] else None


def check_model(
    name: str,
    *,
    is_speculating: bool = False,
    family: str | None = None,
    load_format: str = "auto",
    has_tokenizer: bool = False,
) -> None:
    """Refuse a path that is not a folder, and a folder without the required files.

    Args:
        name: name of the model, as given by the user.
        is_speculating: whether speculative decoding is requested.
        family: the expected family (`families.SERVED_AS`); None for any.
        load_format: upstream's --load-format.
        has_tokenizer: whether its own tokenizer and config.json are used unchanged.

    Raises:
        ServerConfigError: naming the model and a folder with a similar name, or a file of the model
            that does not have the format of its name.
    """
    path = Path(name)
    if not path.exists() and _reads_like_a_path(name):
        raise ServerConfigError(f"{_of(name)}: no such folder{_did_you_mean(name)}")
    if path.is_dir() and not any(entry.suffix in (".json", ".gguf") for entry in path.iterdir()):
        inside = " or ".join(sorted(str(file.parent) for file in path.glob("*/config.json"))[:3])
        raise ServerConfigError(
            f"{_of(name)}: a folder without config.json"
            f"{f'; did you mean {inside}?' if inside else ''}"
        )
    if not (path / "config.json").is_file():
        # The model is on the Hub, or has another format.
        return
    config = object_of(path / "config.json")
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(type(x) is str for x in named)):
        wanted = f"given {named!r}; wanted a list of names"
        raise ServerConfigError(f"{path / 'config.json'}: architectures: {wanted}")
    model = named, config.get("model_type"), config
    ours = families.family_of(*model)
    if ours is not None or "LlamaForCausalLM" in (named or ()):
        check_files(path, has_weights=load_format in _FILES_OF_FORMAT)
    if ours is not None and has_tokenizer and not ours.is_open:
        check_mask_token(path, config, ours.mask_token)
    if is_speculating and ours is not None:
        raise ServerConfigError(
            f"{_of(name)}: --speculative-config: wanted none; a diffusion language model drafts "
            """its own states: --additional-config '{"dllm": {"num_speculative_states": 7}}'"""
        )
    if family is not None:
        check_family(name, family, *model)


def check_family(
    name: str,
    family: str,
    architectures: Sequence[str] | None,
    model_type: str | None,
    config: Mapping[str, Any],
) -> None:
    """Refuse a checkpoint that is not of the expected family.

    Raises:
        ServerConfigError: naming the model, its architecture, and the script that serves it.
    """
    reason = families.why_not_served(family, architectures, model_type, config)
    if reason is not None:
        raise ServerConfigError(f"{_of(name)}: {reason}")


def _check_arguments(words: Sequence[str]) -> None:
    _check_names(words)
    values = _values(words)
    for flag, (wanted, is_usable) in _FLAGS.items():
        value = values.get(flag)
        if value and not is_usable(value):
            raise ServerConfigError(f"{_name(flag, value)}: given {value!r}; wanted {wanted}")
    model = words[0] if words and not words[0].startswith("-") else values.get("--model")
    if model:
        check_model(
            model,
            is_speculating=not values.keys().isdisjoint(_SPECULATION),
            load_format=values.get("--load-format", "auto"),
            has_tokenizer=values.keys().isdisjoint(_OTHER_TOKENS),
            # An override may change the family.
            family=None if "--hf-overrides" in values else values.get("--family"),
        )
        tokenizer = values.get("--tokenizer", "")
        if _reads_like_a_path(tokenizer) and not Path(tokenizer).exists():
            raise ServerConfigError(
                f"--tokenizer: given {tokenizer!r}; wanted an existing folder"
                f"{_did_you_mean(tokenizer)}"
            )
        if not Path(model).exists() and "://" not in model:
            _check_hub(model, values.get("--revision"))
    if values.keys().isdisjoint(("--uds", "--headless")):
        _check_address(values)


def _check_names(words: Sequence[str]) -> None:
    """Refuse a flag that is neither in upstream's parser nor in ours."""
    known = UPSTREAM_FLAGS | OUR_FLAGS
    for word in words:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("--")
        if word == "--":
            return
        if not word.startswith("--") or name in known or name.removeprefix("no-") in known:
            continue
        raise ServerConfigError(unknown_flag(f"--{name}", [f"--{flag}" for flag in known]))


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown flag, with the most similar known flag."""
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "--help=all lists those that exist"
    return f"{flag}: unknown; {hint}"


def _values(words: Sequence[str]) -> dict[str, str]:
    """Return the value of each flag of a command line; the last value if there are several."""
    values = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_joined, value = word.partition("=")
        if name.startswith("-"):
            # Upstream also accepts --max_model_len and --speculative-config.method.
            name, is_part, _ = name.replace("_", "-").partition(".")
            values[name] = "" if is_part else value if is_joined else following
    return values


def _name(flag: str, value: str) -> str:
    """Return the name of the flag, or of our scripts' variable that set it."""
    variable = flag[2:].upper().replace("-", "_")
    return variable if os.environ.get(variable) == value else flag


def _of(model: str) -> str:
    """Return the name of the model, with our scripts' variable that set it."""
    given = (n for n, v in os.environ.items() if n.endswith("MODEL_DIR") and v == model)
    variable = next(given, None)
    return f"model {model}" if variable is None else f"model {model} ({variable})"


def _check_address(values: Mapping[str, str]) -> None:
    """Check that the server can listen on its address; without a host, on all addresses."""
    host = values.get("--host", "")
    port = values.get("--port") or "8000"
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            raise ServerConfigError(
                f"{_name('--port', port)}: given {port}, which is in use"
                f"{f' on {host}' if host else ''}; wanted a free port"
            ) from None
        if number == errno.EACCES:
            raise ServerConfigError(
                f"{_name('--port', port)}: given {port}; wanted one that this user may listen on, "
                "from 1024 on"
            ) from None
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerConfigError(
            f"{_name('--host', host)}: given {host!r} ({reason}); wanted an address of this "
            "machine, such as 127.0.0.1, or 0.0.0.0 for all"
        ) from None


def _reads_like_a_path(name: str) -> bool:
    if "://" in name or name.endswith(".gguf"):
        return False
    first, *others = name.split("/")
    is_marked = name.startswith((".", "/", "~")) or len(others) > 1
    return is_marked or (bool(others) and Path(first).is_dir())


def _did_you_mean(name: str) -> str:
    for given in (name, f"models/{name}"):
        nearest = _nearest_folder(Path(given).expanduser())
        if nearest is not None:
            return f"; did you mean {nearest}?"
    return ""


def _nearest_folder(path: Path) -> Path | None:
    """Return the folder whose path is most similar to the given one, part by part, or None."""
    nearest = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (nearest / part).is_dir():
            try:
                beside = [entry.name for entry in nearest.iterdir() if entry.is_dir()]
            except OSError:
                return None
            part = next(iter(difflib.get_close_matches(part, beside, n=1)), "")
            if not part:
                return None
        nearest /= part
    return nearest


def _check_hub(name: str, revision: str | None) -> None:
    """Query the Hugging Face Hub once; upstream would try for half a minute.

    Raises:
        ServerConfigError: the Hub has no such model for this user, or does not answer and the model
            is not in the Hub's local cache.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's own

    prefix = f"{_of(name)}: no such folder, and "
    try:
        get_hf_file_metadata(
            hf_hub_url(name, "config.json", revision=revision), timeout=_HUB_TIMEOUT_S
        )
    except errors.HFValidationError:
        raise ServerConfigError(f"{prefix}no ORGANISATION/NAME{_did_you_mean(name)}") from None
    except errors.RemoteEntryNotFoundError:
        # Without config.json it may have another format that upstream supports.
        return
    except (HTTPError, OSError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        if 400 <= status < 500:
            at = "" if revision is None else f" at --revision {revision}"
            raise ServerConfigError(
                f"{prefix}not found on the Hugging Face Hub{at} ({status}; a private or gated one "
                f"requires HF_TOKEN){_did_you_mean(name)}"
            ) from None
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        reason = " ".join(str(error).split())[:160]
        raise ServerConfigError(
            f"{prefix}the Hugging Face Hub does not answer ({reason}){_did_you_mean(name)}"
        ) from None
