# SPDX-License-Identifier: Apache-2.0
"""fused_ops: the references against separate operations, the kernels against the references."""

import pytest
import torch
from torch.nn.functional import silu

from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Two units in the last place of the model dtype: the sum of squares may be added in another order,
# and the result is rounded twice.
NORM_RTOL = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}

# Below a vector, odd, one head, LLaDA's; more vectors than a block has threads.
WIDTHS = [1, 3, 33, 128, 4096, 20_000]


def random(generator, *shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def exact_norm(x, weight, eps):
    """In float64, rounded where the model rounds."""
    x64 = x.double()
    normed = x64 * torch.rsqrt(x64.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(generator, device, dtype, width):
    x = random(generator, 7, width, dtype=dtype, device=device)
    weight = random(generator, width, dtype=dtype, device=device)
    x[0] = 0
    out = fused_ops.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, exact_norm(x, weight, 1e-5), rtol=NORM_RTOL[dtype], atol=1e-7)
    assert (out[0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_multiplies_after_the_cast(device):
    """A weight applied in fp32 before the only cast gives other bits in bf16."""
    generator = torch.Generator().manual_seed(3)
    x = random(generator, 64, 512, dtype=torch.bfloat16, device=device)
    weight = random(generator, 512, dtype=torch.bfloat16, device=device)
    scale = torch.rsqrt(x.double().pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    cast_once = (x.double() * scale * weight.double()).bfloat16()
    out = fused_ops.rms_norm(x, weight, 1e-6)
    wanted = exact_norm(x, weight, 1e-6)
    assert (out != wanted).float().mean() < 1e-3  # ties of rounding
    assert (out != cast_once).float().mean() > 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_heads_in_place(generator, device, dtype):
    storage = random(generator, 6, 5, 300, dtype=dtype, device=device)
    before = storage.clone()
    weight = random(generator, 128, dtype=dtype, device=device)
    for heads in (storage[:, 1:3, :128], storage[::2, :, 129:257], storage[:, 0, 3:131]):
        wanted = exact_norm(heads, weight, 1e-6)
        out = fused_ops.rms_norm(heads, weight, 1e-6, out=heads)
        assert out is heads
        torch.testing.assert_close(heads, wanted, rtol=NORM_RTOL[dtype], atol=1e-7)
        storage.copy_(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(generator, device, dtype, width):
    x = random(generator, 9, width + 8, dtype=dtype, device=device)[:, :width]
    residual = random(generator, 9, width, dtype=dtype, device=device)
    weight = random(generator, width, dtype=dtype, device=device)
    total = residual + x
    wanted = exact_norm(total, weight, 1e-5)
    out = fused_ops.add_rms_norm(x, residual, weight, 1e-5, out=x)
    assert out is x
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, wanted, rtol=NORM_RTOL[dtype], atol=1e-7)


def rotated(heads, cos, sin):
    """The rotation written out, one operation after the other."""
    half = cos.shape[-1] // 2
    lower, upper = heads[..., :half], heads[..., half : 2 * half]
    if cos.dtype == torch.float32:
        lower, upper = lower.float(), upper.float()
    cos, sin = cos[:, None], sin[:, None]
    left = lower * cos[..., :half] + (-upper) * sin[..., :half]
    right = upper * cos[..., half:] + lower * sin[..., half:]
    turned = torch.cat((left, right), dim=-1).to(heads.dtype)
    return torch.cat((turned, heads[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_full_precision", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(32, 32, 128, 128), (7, 1, 128, 64), (4, 2, 20, 20), (3, 0, 16, 16)],
)
def test_rotary(
    generator, device, dtype, is_full_precision, num_heads, num_kv_heads, head_dim, rotary_dim
):
    num_tokens = 13
    fused = random(
        generator, num_tokens, num_heads + num_kv_heads, head_dim, dtype=dtype, device=device
    )
    q, k = fused.split((num_heads, num_kv_heads), dim=1)  # strided rows
    inverse = 1 / 10_000 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.outer(torch.arange(5, 5 + num_tokens).float(), inverse)
    table = torch.cat((angles, angles), dim=-1)
    table_dtype = torch.float32 if is_full_precision else dtype
    cos, sin = table.cos().to(table_dtype).to(device), table.sin().to(table_dtype).to(device)
    wanted_q, wanted_k = rotated(q, cos, sin), rotated(k, cos, sin)
    fused_ops.apply_rotary(q, k, cos, sin)
    assert torch.equal(q, wanted_q) and torch.equal(k, wanted_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 24, 12_288])
def test_silu_mul(generator, device, dtype, width):
    gate_up = random(generator, 11, 2 * width + 3, dtype=dtype, device=device)[:, : 2 * width]
    gate_up[0] = -200  # exp overflows
    gate, up = gate_up.chunk(2, dim=-1)
    wanted = silu(gate) * up
    out = fused_ops.silu_mul(gate_up)
    assert out.is_contiguous()
    # exp() may differ in the last place between compilers.
    torch.testing.assert_close(out, wanted, rtol=NORM_RTOL[dtype], atol=1e-7)
    in_place = fused_ops.silu_mul(gate_up, out=gate)
    assert in_place is gate and torch.equal(gate, out)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x = torch.empty(0, 16, device=device)
    weight = torch.ones(16, device=device)
    assert fused_ops.rms_norm(x, weight, 1e-6).shape == (0, 16)
    assert fused_ops.add_rms_norm(x, x.clone(), weight, 1e-6).shape == (0, 16)
    assert fused_ops.silu_mul(x).shape == (0, 8)
    heads = torch.empty(0, 2, 16, device=device)
    fused_ops.apply_rotary(heads, heads.clone(), x, x)


@pytest.mark.gpu
def test_kernels_run_on_a_gpu(generator, monkeypatch):
    assert fused_ops.is_built()
    for name in ("rms_norm", "add_rms_norm", "apply_rotary", "silu_mul"):
        monkeypatch.delattr(reference, name)  # the kernels must not need them
    x = random(generator, 5, 64, device="cuda")
    weight, heads = torch.ones(64, device="cuda"), x.view(5, 2, 32)
    fused_ops.rms_norm(x, weight, 1e-6)
    fused_ops.add_rms_norm(x, x.clone(), weight, 1e-6)
    fused_ops.silu_mul(x)
    fused_ops.apply_rotary(heads, heads.clone(), x[:, :32], x[:, 32:])


X, WEIGHT, HEADS, TABLE = (
    torch.zeros(4, 8),
    torch.zeros(8),
    torch.zeros(4, 2, 8),
    torch.zeros(4, 8),
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused_ops.rms_norm(X[0], WEIGHT, 1e-6), "rms_norm: x must be 2-D or 3-D"),
        (lambda: fused_ops.rms_norm(X.long(), WEIGHT, 1e-6), "got torch.int64"),
        (lambda: fused_ops.rms_norm(X, WEIGHT[:7], 1e-6), r"weight must be torch.float32 \[8\]"),
        (lambda: fused_ops.rms_norm(X, WEIGHT.half(), 1e-6), "got torch.float16"),
        (lambda: fused_ops.rms_norm(X.t(), WEIGHT[:4], 1e-6), "dimension of x must be contiguous"),
        (lambda: fused_ops.rms_norm(X, WEIGHT, 1e-6, out=X[:2]), r"out must be .*\[4, 8\]"),
        (lambda: fused_ops.add_rms_norm(X, X[:2], WEIGHT, 1e-6), "residual must be"),
        (
            lambda: fused_ops.add_rms_norm(X.clone(), X, WEIGHT, 1e-6, out=X),
            "out must not be residual",
        ),
        (lambda: fused_ops.apply_rotary(HEADS, HEADS[:2], TABLE, TABLE), "k must be"),
        (lambda: fused_ops.apply_rotary(HEADS, HEADS, TABLE[:2], TABLE[:2]), r"cos must be \[4,"),
        (lambda: fused_ops.apply_rotary(HEADS, HEADS, TABLE[:, :3], TABLE[:, :3]), "even"),
        (lambda: fused_ops.apply_rotary(HEADS, HEADS, TABLE.half(), TABLE.half()), "cos must be"),
        (lambda: fused_ops.silu_mul(torch.zeros(2, 3)), r"gate_up must be \[R, 2M\]"),
        (lambda: fused_ops.silu_mul(X, out=torch.zeros(4, 5)), r"out must be .*\[4, 4\]"),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()
