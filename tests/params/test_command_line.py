# SPDX-License-Identifier: Apache-2.0
"""Server-wide defaults on the command line of the server."""

import argparse
import importlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm.diffusion.api.server import cli
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.request import fields
from vllm.diffusion.request.families import LLADA


def settings(*words: str, additional: Any = None) -> Any:
    """Return the `additional_config` of a command line."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(words)
    args.additional_config = additional
    cli.fold_into_additional_config(args)
    return args.additional_config


def test_nothing_said_changes_nothing() -> None:
    assert settings() is None
    assert settings(additional={"other": 1, "dllm": {"threshold": 0.7}}) == {
        "other": 1,
        "dllm": {"threshold": 0.7},
    }


def test_additional_settings_are_an_object() -> None:
    with pytest.raises(ServerConfigError, match=r"^--additional-config: given '\{bad'; wanted a J"):
        settings("--no-page", additional="{bad")
    for name in ("dlm", "DLLM", "dllms"):
        with pytest.raises(ServerConfigError, match=f"given '{name}'; did you mean 'dllm'"):
            settings(additional={name: {"threshold": 0.7}})


def test_ranks_that_divide_rows_are_a_setting() -> None:
    folded = settings("--sequence-parallel-size", "2", additional={"dllm": {"steps": 9}})
    assert folded == {"dllm": {"steps": 9, "sequence_parallel_size": 2}}
    with pytest.raises(ServerConfigError, match="sequence_parallel_size: given 0; wanted a whole"):
        settings("--sequence-parallel-size", "0")


def test_a_file_and_a_name_come_together(tmp_path: Path) -> None:
    file = tmp_path / "algorithm.yaml"
    file.write_text("threshold: 0.5\nblock_add: 0.1\ndecoded_thresh: 0.95\nsub_block_size: 32\n")
    words = ("--dllm-algorithm", "multi_block", "--dllm-algorithm-config", str(file))
    defaults = fields.server_defaults(settings(*words)["dllm"], LLADA)
    assert defaults == {
        "algorithm": "multi_block",
        "threshold": 0.5,
        "block_add_threshold": 0.1,
        "decoded_token_threshold": 0.95,
        "block_length": 32,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo: 1\n", "foo: given 1; unknown"),
        ("threshold: high\n", "threshold: given 'high'; wanted"),
        ("seed: 1\n", "seed can only be set by requests"),
        ("- threshold\n", "wanted `name: value` lines"),
        ("a: [\n", "not YAML"),
    ],
)
def test_a_bad_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "algorithm.yaml"
    file.write_text(text)
    with pytest.raises(ServerConfigError) as refusal:
        settings("--dllm-algorithm-config", str(file))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_an_unknown_name() -> None:
    with pytest.raises(ServerConfigError, match=r"nowhere\.yaml: No such file"):
        settings("--dllm-algorithm-config", "nowhere.yaml")
    with pytest.raises(ServerConfigError, match="algorithm: given 'best'; wanted one of"):
        settings("--dllm-algorithm", "best")


@pytest.mark.parametrize("model", ["/nowhere", "/no/such/model", "nowhere", "no/model"])
def test_a_missing_model_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the model, whatever upstream's loaders report."""
    from transformers import AutoConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((OSError, ValueError)) as caught:
        AutoConfig.from_pretrained(model)
    message = cli.one_line(caught.value, argparse.Namespace(model=model))
    assert message.startswith(
        f"model {model}: no such folder, and not found on the Hugging Face Hub"
    )


def test_other_errors_are_told_as_they_are() -> None:
    args = argparse.Namespace(model="nowhere", host="127.0.0.1", port=8000)
    assert cli.one_line(ValueError("max_model_len:\n given 0"), args) == "max_model_len: given 0"
    assert cli.one_line(OSError(98, "Address already in use"), args).startswith("port 8000 of")


def test_no_model_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal_of_ours([], monkeypatch, capsys)
    assert message.startswith("error: wanted a checkpoint: a folder")
    assert "make_tiny_model.py creates models/llada-tiny; --model models/llada-tiny" in message


# Mistakes of users, and the one line of their error.
MISTAKES = [
    (["--max-modle-len", "64"], "error: --max-modle-len: unknown; did you mean --max-model-len?"),
    (["--dllm-algoritm=x"], "error: --dllm-algoritm: unknown; did you mean --dllm-algorithm?"),
    (["--surely-not"], "error: --surely-not: unknown; --help=all lists those that exist"),
    (["--dtype"], "error: --dtype: expected one argument"),
    (["--dtype", "bf17"], "error: --dtype: invalid choice: 'bf17' (choose from"),
    (["--max-num-seqs", "many"], "error: --max-num-seqs: invalid"),
]


