# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: the environment of in-process engines, and the selection of tests.

On a machine with fewer GPUs, tests marked `gpu` or `multi_gpu` are deselected. Tests marked `model`
are skipped unless the environment names a checkpoint. `--require-gpu` only keeps the tests of one
GPU, and fails a run in which no GPU test ran, so that a job on a GPU machine cannot pass without
GPU tests.

durations.json holds the seconds of each slow test function. These functions get the marker `slow`,
and modules run in the order of their total seconds, longest first. `--write-durations` in a run of
all tests updates the file.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from tqdm.std import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# These are set before vLLM is imported, because it reads most of them only once.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process starts in under a second
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # a second rank need not import modules again
    "OMP_NUM_THREADS": "1",  # with tiny models, more threads than free cores wait for each other
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

# Collection is disabled until all tests are imported, because it would take a sixth of that time.
gc.disable()

# The lock of progress bars is shared with every process that is forked later. A process that is
# killed while it draws, or a thread that draws during a fork, would hold that lock forever.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

# Modules that import a requirement of tests alone, on a machine with only a server's requirements.
WANTED = {"server/test_fuzz.py": "schemathesis", "test_fleet_examples.py": "kubernetes_validate"}
WANTED["server/test_langchain_decisions.py"] = "langchain_openai"
collect_ignore = [name for name, wanted in WANTED.items() if find_spec(wanted) is None]

GPU_MARKERS = ("gpu", "multi_gpu")
INTERPRETER_TESTS = "tests/native/test_interpreter.py"
DURATIONS = Path(__file__).with_name("durations.json")
MIN_SLOW_S = 0.5  # seconds of all cases of a test function together
# Each GPU test of these folders starts an engine or a server. That takes up to a minute, about as
# long as ENGINE_CASES cases of a test of a kernel.
ENGINE_FOLDERS = ("tests/engine/", "tests/server/")
ENGINE_CASES = 100
MODEL_VARIABLES = (
    *("MODEL_DIR", "LLADA_MODEL_DIR", "DREAM_MODEL_DIR", "LLADA_MOE_MODEL_DIR"),
    *("LLADA2_MODEL_DIR", "SDAR_MODEL_DIR", "FAST_DLLM_MODEL_DIR"),
    "MOSAIC_MODEL_ROOT",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="keep the tests of one GPU, and fail when none ran",
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write the seconds of slow tests, by which later runs sort modules and mark tests",
    )
    parser.addoption(
        "--references",
        action="store_true",
        help="compute a sample of the written runs and interpret kernels though no source changed",
    )
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="compute and write the runs of references that the tests read, and record that the"
        " tests of interpreted kernels passed",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_xdist_worker = hasattr(config, "workerinput")
    if config.getoption("--write-durations") and not is_xdist_worker:
        config.pluginmanager.register(DurationWriter())
    config.pluginmanager.register(GpuTestCounter(required=config.getoption("--require-gpu")))
    if config.getoption("--write-golden"):
        is_partial = any(map(config.getoption, ("keyword", "markexpr"))) or "::" in str(config.args)
        config.pluginmanager.register(GoldenWriter(runs_whole_modules=not is_partial))
    if config.getoption("numprocesses", None):  # the controller of pytest-xdist
        from tests.server import fork_server

        fork_server.share()


def pytest_itemcollected(item: pytest.Item) -> None:
    if function_of(item.nodeid) in read_durations():
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips_references = not any(map(config.getoption, ("--references", "--write-golden")))
    is_for_gpu = config.getoption("--require-gpu")
    deselect_gpu_tests(config, items, max(count_gpus(), int(is_for_gpu)))
    if not is_for_gpu:
        sort_by_duration(items)
    elif hasattr(config, "workerinput"):  # a worker of pytest-xdist
        sort_longest_first(items)
    for item in items:
        if skips_references and item.nodeid.startswith("tests/golden/"):
            item.add_marker(pytest.mark.skipif(are_golden(), reason="as the runs were written"))
        if skips_references and item.nodeid.startswith(INTERPRETER_TESTS):
            reason = "the kernels are as they were when these tests passed"
            item.add_marker(pytest.mark.skipif(is_interpreted(), reason=reason))
        is_of_model = item.get_closest_marker("model") is not None
        if is_of_model and not any(os.environ.get(name) for name in MODEL_VARIABLES):
            item.add_marker(pytest.mark.skip(reason=f"needs one of {', '.join(MODEL_VARIABLES)}"))


def deselect_gpu_tests(config: pytest.Config, items: list[pytest.Item], num_gpus: int) -> None:
    """Deselect the tests that need more than `num_gpus` GPUs."""
    if left_out := [item for item in items if num_gpus_of(item) > num_gpus]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if num_gpus_of(item) <= num_gpus]


def num_gpus_of(item: pytest.Item) -> int:
    """Return the number of GPUs that the test needs."""
    if several := item.get_closest_marker("multi_gpu"):
        return int(several.args[0])
    return int(item.get_closest_marker("gpu") is not None)


