# SPDX-License-Identifier: Apache-2.0
"""Properties that all native packages have in common: imports, names, and the build."""

import ast
import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.programs import ROOT, add_program, run, run_python
from vllm.diffusion.ops.build_stamp import stamp_of

NATIVE_PACKAGES = ["flash_sample", "vllm_add_llada", "vmm_allocator", "gather_gemm"]
ON_PATH = ["flash_sample", "vmm_allocator", "vllm_add_llada/cuda_kernels"]  # folders on the path
EXTENSIONS = {
    "flash_sample": "flash_sample._flash_sample",
    "vllm_add_llada": "vllm_add_llada.cuda_kernels.fused_ops._fused_ops",
    "vmm_allocator": "vmm_allocator._vmm_allocator",
}
IMPORTS = """
import sys, torch
import flash_sample, gather_gemm, vmm_allocator
from flash_sample import entropy, entropy_witht, low_confidence
from vllm_add_llada.cuda_kernels import fused_ops
assert "vllm" not in sys.modules
"""


def sources(package):
    return [path for path in (ROOT / package).rglob("*.py") if path.name != "setup.py"]


def test_packages_import_with_their_folders_first_on_the_path():
    paths = [*(str(ROOT / folder) for folder in ON_PATH), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    program = IMPORTS + "import fused_ops"
    result = run_python("-W", "error::UserWarning", "-c", program, env=environment)
    assert result.returncode == 0, result.stderr


DOCUMENT = ROOT / "docs" / "troubleshooting.md"


def documented_import_check():
    blocks = re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    (check,) = [block for block in blocks if "import vmm_allocator" in block]
    assert ".venv/bin/python" in check
    return check.replace(".venv/bin/python", shlex.quote(sys.executable))


@pytest.mark.parametrize("is_fresh", [False, True])
def test_the_documented_import_check(is_fresh, tmp_path):
    """The check works in this checkout, and in one where nothing is compiled."""
    folder = ROOT
    if is_fresh:
        folder = tmp_path
        for package in NATIVE_PACKAGES:
            ignore = shutil.ignore_patterns("*.so")
            shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    result = run("bash", "-c", documented_import_check(), cwd=folder)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "flash_sample ok",
        "fused_ops ok",
        "vmm_allocator ok",
    ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for line, extension in zip(lines, EXTENSIONS.values(), strict=True):
        is_there = (folder / (extension.replace(".", "/") + suffix)).exists()
        assert line.endswith(f"compiled: {is_there}")


@pytest.mark.parametrize("package", NATIVE_PACKAGES)
def test_a_package_imports_nothing_of_ours_but_itself(package):
    allowed = {*sys.stdlib_module_names, "torch"}
    if package == "gather_gemm":
        allowed.add("triton")
    assert sources(package)
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module]
            else:
                continue
            foreign = [name for name in names if name.split(".")[0] not in allowed]
            assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize("package", NATIVE_PACKAGES)
def test_no_name_in_a_package_shadows_a_module(package):
    installed = set(importlib.metadata.packages_distributions()) - set(NATIVE_PACKAGES)
    taken = installed | set(sys.stdlib_module_names)
    for path in (ROOT / package).rglob("*"):
        if "__pycache__" in path.parts or path.parent.name == "__pycache__":
            continue
        importable = path.is_dir() or path.suffix in (".py", ".so")
        if importable and path != ROOT / package:
            assert path.name.split(".")[0] not in taken, f"{path.relative_to(ROOT)} shadows it"


@pytest.mark.parametrize("package", NATIVE_PACKAGES)
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("package", ["flash_sample", "vllm_add_llada"])
def test_launches_name_what_the_module_takes(package):
    """The first line of a compiled function's documentation has its keywords."""
    try:
        module = importlib.import_module(EXTENSIONS[package])
    except ModuleNotFoundError:
        pytest.skip(f"{package} is not built")
    launched = {}
    for path in sources(package):
        for call in ast.walk(ast.parse(path.read_text())):
            named = [call.func, *call.args] if isinstance(call, ast.Call) else []
            for function in named:
                if re.fullmatch(r"_?native\.[a-z_]+", ast.unparse(function)):
                    launched.setdefault(function.attr, []).append(call)
    functions = {name for name, value in vars(module).items() if callable(value)}
    assert set(launched) == functions
    for name, calls in launched.items():
        taken = set(re.findall(r"(\w+): ", getattr(module, name).__doc__.splitlines()[0]))
        for call in calls:
            given = {keyword.arg for keyword in call.keywords}
            is_whole = None not in given  # the call has no **
            given = (given | {"device", "stream"}) - {None}
            assert given == taken if is_whole else given <= taken, name


