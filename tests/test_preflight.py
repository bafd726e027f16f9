# SPDX-License-Identifier: Apache-2.0
"""Starts that cannot succeed end with one line, before slow imports.

A fake torch ends the program with a message, which shows that the program has passed all checks.
"""

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.checkpoints import make_case
from tests.programs import ROOT, run_python
from vllm.diffusion.api.server import cli
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.process.preflight import OUR_FLAGS, check_model
from vllm.diffusion.process.upstream_flags import UPSTREAM_FLAGS

OURS = ("-m", "vllm.entrypoints.api_server", "--model")
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
PASSED = "torch is imported"
TINY = {"architectures": ["LLaDAModelLM"], "model_type": "llada"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a folder with a checkpoint that only has config.json, and with the fake torch."""
    (tmp_path / "models" / "llada-tiny").mkdir(parents=True)
    (tmp_path / "models" / "llada-tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(f"raise SystemExit({PASSED!r})\n")
    return tmp_path


def start(home: Path, *words: str, **env: str) -> str:
    """Return the only line of output of a start."""
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{home / 'modules'}:{ROOT}",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the engine's process is not started early
        "HF_ENDPOINT": "http://127.0.0.1:9",  # no process listens there
        "HF_HOME": str(home / "hub"),
        "NO_PROXY": "*",
    }
    done = run_python(*words, cwd=home, env={**variables, **env})
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """Yield a port on which a socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--host", "localhost", "--max_model_len=4k", "--gpu-memory-utilization", "0.5"),
        ("--max-model-len", "-1", "--family", "llada"),
        ("--family", "dream", "--hf-overrides", '{"architectures": ["DreamModel"]}'),
    ],
)
@pytest.mark.parametrize("command", [OURS, SERVE])
def test_what_can_start_goes_on(
    command: tuple[str, ...], words: tuple[str, ...], home: Path
) -> None:
    env = {"VLLM_ACTIVATION_POOL_SIZE_BYTES": "12GiB"}
    assert start(home, *command, "models/llada-tiny", "--port", "0", *words, **env) == PASSED


def test_only_servers_are_looked_at(home: Path) -> None:
    for words in (("-c", "import vllm"), (*SERVE[:2], "bench"), (*SERVE, "--help")):
        assert start(home, *words, VLLM_USE_VMM="yes") == PASSED


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (
            "VLLM_ACTIVATION_POOL_SIZE_BYTES",
            "12XiB",
            "wanted a number of bytes, such as 12884901888, 1",
        ),
        ("VLLM_HOST_CACHE_SIZE_BYTES", "0", "wanted a number of bytes"),
        ("VLLM_VMM_CHUNK_SIZE", "-1", "wanted a number of bytes"),
        ("DLLM_MAX_REQUEST_BYTES", "much", "wanted a number of bytes"),
        ("DLLM_DIFFUSION_STEPS", "0", "wanted a whole number of at least 1"),
        ("VLLM_USE_VMM", "yes", "wanted 0 or 1"),
    ],
)
def test_variables(name: str, value: str, wanted: str, home: Path) -> None:
    output = start(home, *OURS, "models/llada-tiny", "--port", "0", **{name: value})
    assert output.startswith(f"error: {name}: given '{value}'; {wanted}")


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--port", "99999", "wanted a whole number from 0 to 65535"),
        ("--port", "abc", "wanted a whole number from 0 to 65535"),
        ("--host", "not a host", "wanted an address of this machine"),
        ("--host", "192.0.2.1", "wanted an address of this machine"),  # reserved for documentation
        ("--gpu-memory-utilization", "2", "wanted a number above 0, at most 1"),
        ("--gpu-memory-utilization", "half", "wanted a number above 0, at most 1"),
        ("--max-model-len", "abc", "wanted tokens, as 4096 or 4k, or auto"),
        ("--max-model-len", "0", "wanted tokens"),
        ("--dtype", "foo", "wanted one of auto, half, float16"),
        ("--dllm-algorithm", "foo", "wanted one of semi_ar, threshold"),
        ("--additional-config", "{", "wanted a JSON object"),
        ("--additional-config", "[]", "wanted a JSON object"),
        ("--config", "nowhere.yaml", "wanted an existing .yaml or .yml file"),
    ],
)
def test_flags(flag: str, value: str, wanted: str, home: Path) -> None:
    output = start(home, *SERVE, "models/llada-tiny", flag, value)
    assert output.startswith(f"error: {flag}: given '{value}'")
    assert f"; {wanted}" in output


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--foo", "--foo: unknown; --help=all lists those that exist"),
        ("--max-num-seq", "--max-num-seq: unknown; did you mean --max-num-seqs?"),
        ("--max_num_seq=3", "--max-num-seq: unknown; did you mean --max-num-seqs?"),
        ("--dllm-algoritm", "--dllm-algoritm: unknown; did you mean --dllm-algorithm?"),
    ],
)
@pytest.mark.parametrize("program", [OURS, SERVE], ids=["ours", "vllm serve"])
def test_misspelt_flags(program: Sequence[str], word: str, message: str, home: Path) -> None:
    """The beginning of a flag is refused, because it could be a typo of another flag."""
    assert start(home, *program, "models/llada-tiny", word) == f"error: {message}"


