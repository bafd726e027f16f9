# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.entrypoints.api_server`: upstream's OpenAI server plus the diffusion routes.

It takes the arguments of `vllm serve`. Three defaults differ: the server listens on 127.0.0.1,
running requests get 30 s to finish at shutdown, and access logs of `/health` are left out.
"""

from __future__ import annotations

import uvloop

from vllm.diffusion.api import cli
from vllm.diffusion.errors import ServerConfigError
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    cli_env_setup()
    parser = make_arg_parser(
        FlexibleArgumentParser(
            prog="python -m vllm.entrypoints.api_server",
            description="Serve a diffusion language model over HTTP.",
        )
    )
    parser.set_defaults(
        host="127.0.0.1", shutdown_timeout=30, disable_access_log_for_endpoints="/health"
    )
    cli.add_arguments(parser)
    args = parser.parse_args()
    try:
        cli.fold_into_additional_config(args)
    except ServerConfigError as error:
        raise SystemExit(f"error: {error}") from None
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