def refusal_of_ours(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the one line of error of our server's parser."""
    from vllm.entrypoints import api_server

    monkeypatch.setattr(sys, "argv", ["api_server", *words])
    with pytest.raises(SystemExit) as caught:
        api_server.parse_arguments()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refusal_of_ours(["--model", "m", *words], monkeypatch, capsys).startswith(message)


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm serve`, made as by upstream's command line."""
    parser = FlexibleArgumentParser(prog="vllm")
    commands = parser.add_subparsers(dest="subparser")
    for command in importlib.import_module("vllm.entrypoints.cli.serve").cmd_init():
        made = command.subparser_init(commands)
        made.set_defaults(command=command, dispatch_function=command.cmd)
    return parser


class TestUpstreamsCommand:
    """`vllm serve` has our arguments and our errors."""

    def test_it_takes_our_arguments(self, parser: FlexibleArgumentParser, tmp_path: Path) -> None:
        file = tmp_path / "algorithm.yaml"
        file.write_text("threshold: 0.5\n")
        words = ["--no-page", "--dllm-algorithm", "threshold", "--sequence-parallel-size", "2"]
        words += ["--dllm-algorithm-config", str(file), "--family", "llada"]
        args = parser.parse_args(["serve", "models/llada-tiny", *words])
        args.command.validate(args)
        # Several API servers receive them from the process that starts them.
        args = pickle.loads(pickle.dumps(args))
        assert args.additional_config == {
            "dllm": {
                "threshold": 0.5,
                "algorithm": "threshold",
                "sequence_parallel_size": 2,
                "page": False,
                "family": "llada",
            }
        }

    @pytest.mark.parametrize(("words", "message"), MISTAKES)
    def test_a_mistake_is_one_line(
        self,
        words: list[str],
        message: str,
        parser: FlexibleArgumentParser,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(["serve", "models/llada-tiny", *words])
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(message)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["m", "--dllm-algorithm", "best"], "error: dllm settings: algorithm: given 'best'; w"),
            (["m", "--chat-template", "/no"], "error: The supplied chat template string (/no"),
            ([], f"error: {cli.NO_MODEL}; vllm serve models/llada-tiny serves it"),
        ],
    )
    def test_what_is_wrong_together(
        self, words: list[str], message: str, parser: FlexibleArgumentParser
    ) -> None:
        args = parser.parse_args(["serve", *words])
        with pytest.raises(SystemExit) as caught:
            args.command.validate(args)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)

    def test_its_help_has_them_as_a_group(
        self, parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for words in (["--help"], ["--help=Diffusion"]):
            with pytest.raises(SystemExit):
                parser.parse_args(["serve", *words])
            output = capsys.readouterr().out
            assert "Diffusion" in output
            assert "if no model is specified" not in output  # a model is required
            FlexibleArgumentParser._search_keyword = None
        for flag in ("--no-page", "--dllm-algorithm-config FILE", "--sequence-parallel-size RANKS"):
            assert flag in output


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("invalid tool call parser: x"), "error: invalid tool call parser: x"),
        (ValueError("a\n b"), "error: a b"),
        (RuntimeError("Engine x died unexpectedly."), "error: Engine x died unexpectedly."),
        (
            RuntimeError("X reasoning parser could not locate tokens"),
            "error: --reasoning-parser: given 'x'; wanted one that fits the model's tokenizer: X "
            "reasoning parser could not locate tokens",
        ),
    ],
)
def test_what_ends_a_server_is_one_line(error: Exception, message: str) -> None:
    args = argparse.Namespace(model="m", reasoning_parser="x")
    with pytest.raises(SystemExit) as caught, cli.errors_in_one_line(args):
        raise error
    assert str(caught.value) == message
    for mistake in (KeyError("a mistake of ours"), RuntimeError("another one")):
        with pytest.raises(type(mistake)), cli.errors_in_one_line(args):
            raise mistake


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--middleware", "nope.Middle"], "--middleware: given 'nope.Middle'; wanted MODULE.NAME"),
        (
            ["--middleware", "os.path.nope"],
            "--middleware: given 'os.path.nope'; wanted",
        ),
        (["--logits-processors", "nope:X"], "--logits-processors: given ['nope:X']; wanted none"),
        (["--lora-modules", "a=b"], "lora_modules: given a=b; wanted enable_lora, too"),
        (["--chat-template", "{% x }"], "--chat-template: given '{% x }'; wanted a Jinja template"),
    ],
)
def test_values_that_would_fail_later_or_never_act(words: list[str], message: str) -> None:
    parser = make_arg_parser(cli.ServerParser())
    cli.add_arguments(parser)
    with pytest.raises(ServerConfigError) as caught:
        cli.check_arguments(parser.parse_args(["models/llada-tiny", *words]))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    good = ["--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"]
    cli.check_arguments(parser.parse_args(["models/llada-tiny", *good]))


def test_the_version_is_ours_and_upstreams(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        settings("--version")
    assert done.value.code == 0
    assert re.fullmatch(r"mosaic \d+\.\d+\.\d+ on vllm 0\.33\.0\n", capsys.readouterr().out)


def test_the_page_can_be_left_out() -> None:
    assert settings("--no-page") == {"dllm": {"page": False}}
    with pytest.raises(ServerConfigError, match="page: given 'no'; wanted true or false"):
        settings(additional={"dllm": {"page": "no"}})