def test_all_flags_are_known() -> None:
    """The list that is read before any import equals the flags of the parser."""
    parser = make_arg_parser(FlexibleArgumentParser())
    cli.add_arguments(parser)
    names = set(re.findall(r"--([a-z0-9][a-z0-9-]*)", parser.format_usage()))
    assert {n for n in names if n.removeprefix("no-") not in names} <= UPSTREAM_FLAGS | OUR_FLAGS


def test_a_variable_of_the_scripts_is_named_in_place_of_the_flag(home: Path) -> None:
    output = start(home, *OURS, "models/llada-tiny", "--port", "abc", PORT="abc")
    assert output == "error: PORT: given 'abc'; wanted a whole number from 0 to 65535"


def test_a_port_that_is_in_use(home: Path, taken: int) -> None:
    words = ("models/llada-tiny", "--host", "127.0.0.1", "--port", str(taken))
    output = start(home, *SERVE, *words)
    assert (
        output == f"error: --port: given {taken}, which is in use on 127.0.0.1; wanted a free port"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("models/llada-tin", "models/llada-tiny"),
        ("./models/llada-tin", "models/llada-tiny"),
        ("./model/llada-tiny", "models/llada-tiny"),
        ("models/nothing-like-it", None),
        ("/none/of/these", None),
        ("~/no/such", None),
        ("a/b/c", None),
    ],
)
def test_a_folder_that_is_not_there(name: str, meant: str | None, home: Path) -> None:
    hint = "" if meant is None else f"; did you mean {meant}?"
    assert start(home, *SERVE, name) == f"error: model {name}: no such folder{hint}"


def test_a_folder_of_folders(home: Path) -> None:
    output = start(home, *SERVE, "models")
    assert output.endswith("a folder without config.json; did you mean models/llada-tiny?")


@pytest.mark.parametrize("flag", ["--speculative-config", "--speculative-config.method", "-sc"])
def test_speculative_decoding_has_no_meaning(flag: str, home: Path) -> None:
    output = start(home, *SERVE, "models/llada-tiny", flag, "ngram")
    assert output.startswith("error: model models/llada-tiny: --speculative-config: wanted none; ")
    assert output.endswith("""--additional-config '{"dllm": {"num_speculative_states": 7}}'""")
    other = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (home / "models" / "llada-tiny" / "config.json").write_text(json.dumps(other))
    assert start(home, *SERVE, "models/llada-tiny", "--port", "0", flag, "ngram") == PASSED


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("LLaDAModelLM", "; scripts/run_llada_server.sh serves this one"),
        ("LLaDAMoEModelLM", "; scripts/run_llada_moe_server.sh serves this one"),
        ("LlamaForCausalLM", ""),
    ],
)
def test_a_checkpoint_of_another_family(architecture: str, hint: str, home: Path) -> None:
    config = home / "models" / "llada-tiny" / "config.json"
    config.write_text(json.dumps({"architectures": [architecture]}))
    output = start(home, *OURS, "models/llada-tiny", "--family", "dream")
    assert output == (
        f"error: model models/llada-tiny: architectures: given {architecture}; "
        f"scripts/run_dream_server.sh serves DreamForDiffusionLM or DreamModel{hint}"
    )


# ---- files of a checkpoint ----------------------------------------------------------------------


def safetensors(num_bytes: int, *, written: int | None = None) -> bytes:
    """Return a file with a tensor of `num_bytes` bytes, of which only `written` may be present."""
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "x": tensor}).encode()
    kept = num_bytes if written is None else written
    return struct.pack("<Q", len(header)) + header + bytes(kept)


