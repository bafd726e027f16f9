# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the arguments and errors of `python -m vllm.entrypoints.api_server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig
from vllm.diffusion.api.server import cli
from vllm.entrypoints.cli.serve import ServeSubcommand

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.utils.argparse_utils import FlexibleArgumentParser


class ServeCommand(ServeSubcommand):
    """Replaces upstream's `serve` command; it runs upstream's server."""

    def subparser_init(self, subparsers: Any) -> FlexibleArgumentParser:
        parser = super().subparser_init(subparsers)
        # Upstream's description names a default model, which `validate` refuses.
        parser.description = cli.DESCRIPTION
        cli.add_arguments(parser)
        parser.__class__ = cli.ServerParser
        parser.allow_abbrev = False
        return parser

    def validate(self, args: Namespace) -> None:
        """Refuse a start without a model; upstream would look for its own default on the Hub."""
        if args.model_tag is None and args.model == ModelConfig.model:
            raise SystemExit(f"error: {cli.NO_MODEL}; vllm serve models/llada-tiny serves it")
        with cli.errors_in_one_line(args):
            cli.check_arguments(args)
            cli.fold_into_additional_config(args)
            super().validate(args)

    @staticmethod
    def cmd(args: Namespace) -> None:
        with cli.errors_in_one_line(args):
            ServeSubcommand.cmd(args)