def run_setup(folder, **environment):
    command = ("setup.py", "-q", "build_ext", "--inplace")
    return run_python(*command, cwd=ROOT / folder, env=os.environ | environment)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "source",
    [path for path in sorted(ROOT.glob("vllm_add_llada/**/*.cu")) if "SM90" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_code_for_one_target_leaves_no_warnings_on_others(source, tmp_path):
    """Code that a target omits must leave no unused names behind."""
    flags = ["-std=c++17", "-Werror=all-warnings", f"-I{ROOT}", "-arch=compute_80", "-ptx"]
    result = run("nvcc", *flags, source, "-o", tmp_path / "ptx")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", [".", "vllm_add_llada/cuda_kernels"])
def test_missing_compiler_is_one_line(folder, tmp_path):
    pytest.importorskip("setuptools")
    result = run_setup(folder, CUDA_HOME=str(tmp_path))
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]  # setuptools may print warnings first
    assert "nvcc not found" in message and "CUDA_HOME" in message
    assert result.stderr.count("nvcc") == 1 and "Traceback" not in result.stderr


def test_packages_can_be_left_out(tmp_path):
    pytest.importorskip("setuptools")
    switches = {f"BUILD_{package.upper()}": "0" for package in EXTENSIONS}
    assert run_setup(".", CUDA_HOME=str(tmp_path), **switches).returncode == 0
    one_left = run_setup(".", CUDA_HOME=str(tmp_path), **(switches | {"BUILD_VMM_ALLOCATOR": "1"}))
    assert one_left.returncode != 0
    assert one_left.stderr.strip().splitlines()[-1].startswith("vmm_allocator: nvcc not found")


STAMP = "vllm/diffusion/ops/build_stamp.py"

# This replaces nvcc: it records its arguments and "compiles" by copying.
COMPILER = """
import os, pathlib, re, sys
words = sys.argv[1:]
if words == ["--list-gpu-arch"]:
    sys.exit(print("compute_80 compute_90"))
output = words[words.index("-o") + 1]
inputs = [word for word in words if word.endswith((".cpp", ".cu", ".o")) and word != output]
log = open(os.environ["LOG"], "a")
if "-shared" in words:
    print("link", file=log)
    pathlib.Path(output).write_text("".join(pathlib.Path(path).read_text() for path in inputs))
    sys.exit()
source = pathlib.Path(inputs[0])
print(source.name, file=log)
text = source.read_text()
if "an error" in text:
    sys.exit(f"{source}:1: an error")
pathlib.Path(output).write_text(text)
files = [source] + [source.parent / name for name in re.findall('#include "(.*)"', text)]
made, *needed = [str(path).replace(" ", "\\\\ ") for path in (output, *files)]
pathlib.Path(words[words.index("-MF") + 1]).write_text(f"{made}: {' '.join(needed)}")
"""


