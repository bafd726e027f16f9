# SPDX-License-Identifier: Apache-2.0
"""The page at `/docs`: its examples work, also with an API key, and it loads no foreign address."""

import contextlib
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from tests.programs import wait_for
from tests.server.browser import Browser
from tests.server.client import Client
from tests.server.process import PATIENCE_S, ServerProcess
from vllm.diffusion import __version__
from vllm.diffusion.api.documentation import offline_docs as documentation
from vllm.diffusion.api.documentation.examples import EXAMPLES, shown
from vllm.diffusion.api.server import gate

KEY = "a key"
ROUTE = "/v1/systemone"


@pytest.mark.parametrize("route", EXAMPLES)
def test_every_example_is_a_request_that_works(client: Client, route: str) -> None:
    document = client.http.get("/openapi.json").json()
    assert document["info"] == {"title": "Mosaic", "version": __version__}
    assert "security" not in document
    content = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    offered = {name: example["value"] for name, example in content["examples"].items()}
    assert offered == EXAMPLES[route]
    for name, body in offered.items():
        answer = client.http.post(route, json=body)
        assert answer.status_code == 200, (name, answer.text)
        assert '"error"' not in answer.text, name


def test_routes_are_grouped_by_purpose(client: Client) -> None:
    """Our routes come first, and each route has a description."""
    for _ in range(2):
        document = client.http.get("/openapi.json").json()
        assert [tag["name"] for tag in document["tags"]] == ["Ask", "Score", "Watch", "vLLM"]
        operations = [o for path in document["paths"].values() for o in path.values()]
        tags = [tag for operation in operations for tag in operation["tags"]]
        assert tags == sorted(tags, key=["Ask", "Score", "Watch", "vLLM"].index)
    named_by_function = [o["summary"] for o in operations if o["summary"].istitle()]
    assert not named_by_function
    of_generate = document["paths"]["/generate"]["post"]
    assert of_generate["summary"] == "Denoise one or more canvases, with every diffusion parameter"


def test_what_loads_from_elsewhere_is_gone(client: Client) -> None:
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/routes.py"):
        assert client.http.get(path).status_code == 404, path


def test_a_server_may_document_nothing() -> None:
    app = FastAPI(openapi_url=None)
    routes = len(app.routes)
    documentation.install(app, has_keys=True)
    assert len(app.routes) == routes


# ---- in a browser ------------------------------------------------------------------------------


def send_the_example(browser: Browser, url: str, key: str = "") -> str:
    """Send the example of a route on the page, and return the text that shows the answer."""
    browser.show()
    browser.errors.clear()
    browser.requested.clear()
    browser.open(f"{url}/docs")
    browser.wait_for("document.querySelector('.opblock')")
    if key:
        press(browser, "document.querySelector('.btn.authorize')")
        browser.wait_for("document.querySelector('.auth-container input')")
        browser.run("document.querySelector('.auth-container input').focus()")
        browser.type(key)
        press(browser, "document.querySelector('.auth-btn-wrapper .authorize')")
        press(browser, "document.querySelector('.btn-done')")
    block = f"document.querySelector('[data-path=\"{ROUTE}\"]').closest('.opblock')"
    press(browser, f"{block}.querySelector('.opblock-summary-control')")
    for button in ("try-out__btn", "execute"):
        press(browser, f"{block}.querySelector('.{button}')")
    answer = f"{block}.querySelector('.live-responses-table .response')"
    browser.wait_for(answer)
    assert browser.errors == []
    assert all(parameters.startswith((f"{url}/", "data:")) for parameters in browser.requested)
    actual: str = browser.run(f"{answer}.innerText")
    return actual


def press(browser: Browser, button: str) -> None:
    browser.wait_for(button)
    browser.run(f"{button}.click()")


def test_an_example_is_sent_from_the_page(browser: Browser, server: ServerProcess) -> None:
    answer = send_the_example(browser, server.url)
    assert answer.startswith("200")
    assert "structured_decision" in answer


class Leaving:
    """The part of `Lifecycle` that the gate uses."""

    refusal = None

    def open_request(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def guarded() -> Iterator[str]:
    """Yield the address of an application that requires a key and returns what it received."""
    app = FastAPI()

    @app.post(ROUTE, openapi_extra=shown(ROUTE))
    async def answer(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        return {"key": request.headers["authorization"], "asked": list(body)}

    args = Namespace(
        api_key=[KEY],
        allowed_origins=[],
        disable_access_log_for_endpoints="",
        disable_uvicorn_access_log=True,
    )
    gate.install(app, Leaving(), args)  # type: ignore[arg-type]
    documentation.install(app, has_keys=bool(gate.keys_of(args)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(PATIENCE_S)


def test_the_page_takes_the_key_and_sends_it(browser: Browser, guarded: str) -> None:
    answer = send_the_example(browser, guarded, KEY)
    assert answer.startswith("200")
    assert f'"key": "Bearer {KEY}"' in answer
    assert '"questions"' in answer
