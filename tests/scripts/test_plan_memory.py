# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py: plans of a checkpoint's configuration, without weights."""

from pathlib import Path

import plan_memory
import pytest

from tests.checkpoints import make_checkpoint


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
