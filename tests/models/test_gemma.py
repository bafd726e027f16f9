# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma's forward pass gives the logits of transformers' network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import diffusion_gemma
from tiny_model.checkpoint import write_json, write_weights
from tiny_model.family import TokenIds
from torch import Tensor
from transformers import DynamicCache

from tests.gemma import CANVAS, WINDOW, load_network, make_gemma
from tests.models.gemma_rows import check_rows
from vllm.diffusion.core.spans import AttentionLayout, PageTable, Span
from vllm.diffusion.layers.gemma_stages import Router
from vllm.diffusion.layers.windowed_attention import attend_in_window
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
    rows = model.soft_rows(len(ids), 64)[start:]
    rows.copy_(torch.zeros_like(rows) if soft is None else model.expected_embeddings(soft))
    is_block = torch.arange(len(ids)) >= start
    model.condition(x, is_block)
    spans = [
        Span(0, start, 0, start, 1),
        Span(start, len(ids), 0, len(ids), block_start=start),
    ]
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


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("is_conditioned", [False, True])
def test_the_network_of_tiny_models(
    load_model: Callable[..., Any], tmp_path: Path, length: int, is_conditioned: bool
) -> None:
    """The network that is trained writes the tensors of this model, and has its logits."""
    config = diffusion_gemma.config(TokenIds(vocab_size=40, bos=36, eos=37, mask=38, eot=39))
    config |= {"sliding_window": WINDOW, "canvas_length": CANVAS}
    torch.manual_seed(1)
    network = diffusion_gemma.FAMILY.network(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() == 1 else 0.0)
    write_json(tmp_path / "config.json", config)
    write_weights(tmp_path, network.state_dict())
    num_tokens, width = config["vocab_size"], config["hidden_size"]
    ids = some_tokens(length + CANVAS, length) % num_tokens
    prompt, canvas = ids[:length], ids[length:]
    soft, expected = None, None
    if is_conditioned:
        soft = 4 * torch.randn(CANVAS, num_tokens, generator=torch.Generator().manual_seed(7))
        expected = torch.zeros(1, len(ids), width)
        expected[0, length:] = network.expected(soft)
    with torch.no_grad():
        hidden = network.denoised(ids[None], torch.tensor([length]), expected)[0]
        wanted = network.logits(hidden)
    given = our_logits(load_model(tmp_path), prompt, canvas, soft)
    torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=0)


def test_bf16(load_model: Callable[..., Any], folder: Path, network: Any) -> None:
    """Logits in bf16 are as close to exact ones as the network's own logits in bf16."""
    prompt, canvas = some_tokens(30, 1), some_tokens(CANVAS, 2)
    soft = 4 * torch.randn(CANVAS, 256, generator=torch.Generator().manual_seed(3))
    exact = network_logits(network, prompt, canvas, soft)
    half = load_network(folder).to(torch.bfloat16)
    ours = our_logits(load_model(folder, "bfloat16"), prompt, canvas, soft)
    assert ours.dtype == torch.float32
    theirs = network_logits(half, prompt, canvas, soft.bfloat16())
    own_error, their_error = ((x.double() - exact).square().mean() for x in (ours, theirs))
    assert own_error <= 1.5 * their_error


def test_fp8(load_model: Callable[..., Any], tmp_path: Path) -> None:
    """Weights in fp8 change logits by little more than their rounding."""
    folder = make_gemma(tmp_path)
    network = load_network(folder)
    prompt, canvas = some_tokens(30, 5), some_tokens(CANVAS, 6)
    soft = torch.randn(CANVAS, 256, generator=torch.Generator().manual_seed(8))
    exact = network_logits(network, prompt, canvas, soft).double()
    model = load_model(folder, "bfloat16", quantization="fp8")
    experts = model.layers[0].experts
    assert model.is_fp8 and experts.w1.matrices.quantises
    error = our_logits(model, prompt, canvas, soft).double() - exact
    assert error.norm() <= 0.3 * exact.norm()  # some rows choose other experts


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("page_size", [None, 4])
def test_windows(window: int, page_size: int | None) -> None:
    """Spans in chunks, from pages, and of a single row read the keys of their windows."""
    length, start, generator = 23, 17, torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(length, n, 8, generator=generator) for n in (4, 2, 2))
    reach = window or length
    keys = torch.arange(length)
    rows = torch.arange(length)[:, None]
    context = (keys <= rows) & (keys > rows - reach)
    block = (keys > start - reach) & (rows >= start)
    mask = torch.where(rows < start, context, block)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * 0.7
    shares = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    wanted = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(2, dim=1))
    pages, places = None, torch.arange(length)
    if page_size is not None:
        first_rows = torch.randperm(6, generator=generator) * page_size
        pages = PageTable(first_rows.int(), page_size)
        places = pages.rows_of(0, length).long()
        k, v = (torch.zeros(24, 2, 8).index_copy(0, places, part) for part in (k, v))
    layout = AttentionLayout.of(
        [
            Span(0, 5, 0, start, 1),  # a chunk of the context
            Span(5, 6, 0, 6),  # a single row
            Span(6, start, 0, start, 1, first=6),
            Span(start, start + 2, 0, length, block_start=start),
            Span(start + 2, length, 0, length, block_start=start),
        ],
        "cpu",
        pages,
    )
    given = attend_in_window(q, k, v, layout, scale=0.7, window=window)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)


def test_equal_experts_are_chosen_by_index() -> None:
    """Weights are normalised before the experts' scales, and ties go to the lowest index."""
    gate = torch.zeros(4, 6)
    router = Router(torch.ones(6), gate, torch.tensor([2.0, 4.0, 8.0, 16.0]), 2, 1e-6)
    routing = router.route(torch.randn(3, 6))
    assert routing.weights.tolist() == [[1.0, 2.0]] * 3
    # A slot is row * 2 + place, and the rows of expert 0 come first.
    assert routing.slots.tolist() == [0, 2, 4, 1, 3, 5]
    assert routing.ends.tolist() == [3, 6, 6, 6]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1.2e-2)])
def test_row_wise_operations(device: str, dtype: torch.dtype, limit: float) -> None:
    check_rows(device, dtype, limit)
