# SPDX-License-Identifier: Apache-2.0
"""Images, compose file, Prometheus and Grafana name existing things, and agree with each other."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metric_names import METRIC_NAME, UPSTREAMS, samples_of
from tests.programs import ROOT, add_program, output_of, run
from vllm.diffusion.metrics import METRICS

DOCKER = ROOT / "docs" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
DASHBOARD = ROOT / "docs" / "grafana" / "mosaic.json"


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return keyword and arguments of every instruction, after joining continued lines."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")
    ]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
class TestDockerfile:
    def test_it_starts_from_a_pinned_image_and_leaves_root(self, file: Path) -> None:
        actual = instructions(file)
        assert actual[0][0] == "FROM"
        tag = actual[0][1].rpartition(":")[2]
        assert tag not in ("", "latest")
        words = [word for word, _ in actual]
        assert words.count("USER") == 1
        assert words.index("USER") < words.index("ENTRYPOINT")
        assert dict(actual)["STOPSIGNAL"] == "SIGTERM"

    def test_what_it_copies_and_runs_exists(self, file: Path) -> None:
        ran: set[str] = set()
        for word, rest in instructions(file):
            if word == "COPY":
                *sources, _ = rest.split()
                assert all((ROOT / source).exists() for source in sources), rest
            if word in ("RUN", "ENTRYPOINT"):
                words = json.loads(rest) if rest[0] == "[" else shlex.split(rest)
                ran |= {w for w in words if w.startswith("scripts/")}
        assert "scripts/setup.sh" in ran  # like CI
        assert "scripts/setup.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
        for script in ran:
            assert (ROOT / script).is_file(), script
            assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), script

    def test_its_variables_are_documented(self, file: Path) -> None:
        document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
        names = {
            name
            for word, rest in instructions(file)
            if word == "ENV"
            for name in re.findall(r"(\w+)=", rest)
        }
        assert {"MOSAIC_DEVICE", "MODEL_DIR", "HOST", "PORT"} <= names
        assert not {name for name in names if f"`{name}`" not in document}


def test_there_is_an_image_for_each_kind_of_machine() -> None:
    assert [file.name for file in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


def test_the_image_takes_nothing_that_is_built_or_downloaded() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".venv", "models", ".git", "**/*.so"} <= set(ignored)


def test_git_ignores_what_is_made_here_symbolic_links_too(tmp_path: Path) -> None:
    output_of("git", "init", "--quiet", tmp_path)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    for name in (".venv", "models", "build", "results", "reports", "__pycache__"):
        (tmp_path / name).symlink_to(ROOT)
    (tmp_path / "context_length.csv").touch()
    status = ("git", "-C", tmp_path, "status", "--porcelain", "--untracked-files=all")
    assert output_of(*status) == "?? .gitignore\n"


def test_the_services_fit_together() -> None:
    services = load(DOCKER / "compose.yaml")["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists(), source
        for wanted in service.get("depends_on", []):
            assert wanted in services
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+", service["image"]), "pin the image"
    build = services["server"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    for image in ("cpu", "cuda"):
        dockerfile = build["dockerfile"].replace("${MOSAIC_IMAGE:-cpu}", image)
        assert (ROOT / dockerfile).is_file(), dockerfile
    assert load(DOCKER / "gpu.yaml")["services"].keys() <= services.keys()

    (job,) = load(DOCKER / "prometheus.yaml")["scrape_configs"]
    ((target,),) = [part["targets"] for part in job["static_configs"]]
    host, port = target.split(":")
    assert f"{port}:{port}" in services[host]["ports"][0]
    assert job["metrics_path"] == "/metrics"
    (rules,) = load(DOCKER / "prometheus.yaml")["rule_files"]
    assert f"./alerts.yaml:{rules}:ro" in services["prometheus"]["volumes"]

    (source,) = load(DOCKER / "grafana" / "datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load(DOCKER / "grafana" / "dashboards.yaml")["providers"]
    folder = provider["options"]["path"]
    assert f"../grafana:{folder}:ro" in services["grafana"]["volumes"]


# ---- the dashboard -----------------------------------------------------------------------------


def queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    actual = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    return actual + [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]


def test_the_dashboard_has_what_grafana_asks_for() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["title"]
    assert dashboard["uid"]
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells, panel["title"]
        cells |= covered
        assert panel["type"] == "row" or panel["description"]
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"


def test_every_query_uses_metrics_that_are_served_and_every_metric_is_shown() -> None:
    served = {sample for metric in METRICS for sample in samples_of(metric)} | UPSTREAMS
    parameters = {name for query in queries() for name in METRIC_NAME.findall(query)}
    assert parameters <= served
    for metric in METRICS:
        assert parameters & set(samples_of(metric)), f"{metric.name} is not on the dashboard"
    for query in queries():
        assert query.count("(") == query.count(")"), query
        assert query.count("{") == query.count("}"), query


# ---- examples that are checked, but do not run -------------------------------------------------

DEPLOY = ROOT / "docs" / "examples" / "deploy"


def test_kubernetes_asks_what_the_server_answers() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    (port,) = container["ports"]
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == env["PORT"] == str(port["containerPort"])
    assert annotations["prometheus.io/path"] == "/metrics"
    probes = {k: v["httpGet"]["path"] for k, v in container.items() if k.endswith("Probe")}
    assert probes == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in document for name in env)
    # This exceeds --shutdown-timeout of the script.
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30


def test_the_systemd_unit_starts_a_script_with_documented_variables() -> None:
    text = (DEPLOY / "mosaic.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=/opt/mosaic/(.+)$", text, re.MULTILINE)
    assert os.access(ROOT / start, os.X_OK)
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\b([A-Z]+(?:_[A-Z]+)*)=", text)) - {"VLLM_NO_USAGE_STATS"}
    assert {"MODEL_DIR", "HOST", "PORT", "VLLM_API_KEY"} <= names
    assert all(f"`{name}`" in document for name in names)
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > 30


def test_the_front_end_asks_the_route_of_the_script() -> None:
    services = load(DEPLOY / "open-webui.yaml")["services"]
    (front_end,) = services.values()
    assert front_end["environment"]["OPENAI_API_BASE_URL"] == "http://127.0.0.1:8901/v1"
    assert re.search(r":v?\d+\.\d+", front_end["image"]), "pin the image"


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({"chromium": "exit 1", "ccache": "exit 1"}, ""),
        ({"ccache": "exit 1"}, "no chromium: there is no apt-get"),
        ({}, "no chromium ccache: there is no apt-get"),
        ({"apt-get": "exit 1", "id": "echo 1000"}, "apt-get requires root"),
        ({"apt-get": "exit 1", "id": "echo 0"}, "apt-get update failed"),
        ({"apt-get": "case $* in *install*) exit 1; esac", "id": "echo 0"}, "install failed"),
    ],
)
def test_packages_that_cannot_be_installed_are_one_line(
    tmp_path: Path, programs: dict[str, str], message: str
) -> None:
    for name, script in {**programs, "timeout": 'shift; "$@"'}.items():
        add_program(tmp_path / name, f"#!/bin/sh\n{script}\n")
    done = run("/bin/bash", ROOT / ".ci" / "packages", env={"PATH": str(tmp_path)})
    output = done.stderr.replace("==> installing chromium ccache\n", "")
    assert done.returncode == 0
    assert output.count("\n") == (1 if message else 0)
    assert message in output


def test_alerts_use_metrics_that_are_served() -> None:
    served = {sample for metric in METRICS for sample in samples_of(metric)}
    (group,) = load(DOCKER / "alerts.yaml")["groups"]
    (job,) = load(DOCKER / "prometheus.yaml")["scrape_configs"]
    first, *others = group["rules"]
    assert first["expr"] == f'up{{job="{job["job_name"]}"}} == 0'
    for rule in others:
        used = set(METRIC_NAME.findall(rule["expr"]))
        assert used and used <= served, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
