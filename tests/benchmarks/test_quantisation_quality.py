# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quantisation_quality.py: its measures, and a run with a tiny model."""

import json
from pathlib import Path

import pytest
from tiny_model.tokenizer import load_tokenizer

from benchmarks import needle_model, quantisation_quality
from benchmarks.quantisation_quality import Trace, equal_share, rank_correlation
from tests.checkpoints import make_checkpoint


def test_orders_are_compared_by_rank() -> None:
    assert rank_correlation([0, 1, 2, 3], [0, 1, 2, 3]) == 1
    assert rank_correlation([0, 1, 2, 3], [3, 2, 1, 0]) == -1
    assert rank_correlation([0, 1, 2], [0, 2, 1]) == pytest.approx(0.5)
    first, second = Trace(steps=[0, 1, 2, 3]), Trace(steps=[0, 2, 1, 3])
    assert equal_share([first, first], [first, second]) == 0.75


def test_a_run_tells_plain_from_quantised_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family="llada", seed=5)
    facts = [{"question": f"What is {number}?", "answer": "nothing"} for number in range(2)]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    arguments = ["--models", str(folder), "--facts", str(tmp_path / "facts.jsonl")]
    arguments += ["--gen-length", "8", "--block-length", "4", "--quantization", "int4"]
    arguments += ["--dtype", "float32", "--output-dir", str(tmp_path)]
    arguments += ["--attention", "model", "fp8"]
    assert quantisation_quality.main(arguments) == 0
    rows = json.loads((tmp_path / "quantisation_quality.json").read_text())["rows"]
    plain, fp8, int4, _ = rows
    assert (plain["attention"], fp8["attention"]) == ("model", "fp8")
    assert fp8["quantization"] == "plain" and fp8["top_1"] <= 1 and fp8["kl"] > 0
    assert plain["quantization"] == "plain" and int4["quantization"] == "int4"
    assert (plain["top_1"], plain["kl"], plain["order"], plain["equal_steps"]) == (1, 0, 1, 1)
    assert int4["top_1"] <= 1 and int4["kl"] > 0
    assert int4["weight_bytes"] < 0.3 * plain["weight_bytes"]  # compared with fp32
    assert all(1 <= row["tokens_per_forward"] <= 8 for row in rows)


def test_needles_are_asked_for_by_their_kinds(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--lengths", "64", "--steps", "2", "--tokens-per-batch", "128"]
    arguments += ["--heads", "1", "--layers", "1", "--kinds", "8", "--needles", "4"]
    arguments += ["--others", "16", "--questions", "30", "--device", "cpu"]
    assert needle_model.main(arguments) == 0
    reader = load_tokenizer(tmp_path)
    facts = [json.loads(line) for line in (tmp_path / "facts-64.jsonl").read_text().splitlines()]
    assert len(facts) == 30
    kind_of: dict[str, str] = {}
    for fact in facts:
        *context, first, second, third = fact["question"].split()
        answers = fact["answer"].split()
        for kind, needle in zip((first, second, third), answers, strict=True):
            assert context.count(needle) == 1
            assert kind_of.setdefault(needle, kind) == kind
        reports = [{"role": "user", "content": fact["question"]}]
        assert reader.apply_chat_template(reports, tokenize=False) == fact["question"]
        assert len(reader(fact["question"])["input_ids"]) == 61
