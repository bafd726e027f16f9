# SPDX-License-Identifier: Apache-2.0
"""Recorded runs equal computed ones, and each of their parameters has an effect."""

import json
from pathlib import Path
from typing import Any

import pytest
from reference.models import load_reference

from tests import golden
from tests.checkpoints import make_case, random_prompt
from tests.engine.cases import DELAYED, DREAM, FOUR_BLOCKS, MULTI, PARITY, PROMPT_LENGTH

AGED = {**DELAYED, "threshold": 1.5, "block_length": 4}
# For each parameter, cases that only differ in it.
ALIKE: dict[str, list[dict[str, Any]]] = {
    "cache": [
        {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 16, "cache": cache}
        for cache in ("none", "prefix", "dual")
    ],
    "delay": [{**AGED, "cache_delay_iter": delay} for delay in (0, 2, 10_000)],
    "refresh": [
        {**AGED, "cache_delay_iter": 2, "refresh_interval": interval} for interval in (3, 10_000)
    ],
    "alg": [
        {**DREAM, "steps": 8, "alg": alg} for alg in ("entropy", "maskgit_plus", "topk_margin")
    ],
    "block thresholds": [
        {**MULTI, "threshold": 1.5, "block_add_threshold": a, "decoded_token_threshold": d}
        for a, d in ((0.5, 0.5), (0.1, 0.95), (1.0, 1.0))
    ],
    "guidance": [PARITY["small blocks"] | {"cfg_scale": scale} for scale in (0.0, 0.5, 3.0)],
    "remasking": [PARITY["small blocks"], PARITY["small blocks"] | {"remasking": "random"}],
    "temperature": [PARITY["temperature"] | {"temperature": t} for t in (0.0, 0.7, 1.0)],
    "threshold": [{**FOUR_BLOCKS, "threshold": limit} for limit in (0.3, 0.6, 0.9)],
}


@pytest.fixture(scope="module", params=["mha", "dream", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_case(tmp_path_factory.mktemp(request.param), request.param)
    return load_reference(folder)


@pytest.mark.parametrize("settings", ALIKE.values(), ids=ALIKE.keys())
def test_the_settings_are_told_apart(model: Any, settings: list[dict[str, Any]]) -> None:
    """If a parameter were ignored, tokens and forward passes would always be equal."""
    if model.logit_shift and "remasking" in settings[-1]:
        pytest.skip("not a parameter of Dream")
    for seed in range(20):
        prompt = random_prompt(PROMPT_LENGTH, seed)
        runs = [
            golden.reference(model, prompt, **{"seed": 7, "guard_mask_token": True, **parameters})
            for parameters in settings
        ]
        if len({(*run.ids, run.num_forwards) for run in runs}) == len(settings):
            return
    raise AssertionError(f"20 prompts cannot tell {settings} apart")


def test_a_sample_of_the_written_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = golden.STORE.runs
    mine = [key for key in sorted(written) if json.loads(key)["model"] == golden.name_of(model)]
    assert len(mine) > 50
    monkeypatch.setattr(golden, "STORE", golden.Store(writes=True))
    for key in mine[:: len(mine) // 10]:
        parameters = json.loads(key)
        del parameters["model"]
        golden.run(model, **parameters) if "prompt" in parameters else golden.clear_case(
            model, **parameters
        )
        assert golden.STORE.written[key] == written[key]
