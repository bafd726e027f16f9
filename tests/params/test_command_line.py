# SPDX-License-Identifier: Apache-2.0
"""Server-wide defaults on the command line of the server."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.warm import WarmProcess
from vllm.diffusion import fields
from vllm.diffusion.api import cli
from vllm.diffusion.errors import ServerConfigError
from vllm.diffusion.families import LLADA

if TYPE_CHECKING:
    from pathlib import Path


def settings(*words: str, additional: Any = None) -> dict[str, Any]:
    """`additional_config` that a command line leads to."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(words)
    args.additional_config = additional
    cli.fold_into_additional_config(args)
    folded: dict[str, Any] = args.additional_config
    return folded


def test_nothing_said_changes_nothing() -> None:
    assert settings() == {"dllm": {}}
    assert settings(additional={"other": 1, "dllm": {"threshold": 0.7}}) == {
        "other": 1,
        "dllm": {"threshold": 0.7},
    }


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
        ("seed: 1\n", "seed belongs to a request"),
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
    """Whatever upstream's loaders make of its name."""
    from transformers import AutoConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((OSError, ValueError)) as caught:
        AutoConfig.from_pretrained(model)
    told = cli.one_line(caught.value, argparse.Namespace(model=model))
    assert told.startswith(f"model {model}: no such folder, and not found on the Hugging Face Hub")


def test_other_errors_are_told_as_they_are() -> None:
    args = argparse.Namespace(model="nowhere", host="127.0.0.1", port=8000)
    assert cli.one_line(ValueError("max_model_len:\n given 0"), args) == "max_model_len: given 0"
    assert cli.one_line(OSError(98, "Address already in use"), args).startswith("port 8000 of")


def test_no_model_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.entrypoints import api_server

    monkeypatch.setattr(sys, "argv", ["api_server"])
    with pytest.raises(SystemExit) as caught:
        api_server.parse_arguments()
    assert caught.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "error: wanted a checkpoint: a folder" in last_line
    assert "make_tiny_model.py makes models/llada-tiny; --model models/llada-tiny" in last_line


def test_upstreams_command_without_a_model_names_ours(tmp_path: Path) -> None:
    command = ["-m", "vllm.entrypoints.cli.main", "serve", "--port", "0"]
    log = tmp_path / "log"
    assert WarmProcess(command, log, os.environ).wait(60) == 1
    last_line = log.read_text().splitlines()[-1]
    assert last_line.startswith("error: wanted a checkpoint: a folder")
    assert last_line.endswith("makes models/llada-tiny; vllm serve models/llada-tiny serves it")


def test_the_version_is_ours_and_upstreams(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        settings("--version")
    assert done.value.code == 0
    assert re.fullmatch(r"mosaic \d+\.\d+\.\d+ on vllm 0\.32\.0\n", capsys.readouterr().out)


def test_the_page_can_be_left_out() -> None:
    assert settings("--no-page") == {"dllm": {"page": False}}
    with pytest.raises(ServerConfigError, match="page: given 'no'; wanted true or false"):
        settings(additional={"dllm": {"page": "no"}})
