# SPDX-License-Identifier: Apache-2.0
"""Examples of several servers are valid for their programs, and agree with each other."""

import re
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from supervisor.options import ServerOptions
from vllm_router.launch_router import parse_router_args

from tests.programs import ROOT, run

DEPLOY = ROOT / "docs" / "examples" / "deploy"
MANIFESTS = ("kubernetes.yaml", "kubernetes-router.yaml")
UNITS = ("mosaic.service", "mosaic@.service", "mosaic-router.service")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def supervised() -> dict[str, list[Any]]:
    options = ServerOptions()
    options.realize(["--configuration", str(DEPLOY / "supervisord.conf")])
    return {group.name: group.process_configs for group in options.process_group_configs}


def router_words(name: str) -> list[str]:
    """Return the command line of an example's router."""
    if name == "supervisord.conf":
        (router,) = supervised()["router"]
        return shlex.split(router.command)
    if name == "mosaic-router.service":
        text = (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", " ")
        (command,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
        return shlex.split(command)
    if name == "fleet.yaml":
        return ["vllm-router", *documents(name)[0]["services"]["router"]["command"]]
    (deployment,) = [d for d in documents(name) if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def router_of(name: str) -> Namespace:
    program, *words = router_words(name)
    assert program.endswith("vllm-router")
    actual: Namespace = parse_router_args(words)
    return actual


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schema(name: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize(
    "name", ["supervisord.conf", "mosaic-router.service", "fleet.yaml", "kubernetes-router.yaml"]
)
def test_every_router_asks_ready_and_retries_until_it_has_asked(name: str) -> None:
    router = router_of(name)
    assert router.health_check_endpoint == "/ready"
    waits = [
        router.retry_initial_backoff_ms * router.retry_backoff_multiplier**attempt
        for attempt in range(router.retry_max_retries - 1)
    ]
    assert sum(waits) > 1000 * router.health_check_interval_secs * router.health_failure_threshold


def test_routers_know_the_servers() -> None:
    programs = supervised()
    ports = [process.environment["PORT"] for process in programs["server"]]
    assert len(ports) == len(set(ports)) == 4
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    assert router_of("supervisord.conf").worker_urls == urls
    # The servers are mosaic@0 to mosaic@3.
    assert router_of("mosaic-router.service").worker_urls == urls
    unit = (DEPLOY / "mosaic@.service").read_text(encoding="utf-8")
    assert [f"PORT={port[:-1]}%i" in unit for port in ports] == [True] * 4

    services = documents("fleet.yaml")[0]["services"]
    names = [name for name in services if name != "router"]
    assert router_of("fleet.yaml").worker_urls == [f"http://{name}:8000" for name in names]

    pods = documents("kubernetes.yaml")[0]["spec"]["template"]
    actual = router_of("kubernetes-router.yaml")
    assert actual.selector == pods["metadata"]["labels"]
    (port,) = pods["spec"]["containers"][0]["ports"]
    assert actual.service_discovery_port == port["containerPort"]


def test_what_ends_is_started_again() -> None:
    for processes in supervised().values():
        assert all(process.autorestart is not False for process in processes)
    for name in UNITS:
        assert "\nRestart=always\n" in (DEPLOY / name).read_text(encoding="utf-8")
    services = documents("fleet.yaml")[0]["services"]
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_the_units(name: str, tmp_path: Path) -> None:
    file = tmp_path / name.replace("@", "@0")
    text = (DEPLOY / name).read_text(encoding="utf-8")
    file.write_text(text.replace("/opt/mosaic", str(ROOT)), encoding="utf-8")
    verified = run("systemd-analyze", "verify", file)
    assert (verified.returncode, verified.stderr) == (0, "")