@pytest.fixture
def checkout(tmp_path):
    """Make a package of two sources and a header; `build()` returns the files it compiled."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    if not (Path(sys.executable).with_name("ninja").exists() or shutil.which("ninja")):
        pytest.skip("ninja is not installed")
    root = tmp_path / "a checkout"
    package = root / "vmm_allocator"
    package.mkdir(parents=True)
    (package / "arena.h").write_text("// 1\n")
    (package / "arena.cpp").write_text('#include "arena.h"\n')
    (package / "driver.cpp").write_text("// a source without a header\n")
    (root / "vllm/diffusion/ops").mkdir(parents=True)
    for name in ("setup.py", "vmm_allocator/setup.py", STAMP):
        shutil.copy(ROOT / name, root / name)
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    add_program(compiler, f"#!{sys.executable}\n{COMPILER}")
    log = tmp_path / "log"
    environment = {"CUDA_HOME": str(tmp_path / "cuda"), "LOG": str(log)}
    environment |= {"BUILD_FLASH_SAMPLE": "0", "BUILD_VLLM_ADD_LLADA": "0"}
    environment |= {"CCACHE_DISABLE": "1"}  # ccache would call the compiler more often

    def build(folder=".", **changes):
        log.write_text("")
        result = run_setup(root / folder, **environment, **changes)
        return result, sorted(log.read_text().split())

    return root, build


def module_of(root):
    (module,) = (root / "vmm_allocator").glob("*.so")
    return module


@pytest.mark.parametrize("folder", [".", "vmm_allocator"])
def test_only_what_is_out_of_date_is_made_again(checkout, folder):
    root, build = checkout
    result, made = build(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert made == ["arena.cpp", "driver.cpp", "link"]
    assert build(folder)[1] == []
    (root / "vmm_allocator" / "arena.h").write_text("// 2\n")
    assert build(folder)[1] == ["arena.cpp", "link"]  # only files that include the header
    assert build(folder, NATIVE_CUDA_ARCHS="90")[1] == []  # the variable only affects device code
    (root / "vmm_allocator" / "driver.cpp").write_text("// changed\n")
    assert build(folder)[1] == ["driver.cpp", "link"]
    assert "// changed" in module_of(root).read_text()
    module_of(root).unlink()
    assert build(folder)[1] == [] and module_of(root).exists()
    left = {path.name for path in (root / "vmm_allocator").iterdir()} - {"__pycache__"}
    assert left == {"arena.h", "arena.cpp", "driver.cpp", "setup.py", module_of(root).name}


def test_bindings_have_the_stamp_of_their_interface(checkout):
    root, build = checkout
    (root / "vmm_allocator" / "bindings.cpp").write_text("// bindings\n")
    stamps = []
    for text in ("// 1\n", "// 2\n"):
        (root / "vmm_allocator" / "arena.h").write_text(text)
        assert "bindings.cpp" in build()[1]
        (file,) = (root / "build" / "native").rglob("build.ninja")
        stamps += map(int, re.findall(r"-DBUILD_STAMP=(\d+)", file.read_text()))
        assert stamps[-1] == stamp_of(root, "vmm_allocator")
    assert len(set(stamps)) == 2
    (root / "vmm_allocator" / "driver.cpp").write_text("// changed\n")
    assert build()[1] == ["driver.cpp", "link"]
    (root / "vmm_allocator" / "bindings.cpp").unlink()
    assert stamp_of(root, "vmm_allocator") is None  # a wheel has no sources


@pytest.mark.parametrize(
    ("cards", "targets"),
    [
        ("9.0\n9.0\n", ["90a"]),
        ("8.6\n", ["80"]),
        ("8.9\n", ["80", "90a"]),  # this compiler does not support 8.9
        ("13.7\n", ["80", "90a"]),
        ("", ["80", "90a"]),
    ],
)
def test_the_targets_are_those_of_the_cards_at_hand(checkout, tmp_path, cards, targets):
    root, build = checkout
    smi = tmp_path / "nvidia-smi"
    add_program(smi, f"#!/bin/sh\nprintf '{cards}'\n")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NATIVE_CUDA_ARCHS": ""}
    (root / "vmm_allocator" / "kernel.cu").write_text("// a kernel\n")
    assert build(**environment)[0].returncode == 0
    (file,) = root.glob("build/native/*/build.ninja")
    assert re.findall(r"code=sm_(\w+)", file.read_text()) == targets


def test_a_module_in_use_is_not_overwritten(checkout):
    root, build = checkout
    build()
    module = module_of(root)
    with module.open() as used:
        before = used.read()
        (root / "vmm_allocator" / "driver.cpp").write_text("// changed\n")
        build()
        used.seek(0)
        assert used.read() == before != module.read_text()


def test_a_failed_build_shows_the_compilers_words(checkout):
    root, build = checkout
    source = root / "vmm_allocator" / "driver.cpp"
    source.write_text("an error\n")
    result, _ = build()
    assert result.returncode != 0
    assert f"{source.relative_to(root)}:1: an error" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "failed" in line]
    assert "the compiler's messages" in line and "Traceback" not in result.stderr
