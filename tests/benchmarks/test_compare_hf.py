# SPDX-License-Identifier: Apache-2.0
"""The comparison of the engine and the server with plain loops runs with tiny models."""

import json
from pathlib import Path

import pytest

from benchmarks import compare_hf, in_process, performance_tables
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_starts")

SMALL = [
    *("--prompt-length", "8", "--gen-length", "16", "--block-length", "8", "--steps", "8"),
    *("--dtype", "float32", "--rounds", "2"),
]


def test_every_system_is_measured_in_process(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family="moe", seed=3)
    arguments = ["--model", str(folder), "--in-process", "--clients", "1", "3", *SMALL]
    assert compare_hf.main([*arguments, "--output-dir", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "throughput.json").read_text())
    systems = [(row["system"], row["cache"], row["num_clients"]) for row in content["rows"]]
    ours = [("engine in process", cache, n) for cache in ("none", "dual") for n in (1, 3)]
    assert systems == [("plain loop", "none", 1), *ours]
    for row in content["rows"]:
        assert row["num_requests"] == 2 * row["num_clients"]
        assert row["num_tokens"] == 16 * row["num_requests"]
        assert row["num_forwards"] >= 8 * row["num_requests"]
        assert row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["seconds"])
        assert row["ms_per_forward"] > 0
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    lines = list(performance_tables.throughput(content))
    assert lines[0].startswith("### model (float32): prompt 8, canvas 16")
    assert sum(line.startswith("| engine in process |") for line in lines) == 4


@pytest.mark.parametrize(
    ("family", "length", "cache"),
    [("llada", 8, "none"), ("llada2", 9, "exact"), ("fast_dllm", 9, "exact")],
)
def test_plain_loops_and_the_engine_give_the_same_tokens(
    family: str, length: int, cache: str, tmp_path: Path
) -> None:
    """Block-causal families have their own plain loops."""
    folder = make_checkpoint(tmp_path / "model", family=family, seed=3)
    arguments = ["--model", str(folder), "--in-process", "--clients", "2", *SMALL]
    options = compare_hf.parse_arguments([*arguments, "--output-dir", str(tmp_path)])
    shape = compare_hf.Shape.of(json.loads((folder / "config.json").read_text()))
    prompts = [[in_process.random_prompt(length, 256, seed)] for seed in range(2)]
    with compare_hf.plain_loop(folder, shape, options) as send:
        plain = send(prompts, "none")
    with compare_hf.in_process_engine(folder, options) as send:
        ours = send(prompts, cache)
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in plain]
    if family == "llada":
        assert [answer.num_forwards for answer in ours] == [8, 8]
