# SPDX-License-Identifier: Apache-2.0
"""Documents only name existing paths of the repository and existing options of scripts."""

import re
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))  # pages of the site
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(file.relative_to(ROOT)) for file in PAGES),
)

# Folders that commands create. Documents name them and their contents.
GENERATED = (".venv", "models", "results", "build")

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"^\.?[\w-][\w.-]*(/[\w.-]+)*/?$")


def is_path(word: str) -> bool:
    """Return whether a word of code names a file or folder of this repository."""
    top = word.split("/")[0]
    if not PATH.match(word) or top in GENERATED:
        return False
    return ("/" in word and (ROOT / top).exists()) or Path(word).suffix in (".py", ".md", ".toml")


def named_paths(text: str) -> set[str]:
    """Return the paths in inline code, in links and in the commands of fenced blocks."""
    prose = FENCE.sub("", text)
    words = [word for span in CODE.findall(prose) for word in span.split()]
    words += [word for block in FENCE.findall(text) for word in block.split()]
    paths = {word.rstrip(".,;:") for word in words if is_path(word.rstrip(".,;:"))}
    return paths | {link for link in LINK.findall(prose) if "://" not in link}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_named_path_exists(document: str) -> None:
    file = ROOT / document
    paths = named_paths(file.read_text(encoding="utf-8"))
    # A tree of folders gives files relative to its headings.
    folders = [ROOT, file.parent, ROOT / "vllm", ROOT / "vllm" / "diffusion"]
    if document == "docs/proposals.md":  # it names files of upstream
        folders.append(Path(sysconfig.get_paths()["purelib"]))
    missing = sorted(p for p in paths if not any((folder / p).exists() for folder in folders))
    assert not missing, f"{document} names {missing}"


def test_the_test_sees_missing_paths() -> None:
    text = "See `scripts/nowhere.sh`, [this](docs/none.md) and\n```bash\nscripts/absent --x\n```\n"
    assert named_paths(text) == {"scripts/nowhere.sh", "docs/none.md", "scripts/absent"}


@pytest.mark.parametrize("family", ["llada", "dream", "llada_moe"])
def test_every_variable_of_the_server_scripts_is_documented(family: str) -> None:
    script = (ROOT / "scripts" / "serve.sh").read_text(encoding="utf-8")
    usage = script.split("<<END")[1].split("\nEND\n")[0]
    variables = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", usage)) | {f"{family.upper()}_MODEL_DIR"}
    assert len(variables) >= 8
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert not {name for name in variables if name not in document}


def test_one_table_has_every_variable_of_the_server() -> None:
    """Our variables are in `vllm.diffusion.core.envs`; others with such names are upstream's."""
    import vllm.envs

    from vllm.diffusion.core import envs

    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    table = document.split("## Environment variables")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    ours = {name for name in names if name.startswith(("VLLM_", "DLLM_"))}
    assert set(envs.VARIABLES) <= ours
    assert ours - set(envs.VARIABLES) <= set(vllm.envs.environment_variables)


def test_the_readme_is_short_and_every_document_has_a_place_on_the_site() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    first, *groups = site["nav"]
    entries = [entry for group in groups for pages in group.values() for entry in pages]
    places = [file for entry in (first, *entries) for file in entry.values()]
    assert sorted(places) == sorted(str(file.relative_to(ROOT / "docs")) for file in PAGES)


def test_links_of_the_site_can_be_seen_in_every_scheme() -> None:
    """Our colour of links must be set for each scheme, because the theme sets one for each scheme.

    The contrast is WCAG's ratio to the theme's backgrounds.
    """
    style = (ROOT / "docs" / "images" / "site.css").read_text(encoding="utf-8")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    papers = {"default": "ffffff", "slate": "1e2129"}
    system, *schemes = site["theme"]["palette"]
    assert system["media"] == "(prefers-color-scheme)"
    assert {palette["scheme"] for palette in schemes} == set(papers)
    for scheme, paper in papers.items():
        rule = rf'\[data-md-color-scheme="{scheme}"\] {{[^}}]*--md-typeset-a-color: #(\w{{6}})'
        actual = re.search(rule, style)
        assert actual is not None, scheme
        assert contrast(actual[1], paper) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours of six hexadecimal digits each."""

    def brightness(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4))
        red, green, blue = (
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(brightness, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_documents_link_to_each_other() -> None:
    """A document in inline code has no link on the site."""
    for file in PAGES:
        named = re.findall(r"`docs/[\w/]+\.md`", file.read_text(encoding="utf-8"))
        assert not named, f"{file.name} names {named}"


def test_pictures_of_algorithms_are_as_the_engine_decodes() -> None:
    from draw_algorithms import FOLDER, pictures

    drawn = pictures()
    assert set(FOLDER.glob("*.svg")) == set(drawn)
    document = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    for file, text in drawn.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name}: scripts/draw_algorithms.py"
        assert f"](images/algorithms/{file.name})" in document


# The file that runs a command of the documents, by the beginning of the command.
RUN_BY = {
    "scripts/setup.sh": ".ci/run",
    "scripts/test.sh": ".ci/run",
    "scripts/quickstart.sh": ".ci/run",
    "scripts/run_llada_server.sh": "tests/scripts/test_shell_scripts.py",
    "MAX_MODEL_LEN=": "tests/scripts/test_shell_scripts.py",
    "VLLM_SERVER_DEV_MODE=": "tests/server/test_adapter_trainers.py",
    "mkdir -p /tmp/updates": "tests/server/test_rollouts.py",
    ".venv/bin/python docs/examples/rl_tiny.py": "tests/server/test_rollouts.py",
    ".venv/bin/python scripts/replay_trajectory.py": "tests/engine/test_trajectories.py",
    "scripts/test_api_request.py": "tests/server/test_standard_fields.py",
    "curl": "tests/server/test_examples.py",
    "vllm bench serve": "tests/server/test_clients.py",
    "vllm-router": "tests/server/test_router.py",
    "lm_eval": "tests/server/test_lm_eval.py",
    "PYTHONPATH=": "tests/native/test_native_packages.py",
    ".venv/bin/python -m vllm.entrypoints.api_server": "tests/server/conftest.py",
    "python scripts/make_dummy_checkpoint.py": "tests/scripts/test_make_dummy_checkpoint.py",
    "python scripts/plan_memory.py": "tests/scripts/test_plan_memory.py",
    "python benchmarks/llada/run_benchmark.py": "tests/benchmarks/test_context_length_server.py",
    "python benchmarks/step_latency.py": "tests/benchmarks/test_step_latency.py",
    "python benchmarks/compare_hf.py": "tests/benchmarks/test_compare_hf.py",
    "python benchmarks/serve_throughput.py": "tests/benchmarks/test_serve_throughput.py",
    "python benchmarks/fragmentation.py": "tests/benchmarks/test_fragmentation.py",
    "benchmarks/quality_speed.py": "tests/benchmarks/test_quality_speed.py",
    "benchmarks/gsm8k.py": "tests/benchmarks/test_gsm8k.py",
}


def test_every_command_is_run_or_listed_as_not_run() -> None:
    """A small model may replace one that needs a GPU or released weights."""
    listed = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8").split("## Not run")[1]
    not_run = re.findall(r"^- `(.+?)`", listed, re.MULTILINE)
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            quoted = re.sub(r"'[^']*'", "''", block)  # bodies and programs may contain newlines
            for command in filter(None, quoted.splitlines()):
                assert command.startswith((*RUN_BY, *not_run)), f"{file.name}: {command}"
    for place in RUN_BY.values():
        assert (ROOT / place).is_file(), place
