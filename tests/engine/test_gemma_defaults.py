# SPDX-License-Identifier: Apache-2.0
"""Defaults of DiffusionGemma's requests; in a process of its own, for it starts its own engine."""

from pathlib import Path

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Request, engine_config, running
from tests.gemma import CANVAS, load_network, make_gemma, run_loop


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    """Values of generation_config.json are the defaults; its length limits no answer."""
    generation = {"max_denoising_steps": 3, "t_min": 0.1, "t_max": 0.9, "max_new_tokens": CANVAS}
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 4.0}
    folder = make_gemma(tmp_path, generation={**generation, "sampler_config": sampler})
    prompt = random_prompt(9, 15)
    run = run_loop(
        load_network(folder),
        prompt,
        max_tokens=20,
        seed=16,
        entropy_bound=4.0,
        max_denoising_steps=3,
        t_min=0.1,
        t_max=0.9,
    )
    with running(folder) as engine:
        (answer,) = engine.ask(
            Request(
                prompt, {"ignore_eos": True}, {"temperature": 1.0, "seed": 16, "max_tokens": 20}
            )
        )
    assert answer.token_ids == run.ids[:20]


def test_ranks_divide_heads_experts_and_vocabulary(tmp_path: Path) -> None:
    """Two ranks give the authors' tokens: expected embeddings are summed over the vocabulary."""
    folder = make_gemma(tmp_path, num_global_key_value_heads=2)
    prompt = random_prompt(30, 17)
    run = run_loop(load_network(folder), prompt, max_tokens=20, seed=18, max_denoising_steps=6)
    with running(folder, tensor_parallel_size=2) as engine:
        sampling = {"temperature": 1.0, "seed": 18, "max_tokens": 20}
        extra = {"ignore_eos": True, "steps_per_block": 6}
        (answer,) = engine.ask(Request(prompt, extra, sampling))
    assert answer.token_ids == run.ids[:20]


def test_adapters_are_refused(tmp_path: Path) -> None:
    wanted = "enable_lora: given True; wanted False for a model of family diffusion-gemma"
    with pytest.raises(ValueError, match=wanted):
        engine_config(make_gemma(tmp_path), enable_lora=True)
