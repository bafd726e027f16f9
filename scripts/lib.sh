# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Functions that the scripts share. Source this file, do not run it. It sets ROOT, VENV and PY,
# exports PYTHONPATH, and defines the set-up steps. Every failure prints one line on stderr and exits
# with a non-zero status.
#
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) also apply to uv.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
CPU_BUILDS=https://download.pytorch.org/whl/cpu # PyTorch's index of its builds without CUDA

say() { printf '==> %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# show_help FILE: print the comment block at the top of a script.
show_help() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 && !/SPDX/ { sub(/^# ?/, ""); print }' "$1"
}

# find_python: print the first interpreter that upstream vLLM supports, 3.11 to 3.14.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.11 python3.14; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 to 3.14 found (PYTHON=/path/to/python3 names one);" \
    "on Debian or Ubuntu: sudo apt-get install python3"
}

make_venv() {
  if [ -x "$PY" ] && "$PY" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python has no venv or pip; on Debian or Ubuntu: sudo apt-get install python3-venv"
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear "$VENV" || die "cannot create $VENV"
}

# device_kind: print cuda if nvidia-smi lists a GPU, else cpu. MOSAIC_DEVICE=cpu|cuda overrides it.
device_kind() {
  case "${MOSAIC_DEVICE:-}" in
    cpu | cuda) printf '%s\n' "$MOSAIC_DEVICE" ;;
    '')
      if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo cuda; else echo cpu; fi
      ;;
    *) die "MOSAIC_DEVICE: given '$MOSAIC_DEVICE'; wanted cpu or cuda" ;;
  esac
}

install_packages() {
  "$PY" "$ROOT/scripts/install_packages.py" "$@" ||
    die "installing $* failed (see the messages above)"
}

# install_once NAME INSTALLER FILE...: run INSTALLER, unless the stamp NAME in .venv holds the
# digest of FILE...
install_once() {
  local name=$1 installer=$2 stamp digest
  shift 2
  stamp=$VENV/.installed-$name
  digest=$(cat "$@" | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ]; then
    return
  fi
  say "installing the $name environment (the first time takes minutes)"
  "$installer"
  printf '%s\n' "$digest" >"$stamp"
}

# finds_cpu_build TORCH==VERSION [PIP OPTION...]: does pip find a CPU build of it within seconds?
finds_cpu_build() {
  local requirement=$1
  shift
  [[ $(timeout 15 "$PY" -m pip index versions torch --retries 0 --timeout 5 "$@" 2>/dev/null) == \
    *"${requirement#torch==}+cpu"* ]]
}

# install_cpu: prefer a CPU build that pip finds with the user's settings to one of PyTorch's index.
install_cpu() {
  local torch index=()
  torch=$(grep '^torch==' "$ROOT/requirements/cpu.txt")
  if ! finds_cpu_build "$torch"; then
    if finds_cpu_build "$torch" --index-url "$CPU_BUILDS"; then
      index=(--extra-index-url "$CPU_BUILDS")
    else
      say "no CPU build of $torch found ($CPU_BUILDS does not answer): installing" \
        "its CUDA build, about 2.7 GB to download, 6 GB in .venv"
    fi
  fi
  say "torch"
  install_packages -c "$ROOT/requirements/cpu.txt" "${index[@]}" "$torch"
  say "vllm and the packages that its server imports"
  install_packages --no-deps -r "$ROOT/requirements/cpu.txt"
}
install_cuda() { install_packages -r "$ROOT/requirements/cuda.txt"; }
install_build() { install_packages -r "$ROOT/requirements/build.txt"; }
install_test() { install_packages -r "$ROOT/requirements/test.txt"; }

# put_on_path: let .venv's programs find this repository from any folder, before upstream's vllm and
# after the folders of PYTHONPATH. The line has no absolute path, because .venv may move with the
# repository.
put_on_path() {
  local folder
  for folder in "$VENV"/lib/python3*/site-packages; do
    [ -d "$folder" ] || continue
    cat >"$folder/mosaic.pth" <<'PTH'
import os, sys; root = os.path.abspath(sitedir + "/../../../.."); root in sys.path or sys.path.insert(sys.path.index(sitedir), root)
PTH
  done
}

