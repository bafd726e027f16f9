# SPDX-License-Identifier: Apache-2.0
"""The log of an engine's start reports the hardware, and omits lines that do not apply."""

import functools
import importlib
import inspect
import logging
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

import flash_sample
import vmm_allocator
from tests.checkpoints import make_case
from tests.engine.harness import Engine, engine_config, logged
from tests.programs import ROOT
from vllm.diffusion import __version__
from vllm.diffusion.api.server import welcome
from vllm.diffusion.core.errors import AdapterError, ServerConfigError
from vllm.diffusion.engine.worker import status
from vllm.diffusion.engine.worker.worker import DiffusionWorker
from vllm.diffusion.metrics import BUILD_INFO
from vllm.diffusion.ops.build_stamp import stamp_of
from vllm.diffusion.ops.native_packages import BUILD, NativePackage, check_builds, native_packages
from vllm.diffusion.process import log_filter
from vllm_add_llada.cuda_kernels import fused_ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# Names of the native packages in logs and metrics.
NAMES = ("flash_sample", "fused_ops", "gather_gemm", "vmm_allocator")
# Native packages with a compiled module.
EXTENSIONS: dict[str, Any] = {
    "flash_sample": flash_sample,
    "fused_ops": fused_ops,
    "vmm_allocator": vmm_allocator,
}


# ---- hardware ----------------------------------------------------------------------------------


def test_an_engine_says_what_it_runs_on(engine: Engine) -> None:
    (info,) = engine.llm.collective_rpc("build_info")
    assert info.keys() == set(BUILD_INFO.facts)
    if engine.runner.device.type == "cpu":
        assert {info[name] for name in NAMES[:-1]} == {"reference"}
        assert (info["activation_pool"], info["attention"], info["graphs"]) == (
            "torch",
            "sdpa",
            "off",
        )


def test_every_native_package_is_reported() -> None:
    assert tuple(package.name for package in native_packages()) == NAMES


