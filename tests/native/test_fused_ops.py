# SPDX-License-Identifier: Apache-2.0
"""fused_ops: the references match separate operations, and the kernels match the references."""

import pytest
import torch
from torch.nn.functional import silu

from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import Epilogue, Tiling, fused_linear, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Two units in the last place of the model dtype, because the sum of squares may be added in another
# order, and the result is rounded twice.
NORM_RTOL = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}

# Less than a vector, odd, one head, one warp per row, Dream's and LLaDA's width, and more than the
# registers of a block hold.
WIDTHS = [1, 3, 33, 128, 768, 3584, 4096, 40_000]


def random(generator, *shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def exact_norm(x, weight, eps):
    """Return the norm in float64, rounded where the model rounds."""
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
    """A weight applied in fp32 before the only cast would give other bits in bf16."""
    generator = torch.Generator().manual_seed(3)
    x = random(generator, 64, 512, dtype=torch.bfloat16, device=device)
    weight = random(generator, 512, dtype=torch.bfloat16, device=device)
    scale = torch.rsqrt(x.double().pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    cast_once = (x.double() * scale * weight.double()).bfloat16()
    out = fused_ops.rms_norm(x, weight, 1e-6)
    wanted = exact_norm(x, weight, 1e-6)
    assert (out != wanted).float().mean() < 1e-3  # only ties of rounding differ
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


def frequencies(rotary_dim, device="cpu", theta=500_000):
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / theta ** (exponents / rotary_dim)


# Zero, small ones, and positions whose angles cosf and sinf must reduce with all digits of pi.
POSITIONS = [0, 1, 2, 31, 4_095, 105_614, 105_616, 1_048_573, 2_097_151, 2_097_152]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rotary_dim", [2, 20, 128, 1_000])
def test_rotary_tables(device, dtype, position_dtype, rotary_dim):
    """The definition is a float64 function of the fp32 angle, including its rounding."""
    positions = torch.tensor(POSITIONS, dtype=position_dtype, device=device)
    inverse = frequencies(rotary_dim, device)
    shape = len(positions), rotary_dim + 8
    cos, sin = torch.full((2, *shape), 7.0, dtype=dtype, device=device).unbind()
    fused_ops.rotary_tables(positions, inverse, cos[:, :rotary_dim], sin[:, :rotary_dim])
    angles = (positions[:, None].float() * inverse).double()
    # Two units in the last place of fp32, and the rounding to the dtype of the table.
    atol = 2.5e-7 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
        lower, upper, beside = table.split((rotary_dim // 2, rotary_dim // 2, 8), dim=1)
        torch.testing.assert_close(lower.double(), exact, rtol=0, atol=atol)
        assert torch.equal(upper, lower)
        assert (beside == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [64, 96, 128])
def test_rotary_tables_have_the_bits_of_pytorch(generator, dtype, rotary_dim):
    spread = torch.randint(0, 2_097_153, (20_000,), generator=generator)
    positions = torch.cat((torch.arange(20_000), spread, torch.tensor(POSITIONS))).cuda()
    for theta in (10_000, 500_000, 1_000_000):
        inverse = frequencies(rotary_dim, "cuda", theta)
        shape = 2, 2, len(positions), rotary_dim
        actual, wanted = torch.empty(shape, dtype=dtype, device="cuda").unbind()
        fused_ops.rotary_tables(positions, inverse, *actual)
        reference.rotary_tables(positions, inverse, *wanted)
        assert torch.equal(actual, wanted)


def rotated(heads, cos, sin):
    """Return rotated heads, one operation after the other."""
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
    shape = num_tokens, num_heads + num_kv_heads, head_dim
    fused = random(generator, *shape, dtype=dtype, device=device)
    q, k = fused.split((num_heads, num_kv_heads), dim=1)  # strided rows
    angles = torch.outer(torch.arange(5, 5 + num_tokens).float(), frequencies(rotary_dim))
    table = torch.cat((angles, angles), dim=-1)
    table_dtype = torch.float32 if is_full_precision else dtype
    cos, sin = (part.to(device, table_dtype) for part in (table.cos(), table.sin()))
    wanted_q, wanted_k = rotated(q, cos, sin), rotated(k, cos, sin)
    fused_ops.apply_rotary(q, k, cos, sin)
    assert torch.equal(q, wanted_q) and torch.equal(k, wanted_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_full_precision", [True, False])
@pytest.mark.parametrize(
    "shape",  # tokens, heads, key/value heads, width of a head, and width that is rotated
    [
        (700, 4, 2, 64, 64),  # many tokens; the last threads have fewer heads than the others
        (600, 2, 1, 128, 128),
        (9, 28, 4, 128, 128),
        (5, 16, 16, 128, 64),  # a part of each head is rotated
        (600, 3, 1, 128, 64),
        (5, 3, 2, 96, 96),  # the threads of a head are no power of two
        (5, 3, 2, 18, 18),  # no vectors
        (3, 2, 0, 64, 64),
    ],
)
def test_norm_rotary(generator, device, dtype, is_full_precision, shape):
    """The result is the norm in float64, rounded as `rms_norm` rounds, and then the rotation."""
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim = shape
    all_heads = num_heads + 2 * num_kv_heads
    fused = random(generator, num_tokens, all_heads, head_dim, dtype=dtype, device=device)
    values = fused[:, num_heads + num_kv_heads :].clone()
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    weights = [random(generator, head_dim, dtype=dtype, device=device) for _ in range(2)]
    angles = random(generator, num_tokens, rotary_dim, device=device)
    table_dtype = torch.float32 if is_full_precision else dtype
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    wanted = [
        rotated(exact_norm(heads, weight, 1e-5), cos, sin)
        for heads, weight in zip((q, k), weights, strict=True)
    ]
    fused_ops.norm_rotary(q, k, *weights, 1e-5, cos, sin)
    # A sum of two products may lose digits, so the bound is relative to the larger product.
    rtol = NORM_RTOL[dtype]
    for heads, exact in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(heads, exact, rtol=rtol, atol=4 * rtol)
        if dtype != torch.float32 and heads.numel():  # most results round to the same number
            assert (heads != exact).float().mean() < 5e-3
    assert torch.equal(v, values)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others(generator):
    """Few and many rows use different launches, but each row has the same bits."""
    x = random(generator, 3000, 4096, dtype=torch.bfloat16, device="cuda")
    weight = random(generator, 4096, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.randn(2, 3000, 128, device="cuda").unbind()
    few, many = x[:5].clone(), x.clone()
    alone, beside = (fused_ops.rms_norm(rows, weight, 1e-6) for rows in (few, many))
    assert torch.equal(alone, beside[:5])
    for heads in (few, many):
        q, k = heads.view(-1, 32, 128).split((28, 4), dim=1)
        rows = slice(0, len(heads))
        fused_ops.norm_rotary(q, k, weight[:128], weight[128:256], 1e-6, cos[rows], sin[rows])
    assert torch.equal(few, many[:5])


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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "num_queries"), [(32, 128, 32), (4, 128, 28), (3, 20, 1), (1, 1, 0)]
)
def test_store_keys_values(generator, device, dtype, slot_dtype, num_heads, head_dim, num_queries):
    num_rows, num_slots = 11, 17
    shape = num_rows, num_queries + 2 * num_heads, head_dim
    fused = random(generator, *shape, dtype=dtype, device=device)
    _, k, v = fused.split((num_queries, num_heads, num_heads), dim=1)
    # The caches are a layer of a pool with other columns next to them.
    pool = random(generator, 2, num_slots, num_heads, head_dim + 8, dtype=dtype, device=device)
    k_cache, v_cache = pool[..., :head_dim].unbind()
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    slots[[2, 5]] = torch.tensor([-1, num_slots])  # not stored
    wanted = pool.clone()
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < num_slots:
            wanted[0, slot, :, :head_dim] = k[row]
            wanted[1, slot, :, :head_dim] = v[row]
    fused_ops.store_keys_values(k, v, k_cache, v_cache, slots.to(device, slot_dtype))
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_kept", [0, 1, 9, 13])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (16, 4, 128, 64),  # channels that are not rotated are stored, too
        (4, 4, 128, 128),
        (0, 2, 64, 64),  # no queries
        (3, 2, 96, 96),  # the threads of a head are no power of two
        (3, 2, 18, 18),  # no vectors
    ],
)
def test_rotation_keeps_keys_and_values(
    generator, device, dtype, has_norm, num_kept, num_heads, num_kv_heads, head_dim, rotary_dim
):
    """The last rows have the bits of two separate operations, in caches with gaps."""
    shape = (13, num_heads + 2 * num_kv_heads, head_dim)
    fused = random(generator, *shape, dtype=dtype, device=device)
    pool = random(generator, 2, 17, num_kv_heads, head_dim + 8, dtype=dtype, device=device)
    angles = random(generator, 13, rotary_dim, device=device)
    gains = [random(generator, head_dim, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(17, generator=generator)[:num_kept]
    slots[2:4] = torch.tensor([-1, 17])[: len(slots[2:4])]  # not stored
    slots = slots.to(device)
    results = []
    for is_apart in (True, False):
        product, caches = fused.clone(), pool.clone()
        q, k, v = product.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        places = caches[..., :head_dim].unbind()
        kept = None if is_apart else fused_ops.Kept(v, *places, slots)
        if has_norm:
            fused_ops.norm_rotary(q, k, *gains, 1e-6, angles.cos(), angles.sin(), kept)
        else:
            fused_ops.apply_rotary(q, k, angles.cos(), angles.sin(), kept)
        if is_apart:
            rows = slice(13 - num_kept, None)
            fused_ops.store_keys_values(k[rows], v[rows], *places, slots)
        results.append((product, caches))
    (product, caches), (found_product, found_caches) = results
    assert torch.equal(found_product, product) and torch.equal(found_caches, caches)
    assert num_kept == 0 or not torch.equal(caches, pool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 64), (128, 128), (18, 18)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_rotation_keeps_copies(generator, device, has_norm, head_dim, rotary_dim, slot_dtype):
    """Further slots of a row receive the same bits, up to its first negative one."""
    fused = random(generator, 13, 4 + 2 * 2, head_dim, dtype=torch.bfloat16, device=device)
    pool = random(generator, 2, 64, 2, head_dim, dtype=torch.bfloat16, device=device)
    angles = random(generator, 13, rotary_dim, device=device)
    gains = random(generator, 2, head_dim, dtype=torch.bfloat16, device=device)
    numbers = torch.randperm(64, generator=generator)[: 4 * 9].view(4, 9).to(device, slot_dtype)
    numbers[:, 0] = -1  # a row without a slot
    for row in range(1, 9):
        numbers[1 + row % 4 :, row] = -1
    results = []
    for copies in (None, numbers[1:]):
        product, caches = fused.clone(), pool.clone()
        q, k, v = product.split((4, 2, 2), dim=1)
        kept = fused_ops.Kept(v, *caches, numbers[0], copies)
        if has_norm:
            fused_ops.norm_rotary(q, k, *gains, 1e-6, angles.cos(), angles.sin(), kept)
        else:
            fused_ops.apply_rotary(q, k, angles.cos(), angles.sin(), kept)
        if copies is None:
            for slots in numbers[1:]:
                fused_ops.store_keys_values(k[-9:], v[-9:], *caches, slots)
        results.append((product, caches))
    (product, caches), (found_product, found_caches) = results
    assert torch.equal(found_product, product) and torch.equal(found_caches, caches)


@pytest.mark.gpu
def test_rotation_keeps_many_rows(generator):
    """A step of many windows uses another launch than a step of few rows."""
    fused = random(generator, 2000, 24, 128, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(2, 4096, 4, 128, dtype=torch.bfloat16, device="cuda")
    angles = random(generator, 2000, 64, device="cuda")
    gains = random(generator, 2, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(4096, generator=generator)[:1500].cuda()
    q, k, v = fused.split((16, 4, 4), dim=1)
    kept = fused_ops.Kept(v, *pool, slots)
    before = v.clone()
    fused_ops.norm_rotary(q, k, *gains, 1e-6, angles.cos(), angles.sin(), kept)
    wanted = torch.zeros_like(pool)
    wanted[0, slots], wanted[1, slots] = k[-1500:], v[-1500:]
    assert torch.equal(pool, wanted) and torch.equal(v, before)


MASK = 99


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs(generator):
    """All operations run in one CUDA graph, in which each waits for the previous one."""
    x = random(generator, 48, 4096, dtype=torch.bfloat16, device="cuda")
    residual = random(generator, 48, 4096, dtype=torch.bfloat16, device="cuda")
    weight = random(generator, 4096, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.randn(2, 48, 128, device="cuda").unbind()
    caches = torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(47, -1, -1, device="cuda")

    def step():
        residual.add_(x)
        out = fused_ops.rms_norm(residual, weight, 1e-6)
        heads = out.view(48, 32, 128)
        q, k, v = heads.split((16, 8, 8), dim=1)
        fused_ops.norm_rotary(q, k, weight[:128], weight[128:256], 1e-6, cos, sin)
        fused_ops.store_keys_values(k, v, *caches, slots)
        fused_ops.apply_rotary(q, k, cos, sin)
        return fused_ops.silu_mul(fused_ops.rms_norm(out, weight, 1e-6))

    start = residual.clone()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.copy_(random(generator, 48, 4096, dtype=torch.bfloat16))
        residual.copy_(start)
        caches.zero_()
        graph.replay()
        actual = out.clone(), residual.clone(), caches.clone()
        residual.copy_(start)
        caches.zero_()
        wanted = step(), residual, caches
        assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.gpu
def test_overlapping_kernels_wait_for_each_other(generator):
    """In a captured chain, each kernel needs the whole output of the previous kernel.

    A kernel that starts early and does not wait would read or overwrite unfinished data. Its result
    would then differ from that of the same calls with the device idle in between.
    """
    num_rows, width, num_layers = 48, 4096, 6
    to_qkv, back = Tiling(96, split=2), Tiling(64, split=2)
    options = {"epilogue": Epilogue.RESIDUAL, "early": True}
    weights = random(generator, 6144 + 4096, width, dtype=torch.bfloat16, device="cuda") / 64
    qkv_weight, back_weight = weights.split((6144, 4096))
    gain = random(generator, width, dtype=torch.bfloat16, device="cuda")
    inverse = frequencies(128, "cuda")
    source, x = torch.empty(2, num_rows, width, dtype=torch.bfloat16, device="cuda").unbind()
    positions = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    slots = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    tables = torch.empty(2, num_rows, 128, device="cuda")
    caches = torch.empty(num_layers, 2, num_rows, 8, 128, dtype=torch.bfloat16, device="cuda")
    normed, gated = torch.empty_like(x), torch.empty(num_rows, 3072, device="cuda").bfloat16()
    fused = torch.empty(num_rows, 6144, dtype=torch.bfloat16, device="cuda")
    after = torch.empty_like(x)  # all layers share these buffers

    def chain(rest):
        def run(operation, *arguments, **options):
            operation(*arguments, **options)
            rest()

        run(caches.zero_)
        run(x.copy_, source)
        run(fused_ops.rotary_tables, positions, inverse, *tables)
        for layer in range(num_layers):
            run(fused_ops.rms_norm, x, gain, 1e-6, out=normed)
            run(fused_linear, normed, qkv_weight, fused, tiling=to_qkv, early=True)
            q, k, v = fused.view(num_rows, 48, 128).split((32, 8, 8), dim=1)
            kept = fused_ops.Kept(v, *caches[layer], slots) if layer < num_layers // 2 else None
            if layer % 2:
                run(fused_ops.norm_rotary, q, k, gain[:128], gain[128:256], 1e-6, *tables, kept)
            else:
                run(fused_ops.apply_rotary, q, k, *tables, kept)
            if kept is None:
                run(fused_ops.store_keys_values, k, v, *caches[layer], slots)
            rows = caches[layer].view(2, num_rows, 1024)
            run(fused_ops.rms_norm, rows[0], gain[:1024], 1e-6, out=rows[0])
            run(fused_ops.silu_mul, fused, gated)
            run(normed[:, 1024:].copy_, gated)
            run(fused_ops.rms_norm, normed, gain, 1e-6, out=after)
            run(fused_linear, after, back_weight, x, tiling=back, **options)

    def fill():
        source.copy_(random(generator, num_rows, width, dtype=torch.bfloat16))
        positions.copy_(torch.randint(0, 200_000, (num_rows,), generator=generator))
        slots.copy_(torch.randperm(num_rows, generator=generator))

    def results():
        return [tensor.clone() for tensor in (x, tables, fused, normed, after, caches)]

    fill()
    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(20):
        fill()
        graph.replay()
        actual = results()
        torch.cuda.synchronize()
        chain(torch.cuda.synchronize)
        assert torch.isfinite(x).all()
        assert all(torch.equal(a, b) for a, b in zip(actual, results(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x = torch.empty(0, 16, device=device)
    weight = torch.ones(16, device=device)
    assert fused_ops.rms_norm(x, weight, 1e-6).shape == (0, 16)
    assert fused_ops.silu_mul(x).shape == (0, 8)
    heads = torch.empty(0, 2, 16, device=device)
    no_positions = torch.empty(0, dtype=torch.int64, device=device)
    fused_ops.rotary_tables(no_positions, weight[:8], x, x.clone())
    fused_ops.apply_rotary(heads, heads.clone(), x, x)
    fused_ops.norm_rotary(heads, heads.clone(), weight, weight, 1e-6, x, x)
    slots = torch.empty(0, dtype=torch.int32, device=device)
    fused_ops.store_keys_values(heads, heads, heads.clone(), heads.clone(), slots)


@pytest.mark.gpu
def test_kernels_run_on_a_gpu(generator, monkeypatch):
    assert fused_ops.is_built()
    names = ("rms_norm", "apply_rotary", "norm_rotary", "silu_mul")
    for name in (*names, "rotary_tables", "store_keys_values"):
        monkeypatch.delattr(reference, name)  # the kernels must not depend on them
    x = random(generator, 5, 64, device="cuda")
    weight, heads = torch.ones(64, device="cuda"), x.view(5, 2, 32)
    fused_ops.rms_norm(x, weight, 1e-6)
    fused_ops.silu_mul(x)
    fused_ops.apply_rotary(heads, heads.clone(), x[:, :32], x[:, 32:])
    tables = x[:, :32], x[:, 32:]
    fused_ops.norm_rotary(heads, heads.clone(), weight[:32], weight[:32], 1e-6, *tables)
    slots = torch.arange(5, device="cuda")
    fused_ops.rotary_tables(slots, weight[:16], *tables)
    fused_ops.store_keys_values(heads, heads, heads.clone(), heads.clone(), slots)


X, WEIGHT, HEADS, TABLE = (torch.zeros(size) for size in ((4, 8), (8,), (4, 2, 8), (4, 8)))
SLOTS = torch.zeros(4, dtype=torch.int32)


BOTH, TABLES = (HEADS, HEADS), (TABLE, TABLE)


def kept(v, slots):
    return fused_ops.Kept(v, *BOTH, slots)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rms_norm", (X[0], WEIGHT, 1e-6), "rms_norm: x must be 2-D or 3-D"),
        ("rms_norm", (X.long(), WEIGHT, 1e-6), "got torch.int64"),
        ("rms_norm", (X, WEIGHT[:7], 1e-6), r"weight must be torch.float32 \[8\]"),
        ("rms_norm", (X, WEIGHT.half(), 1e-6), "got torch.float16"),
        ("rms_norm", (X.t(), WEIGHT[:4], 1e-6), "dimension of x must be contiguous"),
        ("rms_norm", (X, WEIGHT, 1e-6, X[:2]), r"out must be .*\[4, 8\]"),
        ("rotary_tables", (SLOTS.float(), WEIGHT[:4], *TABLES), r"positions .*int64 \[any\]"),
        ("rotary_tables", (SLOTS, WEIGHT[:4], TABLE[:3], TABLE[:3]), r"cos .*even.*got \[3, 8\]"),
        ("rotary_tables", (SLOTS, WEIGHT[:3], TABLE[:, :7], TABLE), "even"),
        ("rotary_tables", (SLOTS, WEIGHT[:4], TABLE, TABLE.half()), "sin must be"),
        ("rotary_tables", (SLOTS, WEIGHT[:4].double(), *TABLES), r"inverse.* float32 \[4\]"),
        ("apply_rotary", (HEADS, HEADS[:2], *TABLES), "k must be"),
        ("apply_rotary", (HEADS, HEADS, TABLE[:2], TABLE[:2]), r"cos must be \[4,"),
        ("apply_rotary", (HEADS, HEADS, TABLE[:, :3], TABLE[:, :3]), "even"),
        ("apply_rotary", (HEADS, HEADS, TABLE.half(), TABLE.half()), "cos must be"),
        (
            "norm_rotary",
            (HEADS, HEADS, WEIGHT[:7], WEIGHT, 1e-6, *TABLES),
            r"q_weight .*\[8\]",
        ),
        ("norm_rotary", (*BOTH, WEIGHT, WEIGHT, 1e-6, TABLE[:2], TABLE[:2]), r"cos .*\[4,"),
        ("store_keys_values", (HEADS, HEADS[:3], HEADS, HEADS, SLOTS), r"v must be .*\[4, 2, 8\]"),
        ("store_keys_values", (HEADS, HEADS, HEADS[..., :4], HEADS, SLOTS), "k_cache must be"),
        ("store_keys_values", (HEADS, HEADS, HEADS, HEADS[:3], SLOTS), "v_cache must be"),
        ("store_keys_values", (*BOTH, *BOTH, SLOTS.float()), r"slots .*int64 \[4\]"),
        (
            "apply_rotary",
            (*BOTH, *TABLES, kept(HEADS, SLOTS.repeat(2))),
            r"slots .*got \[8\]",
        ),
        (
            "apply_rotary",
            (*BOTH, *TABLES, kept(HEADS, SLOTS)._replace(copies=SLOTS)),
            r"copies .*int64 \[any, 4\]",
        ),
        ("apply_rotary", (*BOTH, *TABLES, kept(HEADS[:3], SLOTS)), r"v .*\[4, 2, 8\]"),
        ("silu_mul", (torch.zeros(2, 3),), r"gate_up must be \[R, 2M\]"),
        ("silu_mul", (X, torch.zeros(4, 5)), r"out must be .*\[4, 4\]"),
    ],
)
def test_arguments_are_checked(name, arguments, message):
    with pytest.raises(ValueError, match=f"{name}: .*{message.removeprefix(name + ': ')}"):
        getattr(fused_ops, name)(*arguments)


def test_attention_without_a_kernel_refuses():
    q, ends = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    attended = fused_ops.Attended(ends, ends, ends[1:])
    assert not fused_ops.has_attention(q, 1)
    with pytest.raises(ValueError, match=r"attention: no kernel for q torch.bfloat16"):
        fused_ops.attention(q, q, q, attended)


@pytest.mark.gpu
def test_attention_checks_its_arguments():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")
    q = torch.zeros(4, 2, 128, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    attended = fused_ops.Attended(ends, ends, ends[1:])
    for arguments, message in (
        ((q, q.float(), q, attended), r"attention: k must be torch.bfloat16"),
        ((q, q, q.repeat(1, 2, 1), attended), r"v must be \[N, KV, 128\] with KV dividing 2"),
        ((q, q, q, attended._replace(query_ends=ends.long())), r"query_ends must be int32"),
        ((q, q, q, attended, q.float()), r"out must be torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_ops.attention(*arguments)