# setup [test|--all-gpus]...: make the virtual environment, install the packages for this kind of
# machine, and compile the native kernels. Without a GPU they are compiled only for the tests, with
# --all-gpus, or if NATIVE_CUDA_ARCHS is set.
setup() {
  local kind build=
  make_venv
  kind=$(device_kind)
  case " $* " in
    *' --all-gpus '*) export NATIVE_CUDA_ARCHS=${NATIVE_CUDA_ARCHS:-80 89 90a 100 120} ;;
  esac
  if ! find_nvcc >/dev/null; then # PyTorch operations run instead
    say "not compiled: the native packages, because nvcc was not found (set CUDA_HOME to the" \
      "toolkit); PyTorch replaces them, on a GPU slower and with more memory"
  elif [ "$kind" = cpu ] && [ $# = 0 ] && [ -z "${NATIVE_CUDA_ARCHS:-}" ]; then
    say "not compiled: the native packages, because there is no NVIDIA GPU; PyTorch replaces them" \
      "(scripts/setup.sh --all-gpus compiles them)"
  else
    command -v c++ >/dev/null || command -v g++ >/dev/null || die "nvcc found, but no C++" \
      "compiler; on Debian or Ubuntu: sudo apt-get install build-essential"
    install_once build install_build "$ROOT/requirements/build.txt"
    build_native_packages & # compile while packages are downloaded
    build=$!
  fi
  install_once "$kind" "install_$kind" "$ROOT/requirements/$kind.txt"
  case " $* " in *' test '*) install_once test install_test "$ROOT/requirements/test.txt" ;; esac
  put_on_path
  [ -z "$build" ] || wait "$build" || exit 1
}

# find_nvcc: print the nvcc that setup.py uses: of CUDA_HOME if set, else on PATH, else of
# /usr/local/cuda.
find_nvcc() {
  if [ -n "${CUDA_HOME:-}" ]; then
    command -v "$CUDA_HOME/bin/nvcc"
  else
    command -v nvcc || command -v /usr/local/cuda/bin/nvcc
  fi
}

# build_native_packages: compile the sources that changed.
build_native_packages() {
  say "compiling the native packages with $(find_nvcc)"
  (cd "$ROOT" && "$PY" setup.py -q build_ext --inplace) ||
    die "the native packages did not compile (the compiler's message is above)"
}

# make_tiny_model: train the embedded default model; a complete one is kept.
make_tiny_model() { "$PY" "$ROOT/scripts/make_tiny_model.py" || exit 1; }

free_port() {
  "$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# is_healthy URL: does the server's /health answer 200? Proxies are ignored.
is_healthy() {
  "$PY" - "$1/health" <<'PYTHON' 2>/dev/null
import requests, sys
http = requests.Session()
http.trust_env = False
http.get(sys.argv[1], timeout=5).raise_for_status()
PYTHON
}

# source_files PATTERN...: print the project's own files with these names, NUL-separated.
source_files() {
  local names=(-false) pattern
  for pattern in "$@"; do names+=(-o -name "$pattern"); done
  (cd "$ROOT" && find . \( -path ./.git -o -path ./.venv -o -path ./build -o -path ./models \
    -o -path ./results -o -path ./reports -o -name '.*_cache' \) -prune \
    -o -type f \( "${names[@]}" \) -print0 | sort -z)
}

# use_tools TOOL...: prefer the tools of .venv; exit with one line if a tool is missing.
use_tools() {
  local tool
  export PATH="$VENV/bin:$PATH"
  for tool in "$@"; do
    command -v "$tool" >/dev/null ||
      die "$tool not found: run scripts/test.sh once, or pip install -r requirements/test.txt"
  done
}