@pytest.mark.parametrize("missing", NAMES)
def test_a_package_that_is_not_built_for_a_gpu_is_a_warning(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = tuple(NativePackage(name, is_built=name != missing) for name in NAMES)
    monkeypatch.setattr(status, "native_packages", lambda: actual)
    info = {"activation_pool": "vmm", "attention": "sdpa+flash3+split"}
    lines = logged(status.logger, status.log_build_info, info, GPU, 3 << 30, None)
    warnings = [text for level, text in lines if level == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{missing}: not built") and BUILD in warnings[0]
    texts = [text for level, text in lines if level == logging.INFO]
    assert texts == [
        *(f"{name}: kernels" for name in NAMES if name != missing),
        "activation pool: 3.00 GiB, virtual memory",
        "attention: sdpa, flash3, split",
        "CUDA graphs: captured before the first request",
    ]


@pytest.mark.parametrize("stale", EXTENSIONS)
def test_a_module_of_another_version_is_refused(
    stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, package in EXTENSIONS.items():
        folder = Path(package.__file__).parent.relative_to(ROOT)
        stamp = stamp_of(ROOT, str(folder))
        monkeypatch.setattr(package, "is_built", lambda: True)
        monkeypatch.setattr(package, "build_stamp", lambda s=stamp, n=name: s - (n == stale))
    assert [package.name for package in native_packages() if package.is_stale] == [stale]
    line = f"{stale}: the compiled module does not match these sources; build it again with: "
    with pytest.raises(ServerConfigError, match=line):
        check_builds()
    monkeypatch.setattr(EXTENSIONS[stale], "is_built", lambda: False)
    check_builds()


def test_other_cards_are_told_what_multiplies() -> None:
    info = {"activation_pool": "vmm", "attention": "split", "fused_ops": "portable kernels"}
    lines = logged(status.logger, status.log_build_info, info, GPU, 1 << 30, None)
    (line,) = [text for _, text in lines if "fused_ops: kernels, products" in text]
    assert "9.0" in line


def test_without_a_gpu_nothing_is_missing() -> None:
    info = {"activation_pool": "torch", "attention": "sdpa"}
    given = (info, CPU, 1 << 30, "none (no GPU)")
    lines = logged(status.logger, status.log_build_info, *given)
    assert {level for level, _ in lines} == {logging.INFO}
    assert [text for _, text in lines] == [
        *(f"{name}: PyTorch reference (no GPU)" for name in NAMES),
        "activation pool: 1.00 GiB, PyTorch's allocator (no GPU)",
        "attention: sdpa",
        "CUDA graphs: none (no GPU)",
    ]


@pytest.mark.parametrize(("wanted", "reason"), [("0", "VLLM_USE_VMM=0"), ("1", "no vmm_allocator")])
def test_why_a_pool_is_not_virtual_memory(
    wanted: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_VMM", wanted)
    info = {"activation_pool": "torch", "attention": "sdpa"}
    given = (info, GPU, 1 << 30, None)
    texts = [text for _, text in logged(status.logger, status.log_build_info, *given)]
    assert f"activation pool: 1.00 GiB, PyTorch's allocator ({reason})" in texts


@pytest.mark.gpu
def test_a_gpu_with_all_packages_has_all_kernels(checkpoint: Any) -> None:
    from tests.engine.harness import running

    with running(checkpoint("mha"), dtype="bfloat16") as engine:
        (info,) = engine.llm.collective_rpc("build_info")
    built = {package.name: package.is_built for package in native_packages()}
    for name in NAMES[:-1]:
        assert info[name] == ("kernels" if built[name] else "reference")
    assert info["activation_pool"] == ("vmm" if built["vmm_allocator"] else "torch")
    assert "sdpa" in info["attention"].split("+")


# ---- arguments without effect ------------------------------------------------------------------


def server_arguments(*given: str) -> Namespace:
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(list(given))
    return parsed


def test_arguments_without_effect_are_upstreams() -> None:
    assert vars(server_arguments()).keys() >= welcome.WITHOUT_EFFECT | welcome.OF_PREFIXES


def test_prefix_caching_has_an_effect_where_prefixes_are_shared() -> None:
    warn = welcome.warn_about_unused_arguments
    given = server_arguments("--no-enable-prefix-caching", "--num-gpu-blocks-override", "9")
    assert logged(welcome.logger, lambda: warn(given, has_prefixes=True)) == []
    ((_, text),) = logged(welcome.logger, warn, given)
    assert text.endswith(": --enable-prefix-caching, --num-gpu-blocks-override")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], None),
        (["--max-num-seqs", "7", "--dtype", "bfloat16", "--enforce-eager"], None),
        (["--enable-prefix-caching"], "--enable-prefix-caching"),
        (
            ["--attention-backend", "FLASH_ATTN", "--enable-chunked-prefill", "-cc", '{"mode": 3}'],
            "--attention-backend, --compilation-config, --enable-chunked-prefill",
        ),
        (["--cudagraph-capture-sizes", "1", "2"], "--cudagraph-capture-sizes"),
    ],
)
def test_those_that_were_given_are_named_in_one_line(given: list[str], named: str | None) -> None:
    warn = welcome.warn_about_unused_arguments
    lines = logged(welcome.logger, warn, server_arguments(*given))
    text = f"without effect on a diffusion language model: {named}"
    assert lines == ([] if named is None else [(logging.WARNING, text)])


# ---- lines of upstream -------------------------------------------------------------------------


@pytest.mark.parametrize("module", log_filter.LEFT_OUT)
def test_the_lines_that_are_left_out_are_upstreams(module: str) -> None:
    """If upstream changes the words of a line, the filter would no longer match it."""
    source = inspect.getsource(importlib.import_module(module))
    for beginning in log_filter.LEFT_OUT[module]:
        assert f'"{beginning}' in source, beginning


def test_other_lines_of_the_same_loggers_stay() -> None:
    log_filter.drop_irrelevant_lines()
    log_filter.drop_irrelevant_lines()
    logger = logging.getLogger("vllm.entrypoints.launchers.launcher")
    assert [type(f).__name__ for f in logger.filters].count("DropByPrefix") == 1
    assert logged(logger, logger.warning, "Route: %s, Methods: %s", "/x", "GET") == []
    assert logged(logger, logger.warning, "port %s is used", 7) == [
        (logging.WARNING, "port 7 is used")
    ]


def test_the_end_of_an_engine_leaves_no_stack_trace() -> None:
    """Only a dead engine is logged without a stack trace, with upstream's name of the process."""
    from vllm.v1 import utils
    from vllm.v1.engine.exceptions import EngineDeadError

    log_filter.drop_irrelevant_lines()
    ended = RuntimeError("Engine core process EngineCore_DP0 died unexpectedly.")
    for name in log_filter.TRACING:
        logger = logging.getLogger(name)
        for error, num_lines in ((EngineDeadError(), 0), (ended, 0), (RuntimeError("other"), 1)):
            fail = functools.partial(logger.error, "failed", exc_info=error)
            assert len(logged(logger, fail)) == num_lines
    source = inspect.getsource(utils.wait_for_completion_or_failure)
    assert all(words.strip() in source for words in log_filter.DIED)


