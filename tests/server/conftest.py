# SPDX-License-Identifier: Apache-2.0
"""One server process for all tests of this folder, which check its health and its log."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.server.browser import CHROMIUM, Browser
from tests.server.client import Client
from tests.server.process import MODEL, MODEL_NAME, SERVER, ServerProcess, healthy


@pytest.fixture(scope="session")
def model_dir() -> Path:
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"no model in {MODEL}: scripts/make_tiny_model.py makes it", pytrace=False)
    return MODEL


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server in float32, so that answers do not depend on batch neighbours.

    Its argument `--enable-prefix-caching` has no effect on this family, and its log must say so.
    """
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--enable-prefix-caching", "--enable-scale-out"]
    process = ServerProcess(command, tmp_path_factory.mktemp("server") / "server.log")
    with healthy(process):
        yield process
        process.terminate()
        assert process.wait() == 0, process.log()
        assert process.group_is_empty(), "processes of the server are left"


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """Open one HTTP client for all tests, because a new one reads the system's certificates."""
    with server.client() as actual:
        yield actual


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start one browser for all tests."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    actual = Browser(tmp_path_factory.mktemp("browser"))
    yield actual
    actual.close()


@pytest.fixture
def client(server: ServerProcess, http: httpx.Client) -> Iterator[Client]:
    """Yield a client; then check that the server is healthy and has logged no traceback."""
    start = server.log_size()
    yield Client(http)
    assert http.get("/health").status_code == 200
    logged = server.log(start)
    assert "Traceback" not in logged, logged


@pytest.fixture
def openai(server: ServerProcess, client: Client) -> Iterator[OpenAI]:
    """Yield OpenAI's own client. `client` checks the server's health and log afterwards."""
    with OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as actual:
        yield actual