def sort_by_duration(items: list[pytest.Item]) -> None:
    """Put the longest modules first; the tests of a module keep their order."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for function, duration in read_durations().items():
        seconds[module_of(function)] += duration
    items.sort(key=lambda item: -seconds[module_of(item.nodeid)])


def module_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def function_of(nodeid: str) -> str:
    """Return the node without its parameters."""
    return nodeid.split("[")[0]


@cache
def read_durations() -> dict[str, float]:
    """Return the seconds of each slow test function by its node."""
    return dict(json.loads(DURATIONS.read_text(encoding="utf-8")))


class DurationWriter:
    """Writes durations.json after a run of all tests."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        slow = {name: round(s, 1) for name, s in self.seconds.items() if s >= MIN_SLOW_S}
        DURATIONS.write_text(json.dumps(slow, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, and enable it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(
    params=[pytest.param(count, marks=pytest.mark.multi_gpu(count)) for count in (2, 4)]
)
def num_gpus(request: pytest.FixtureRequest) -> int:
    """Return a number of GPUs, one for each rank."""
    return int(request.param)


@pytest.fixture
def quick_starts() -> Iterator[None]:
    """Make engines that a test starts through other code start as fast as those of the harness.

    Each start collects garbage several times, which takes a second each in this process with its
    many modules. On a GPU, a collection also frees memory and therefore remains enabled.
    """
    from tests.engine.harness import freeze_imports, small_pool

    freeze_imports()
    collections = ("freeze", "unfreeze") if count_gpus() else ("freeze", "unfreeze", "collect")
    with ExitStack() as stack:
        for name in collections:
            stack.enter_context(mock.patch.object(gc, name))
        stack.enter_context(mock.patch.dict(os.environ, small_pool()))
        yield


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--require-gpu`, return a scheduler that keeps the tests of a unit in one process."""
    if not config.getoption("--require-gpu"):
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GpuScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return GpuScheduling(config, log)


def unit_of(nodeid: str) -> str:
    """Return the name of the group of tests that one process runs in sequence.

    A group has all cases of a test, because they share compiled kernels. A case that starts an
    engine or a server is its own group.
    """
    return nodeid if nodeid.startswith(ENGINE_FOLDERS) else function_of(nodeid)


def sort_longest_first(items: list[Any]) -> None:
    """Sort tests by the length of their units, so that all processes end at about the same time."""
    num_cases = Counter(unit_of(item.nodeid) for item in items)

    def length(item: Any) -> int:
        is_of_engine = item.nodeid.startswith(ENGINE_FOLDERS)
        return ENGINE_CASES if is_of_engine else num_cases[unit_of(item.nodeid)]

    items.sort(key=length, reverse=True)


@cache
def are_golden() -> bool:
    """Return whether the references are unchanged since their runs were recorded."""
    from tests import golden

    return golden.is_up_to_date()


@cache
def is_interpreted() -> bool:
    """Return whether the code is unchanged since the tests of the interpreter passed."""
    from tests import interpreted

    return interpreted.is_up_to_date()


class GoldenWriter:
    """Writes the runs of the references, and a digest after the interpreter's tests have passed."""

    def __init__(self, *, runs_whole_modules: bool) -> None:
        self.runs_whole_modules = runs_whole_modules
        self.has_interpreted = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.nodeid.startswith(INTERPRETER_TESTS):
            self.has_interpreted = True

    def pytest_sessionstart(self) -> None:
        from tests import golden

        golden.STORE.writes = True

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        from tests import golden

        golden.write()
        if self.has_interpreted and self.runs_whole_modules and exitstatus == pytest.ExitCode.OK:
            from tests import interpreted

            interpreted.write_digest()


@cache
def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class GpuTestCounter:
    """Counts the GPU tests that passed or failed."""

    def __init__(self, *, required: bool) -> None:
        self.required = required
        self.num_run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_gpu_test = any(name in report.keywords for name in GPU_MARKERS)
        if is_gpu_test and report.when == "call" and not report.skipped:
            self.num_run += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.required and self.num_run == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.required and self.num_run == 0:
            terminalreporter.write_line("--require-gpu: no GPU test ran", red=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a case of `tests.checkpoints.CASES` at its first use."""
    from tests.checkpoints import make_case

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_case(tmp_path_factory.mktemp("checkpoints") / name, name)
        return made[name]

    return get


@pytest.fixture
def with_upstreams_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure upstream's own models as an installation that can run them."""
    from vllm.diffusion.process.platform import DiffusionCpuPlatform

    accepts = staticmethod(lambda config: None)
    monkeypatch.setattr(DiffusionCpuPlatform, "check_and_update_config", accepts)


@pytest.fixture
def cublas_workspace() -> None:
    """Give cuBLAS its usual workspace, which batch-invariant engines take away."""
    from vllm.diffusion import ops

    ops.allow_workspace(True)
