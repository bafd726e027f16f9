# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma's forward pass gives the logits of transformers' network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.gemma import CANVAS, WINDOW, load_network, make_gemma
from vllm.diffusion.core.spans import Span
from vllm.diffusion.models.transformer import run_whole

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load_network(folder)


@pytest.fixture(scope="module")
def model(load_model: Callable[..., Any], folder: Path) -> Any:
    return load_model(folder)


def some_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def network_logits(network: Any, prompt: Tensor, canvas: Tensor, soft: Tensor | None) -> Tensor:
    """Return the logits of all rows: the prompt's, then the canvas's."""
    cache = DynamicCache(config=network.config.get_text_config(decoder=True))
    encoded = network.model.encoder(input_ids=prompt[None], past_key_values=cache)
    hidden = encoded.last_hidden_state
    cap = network.config.text_config.final_logit_softcapping
    context = torch.tanh(network.lm_head(hidden).float() / cap) * cap
    out = network(
        decoder_input_ids=canvas[None],
        past_key_values=encoded.past_key_values,
        self_conditioning_logits=None if soft is None else soft[None],
        decoder_position_ids=torch.arange(len(prompt), len(prompt) + len(canvas))[None],
    )
    return torch.cat([context[0], out.logits[0]])


@torch.no_grad()
def our_logits(model: Any, prompt: Tensor, canvas: Tensor, soft: Tensor | None) -> Tensor:
    ids, start = torch.cat([prompt, canvas]), len(prompt)
    x = model.embed_input_ids(ids)
    model.condition(x[start:], None if soft is None else model.expected_embeddings(soft))
    spans = [
        Span(0, start, 0, start, 1),
        Span(start, len(ids), 0, len(ids), block_start=start),
    ]
    is_block = torch.arange(len(ids)) >= start
    rotary = model.rotary(torch.arange(len(ids)))
    x = run_whole(model.layers, x, rotary, spans, marks=[is_block])
    return model.compute_logits(model.final_norm(x))


@pytest.mark.parametrize("length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 40])
@pytest.mark.parametrize("is_conditioned", [False, True])
def test_logits(model: Any, network: Any, length: int, is_conditioned: bool) -> None:
    prompt, canvas = some_tokens(length, length), some_tokens(CANVAS, 99)
    generator = torch.Generator().manual_seed(7)
    soft = 4 * torch.randn(CANVAS, 256, generator=generator) if is_conditioned else None
    wanted = network_logits(network, prompt, canvas, soft)
    given = our_logits(model, prompt, canvas, soft)
    torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=0)
    assert torch.equal(given.argmax(-1), wanted.argmax(-1))