def test_a_refused_call_is_one_line() -> None:
    """Upstream logs it with a stack trace, which other errors keep."""
    log_filter.drop_irrelevant_lines()
    logger = logging.getLogger("vllm.v1.engine.core")
    refusal = AdapterError("max_cpu_loras: given 4, all in use; wanted one to unload")
    text = "Invocation of add_lora method failed"
    fail = functools.partial(logger.error, "Invocation of %s method failed", "add_lora")
    lines = logged(logger, functools.partial(fail, exc_info=refusal))
    assert lines == [(logging.WARNING, f"{text}: {refusal}")]
    lines = logged(logger, functools.partial(fail, exc_info=RuntimeError("other")))
    assert lines == [(logging.ERROR, text)]


def test_the_settings_of_an_engine_are_one_short_line(
    llama: Path, with_upstreams_kernels: None, tmp_path: Path
) -> None:
    log_filter.rename_start_lines()
    logger = logging.getLogger("vllm.v1.engine.core")
    (tmp_path / "ours").mkdir()
    text = "Initializing a V1 LLM engine (v%s) with config: %s"
    ours = engine_config(make_case(tmp_path / "ours" / "model", "mha"), dtype="float32")
    ((_, line),) = logged(logger, logger.warning, text, "0.33.0", ours)
    assert line.startswith("engine of vLLM 0.33.0: model ") and len(line) < 300
    assert line.endswith("float32, 64 positions, 1 tensor-parallel and 1 sequence-parallel ranks")
    ((_, line),) = logged(logger, logger.warning, text, "0.33.0", engine_config(llama))
    assert line.startswith("Initializing a V1 LLM engine")


def test_the_first_line_says_what_is_started() -> None:
    from vllm.entrypoints.common.startup import log_version_and_model

    log_filter.rename_start_lines()
    logger = logging.getLogger("vllm.entrypoints.launchers.launcher")
    lines = logged(logger, log_version_and_model, logger, "0.33.0", "models/llada-tiny")
    text = f"Mosaic {__version__} on vLLM 0.33.0, model models/llada-tiny"
    assert lines == [(logging.INFO, text)]


def test_a_length_beyond_the_checkpoints_is_no_warning() -> None:
    """The scripts allow such lengths by default, and the start logs both lengths."""
    log_filter.drop_irrelevant_lines()
    logger = logging.getLogger("vllm.config.model")
    warning = "User-specified max_model_len (204800) is greater than the derived max_model_len"
    assert logged(logger, logger.warning, "%s %s", warning, "lead to nan") == []
    args = Namespace(host=None, port=1, root_path=None, ssl_certfile=None, api_key=None)
    args.served_model_name, args.model = None, "m"
    for own_length, ending in ((4096, " (config.json has 4096)"), (8192, ""), (None, "")):
        lines = logged(
            welcome.logger,
            lambda length=own_length: welcome.log_welcome(
                *(args, "llada", 8192),
                limits=(256, 4096),
                own_length=length,
                has_template=False,
                has_page=False,
                engine_ready_at=0.0,
            ),
        )
        assert "256 requests" in lines[2][1]
        assert "4096 rows" in lines[2][1]
        assert lines[1][1] == f"serving m (llada): prompt and canvas up to 8192 tokens{ending}"


# ---- a log that cannot be written --------------------------------------------------------------


def test_a_full_disk_of_the_log_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's progress bars for loading weights write to the same full disk."""

    def load() -> int:
        return sum(tqdm(range(3)))

    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="No space left"):
            load()
        assert log_filter.drop_unwritable_output()(load)() == 3
        assert sys.stderr is full
        is_done = True
    assert is_done  # only closing the log fails


def test_a_log_that_can_be_written_has_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with log_filter.drop_unwritable_output():
        assert sum(tqdm(range(3))) == 3
    assert "3/3" in capsys.readouterr().err
    for name in ("load_model", "compile_or_warm_up_model"):
        assert hasattr(getattr(DiffusionWorker, name), "__wrapped__")