WHOLE = safetensors(1000)
HTML = b"\n<!DOCTYPE html><html><body>404</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1935432\n"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
WRONG_FILES: list[tuple[dict[str, bytes], str, str]] = [
    ({SHARD: WHOLE[:-7]}, SHARD, f"{len(WHOLE) - 7} bytes, header says {len(WHOLE)}"),
    ({SHARD: WHOLE + b"0"}, SHARD, f"{len(WHOLE) + 1} bytes, header says {len(WHOLE)}"),
    ({SHARD: WHOLE[:30]}, SHARD, "30 bytes, header says"),
    ({SHARD: b""}, SHARD, "0 bytes, it is empty"),
    ({SHARD: b"abcdefghijkl" * 9}, SHARD, "108 bytes, no header of safetensors"),
    ({SHARD: struct.pack("<Q", 5) + b"hello"}, SHARD, "13 bytes, no header of safetensors"),
    ({SHARD: struct.pack("<Q", 2) + b"[]"}, SHARD, "10 bytes, no header of safetensors"),
    ({SHARD: HTML}, SHARD, f"{len(HTML)} bytes, a page of HTML"),
    ({SHARD: POINTER}, SHARD, f"{len(POINTER)} bytes, a pointer of git LFS"),
    ({"pytorch_model.bin": POINTER}, "pytorch_model.bin", "a pointer of git LFS"),
    ({"pytorch_model.bin": b"PK\3\4" + bytes(99)}, "pytorch_model.bin", "103 bytes, its end"),
    ({SHARD: WHOLE, "adapter_model.safetensors": WHOLE}, "adapter_model.safetensors", "adapter"),
    ({INDEX: b'{"weight_map": {"x"'}, INDEX, "given no JSON"),
    ({INDEX: b"[]"}, INDEX, "given a list; wanted an object"),
    ({INDEX: b'{"weight_map": 3}'}, INDEX, "weight_map: wanted an object"),
    (
        {INDEX: b'{"weight_map": {"x": "a.safetensors"}}', "a.safetensors": WHOLE[:-1]},
        "a.safetensors",
        f"{len(WHOLE) - 1} bytes, header says {len(WHOLE)}",
    ),
    ({"tokenizer.json": POINTER}, "tokenizer.json", "a pointer of git LFS"),
    ({"tokenizer.json": b"[]"}, "tokenizer.json", "2 bytes, wanted an object of JSON"),
    ({"config.json": b"[1]"}, "config.json", "given a list; wanted an object"),
    ({"config.json": b"{"}, "config.json", "given no JSON"),
    ({"config.json": b'{"architectures": 5}'}, "config.json", "architectures: given 5; wanted"),
    *(
        ({name: content}, name, wanted)
        for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
        for content, wanted in (
            (b"[]", "given a list; wanted an object"),
            (b"null", "given null; wanted an object"),
            (b"7", "given a number; wanted an object"),
            (b"{'a': 1}", "given no JSON"),
            (b"\xff\xfe\0", "given no JSON"),
        )
    ),
]


@pytest.mark.parametrize(("files", "name", "message"), WRONG_FILES)
def test_a_file_that_is_not_what_it_says(
    files: dict[str, bytes], name: str, message: str, home: Path
) -> None:
    folder = home / "models" / "llada-tiny"
    for file, content in files.items():
        (folder / file).write_bytes(content)
    with pytest.raises(ServerConfigError) as refused:
        check_model(str(folder))
    assert str(refused.value).startswith(f"{folder / name}: ")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_wrong_file_ends_a_start(home: Path) -> None:
    (home / "models" / "llada-tiny" / SHARD).write_bytes(WHOLE[:-7])
    output = start(home, *OURS, "models/llada-tiny", "--port", "0")
    assert output.startswith(
        f"error: models/llada-tiny/{SHARD}: {len(WHOLE) - 7} bytes, header says"
    )
    words = ("models/llada-tiny", "--port", "0", "--load-format", "dummy")
    assert start(home, *OURS, *words) == PASSED


def test_a_checkpoint_that_names_no_mask_token(home: Path) -> None:
    """The check applies to the checkpoint's own tokenizer, if its configuration file exists."""
    folder, words = home / "models" / "llada-tiny", ("models/llada-tiny", "--port", "0")
    message = (
        "error: models/llada-tiny/config.json: mask_token_id: given nothing; wanted the id of "
    )
    named = folder / "tokenizer_config.json"
    assert start(home, *OURS, *words) == PASSED
    for text in ("{}", '{"mask_token": null}'):
        named.write_text(text)
        assert start(home, *OURS, *words).startswith(message)
    assert start(home, *OURS, *words, "--tokenizer", "other") == PASSED
    named.write_text('{"mask_token" : "<|mask|>"}')
    assert start(home, *OURS, *words) == PASSED
    named.write_text("{}")
    (folder / "config.json").write_text(json.dumps({**TINY, "mask_token_id": 0}))
    assert start(home, *OURS, *words) == PASSED
    sdar = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
    (folder / "config.json").write_text(json.dumps(sdar))
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|MASK|>"}]}')
    assert start(home, *OURS, *words) == PASSED
    gemma = {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
    }
    (folder / "config.json").write_text(json.dumps(gemma))
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    assert start(home, *OURS, *words) == PASSED  # its canvases have no mask token


