# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py plans the memory of a checkpoint's configuration, without weights."""

import re
from pathlib import Path

import make_dummy_checkpoint
import plan_memory
import pytest

from tests.checkpoints import make_checkpoint
from tests.programs import ROOT


@pytest.mark.parametrize("family", ["llada", "dream", "moe"])
def test_plans_terms_and_refusals(
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    folder = make_checkpoint(tmp_path, family=family, seed=1)
    pool = ["--pool-gib", "0.01"]
    assert plan_memory.main([str(folder), "--tokens", "100", "10000", *pool, "--terms"]) == 0
    text = capsys.readouterr().out
    short, long = (line for line in text.splitlines() if not line.startswith(" "))
    assert short.startswith("T = 100: rows a chunk: keys-values 100, attend 100")
    assert long.startswith("T = 10000: ") and " KiB a token" in long
    for stage in ("resident", "keys-values", "attend", "feed-forward", "logits"):
        assert text.count(f"\n  {stage}: ") >= 2
    assert ", qkv " in text
    assert plan_memory.main([str(folder), "--tokens", "10000000", *pool]) == 1
    assert "prompt + gen_length: given 10000000; " in capsys.readouterr().out


@pytest.fixture(scope="module")
def llada_8b(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("shape") / "llada-8b")
    assert make_dummy_checkpoint.main(["--family", "llada", folder]) == 0
    return folder


@pytest.mark.parametrize(
    ("card", "quantization", "tokens", "requests", "cache", "fits"),
    [
        *((12, "int4", 4096, 8, "none", True), (12, "int4", 2048, 2, "dual", True)),
        *((12, "int4", 4096, 2, "dual", True), (12, "int4", 4096, 3, "dual", False)),
        *((24, None, 8192, 1, "dual", True), (24, "int4", 65536, 1, "none", True)),
    ],
)
def test_what_small_cards_have_room_for(
    card: int,
    quantization: str | None,
    tokens: int,
    requests: int,
    cache: str,
    fits: bool,
    llada_8b: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--card-gib", str(card), "--tokens", str(tokens), "--requests", str(requests)]
    given += ["--cache", cache] + (["--quantization", quantization] if quantization else [])
    assert plan_memory.main([llada_8b, *given]) == (0 if fits else 1)
    weights, plan = capsys.readouterr().out.splitlines()
    assert weights.startswith(f"weights {'5.37' if quantization else '14.93'} GiB, pool ")
    assert ("predicted peak" in plan) == fits


def table_of_models() -> dict[str, list[list[str]]]:
    """Return weights and GPUs of the table in docs/hardware.md, by the first model of a row."""
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^,|]+).*? \| [\d.]+ \| (.+) \| (.+) \|$", text, re.MULTILINE)
    return {name: [weights.split(", "), cards.split(", ")] for name, weights, cards in rows}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ("LLaDA-8B", ["--family", "llada"]),
        ("LLaDA-MoE-7B-A1B", ["--family", "llada-moe"]),
        ("LLaDA2.0-mini", ["--family", "llada2"]),
        ("SDAR-8B", ["--family", "sdar"]),
        ("Nemotron-Labs-Diffusion 3B", ["--family", "nemotron", "--size", "3b"]),
    ],
)
def test_the_documented_cards_have_room(
    row: str, shape: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, cards = table_of_models()[row]
    folder = str(tmp_path / "shape")
    assert make_dummy_checkpoint.main([*shape, folder]) == 0
    for size, card, quantization in zip(weights, cards, ("", "fp8", "int4"), strict=True):
        given = [folder, "--tokens", "4096", "--no-host", "--card-gib", card]
        given += ["--quantization", quantization] if quantization else []
        capsys.readouterr()
        assert plan_memory.main(given) == 0
        actual = re.match(r"weights ([\d.]+) GiB, pool ([\d.]+) GiB", capsys.readouterr().out)
        assert actual is not None
        assert actual[1] == size
        assert float(actual[2]) >= 1
