# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.entrypoints.api_server`: upstream's OpenAI server plus the diffusion routes.

It accepts the arguments of `vllm serve`. Some defaults differ: the server listens on 127.0.0.1,
running requests get 30 s to finish at shutdown, and probes and `/metrics` are not logged.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ServerConfigError

# The engine's process imports this module, too, so functions import what only the server needs.
from vllm.diffusion.process import prestart

if TYPE_CHECKING:
    from argparse import Namespace

PROGRAM = "python -m vllm.entrypoints.api_server"
TLS_ARGUMENTS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")


def main() -> None:
    with prestart.without_collecting():
        import uvloop

        from vllm.diffusion.api.server import cli
        from vllm.diffusion.process import log_filter
        from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.logger import configure_logging_from_args

        gc.freeze()

    cli_env_setup()
    prestart.use_waiting_process()
    args = parse_arguments()
    configure_logging_from_args(args)
    log_filter.drop_irrelevant_lines()
    with cli.errors_in_one_line(args):
        cli.check_arguments(args)
        cli.fold_into_additional_config(args)
        validate_parsed_serve_args(args)
        check_http(args)
        uvloop.run(run_server(args))


def check_http(args: Namespace) -> None:
    """Make uvicorn load its TLS files, so that a bad key ends the start before a model is loaded.

    Raises:
        ServerConfigError: naming the arguments and the reason.
    """
    import uvicorn
    from fastapi import FastAPI

    given = {name: getattr(args, name) for name in TLS_ARGUMENTS if getattr(args, name) is not None}
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ServerConfigError("--ssl-certfile: given none; wanted a file with --ssl-keyfile")
    try:
        uvicorn.Config(FastAPI(), log_config=None, **given).load()
    except OSError as error:
        files = ", ".join(f"--{k.replace('_', '-')} {v}" for k, v in given.items() if "file" in k)
        raise ServerConfigError(f"{files}: {error}") from None


def parse_arguments() -> Namespace:
    """Parse the command line with our defaults; the model is given by `--model` or by position."""
    from vllm.diffusion.api.server import cli
    from vllm.entrypoints.common.cli_args import make_arg_parser

    parser = make_arg_parser(
        cli.ServerParser(
            prog=PROGRAM,
            usage=f"{PROGRAM} MODEL [options]",
            description=cli.DESCRIPTION,
        )
    )
    parser.set_defaults(
        host="127.0.0.1",
        shutdown_timeout=30,
        disable_access_log_for_endpoints="/health,/ready,/metrics",
        model=None,
        use_tqdm_on_load=sys.stderr.isatty(),  # keep progress bars out of log files
    )
    cli.add_arguments(parser)
    args: Namespace = parser.parse_args()
    args.model = args.model_tag or args.model
    if args.model is None:
        parser.error(f"{cli.NO_MODEL}; --model models/llada-tiny serves it")
    return args


if __name__ == "__main__":
    main()