def test_files_that_are_whole_are_none_of_its_business(home: Path) -> None:
    folder = home / "models" / "llada-tiny"
    (folder / SHARD).write_bytes(WHOLE)
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TINY).encode())
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(' {"version": "1.0"}')
    check_model(str(folder))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": SHARD, "y": "absent"}}))
    (folder / "adapter_model.safetensors").write_bytes(b"?")  # not named by the index
    check_model(str(folder))


# ---- the hub -----------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, which records its requests."""

    requests: list[str]

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        if self.path.startswith("/good/model/"):
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "2")
        else:
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a hub and a list that receives its requests."""
    handler = type("OfThisTest", (Hub,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
        server.shutdown()


@pytest.mark.parametrize("command", [OURS, SERVE])
def test_a_name_that_the_hub_has_not(
    command: tuple[str, ...], home: Path, hub: tuple[str, list[str]]
) -> None:
    address, requests_of_hub = hub
    output = start(home, *command, "model/llada-tiny", HF_ENDPOINT=address)
    assert output.startswith(
        "error: model model/llada-tiny: no such folder, and not found on the Hug"
    )
    assert output.endswith("; did you mean models/llada-tiny?")
    assert len(requests_of_hub) == 1
    words = (*command, "good/model", "--port", "0")
    assert start(home, *words, HF_ENDPOINT=address) == PASSED


@pytest.mark.parametrize("env", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_a_hub_that_does_not_answer(env: dict[str, str], home: Path) -> None:
    output = start(home, *SERVE, "good/model", **env)
    assert "no such folder, and the Hugging Face Hub does not answer (" in output
    assert start(home, *SERVE, "s3://bucket/model", "--port", "0", **env) == PASSED
    cached = home / "hub" / "hub" / "models--good--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    assert start(home, *SERVE, "good/model", "--port", "0", **env) == PASSED


# ---- sizes, and engines without a server ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12884901888", 12 << 30),
        ("9007199254740993", 2**53 + 1),
        ("12GiB", 12 << 30),
        ("12G", 12 << 30),
        ("12 gib", 12 << 30),
        ("1.5GiB", 3 << 29),
        ("12GB", 12 * 10**9),
        ("512MiB", 512 << 20),
        ("64K", 64 << 10),
        ("1T", 1 << 40),
        ("8B", 8),
        ("", None),
    ],
)
def test_sizes_have_units(
    text: str, num_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", text)
    assert envs.activation_pool_size_bytes() == num_bytes


@pytest.mark.parametrize("text", ["GiB", "1.5.2G", "12Gi B", "0.1", "-3G", "1e9", "12PiB", "٣"])
def test_what_is_no_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_CACHE_SIZE_BYTES", text)
    with pytest.raises(ServerConfigError, match="VLLM_HOST_CACHE_SIZE_BYTES: given"):
        envs.check()


def test_an_engine_of_a_program_is_refused_so_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    # With the tests' setting, upstream would search the hub's cache first.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ServerConfigError, match="no such folder; did you mean models/llada-tiny"):
        EngineArgs(model="models/llada-tin").create_engine_config()
    speculation = {"model": "x/y", "num_speculative_tokens": 2}
    with pytest.raises(ServerConfigError, match="--speculative-config: wanted none"):
        EngineArgs("models/llada-tiny", speculative_config=speculation).create_engine_config()
    monkeypatch.setenv("VLLM_USE_VMM", "yes")
    with pytest.raises(ServerConfigError, match="VLLM_USE_VMM: given 'yes'"):
        EngineArgs("models/llada-tiny").create_engine_config()


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("llada", None),
        ("sdar", "run_sdar_server.sh serves SDARForCausalLM or SDARMoeForCausalLM; scripts/run_ll"),
        ("nonsense", "family: given 'nonsense'; wanted one of llada, dream,"),
    ],
)
def test_the_family_of_a_configured_engine(
    family: str, refusal: str | None, tmp_path: Path
) -> None:
    args = EngineArgs(
        model=str(make_case(tmp_path / "model", "mha")),
        skip_tokenizer_init=True,
        max_model_len=64,
        additional_config={"dllm": {"family": family}},
    )
    if refusal is None:
        args.create_engine_config()
        return
    with pytest.raises(ValueError, match=refusal):
        args.create_engine_config()
