#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of our dense products compared with PyTorch's, and which of them is chosen.

    benchmarks/kernels/bench_products.py [--ops top linear] [--rows 32 4096] [--model llada-8b]
        [--json FILE]

Random numbers in bf16 and fp8, with the shapes of LLaDA-8B and of SDAR-8B's grouped heads, or of
Qwen3-0.6B. Each variant is a CUDA graph, and the variants run in turns.

    top      sample rows -> output matrix -> best token and its probability (gather_gemm); PyTorch's
             way is matmul and flash_sample.low_confidence over the stored logits
    gather   sample rows -> output matrix, stored (gather_gemm); PyTorch's way is matmul
    linear, residual, gated
             the products of a layer (fused_ops): x W^T; y += x W^T; silu(x G^T) * x U^T
    int4-linear, int4-residual, int4-gated
             the same with weights of 4 bits in groups of 128; PyTorch's way is to unpack them
             (fused_ops), and then cuBLAS
    fp8-linear, fp8-residual, fp8-gated
             the same with fp8 rows and weights, as vllm.diffusion.ops computes them; the gated
             result is fp8 rows; PyTorch's way is its product with a scale per row, then a pass
    us       one call of ours, if there is a kernel for the shape
    torch    one call of PyTorch's way
    chosen   one call of the way that `vllm.diffusion.ops.dispatch` chooses, and its time over
             PyTorch's
    TFLOP/s, TB/s  of the chosen one: arithmetic, and bytes that must be read and written
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, compare, report
from benchmarks.gpu_timing import random_rows as random
from flash_sample import low_confidence
from gather_gemm import gather_gemm, gather_top
from vllm.diffusion.ops import dispatch
from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import Epilogue, Packed, QuantisedRows, Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

COLUMNS = {"op": "<13", "shape": "<22", "rows": ">5", "us": ">9", "torch": ">9", "chosen": ">9"}
COLUMNS |= {"ratio": ">6", "TFLOP/s": ">8", "TB/s": ">6"}
PACKED, FP8 = "int4-", "fp8-"
PRODUCTS = ("linear", "residual", "gated")  # products of a layer
OPS = ("top", "gather", *(kind + op for kind in ("", PACKED, FP8) for op in PRODUCTS))
EPILOGUES = {
    "gated": Epilogue.SILU_MUL,
    "linear": Epilogue.STORE,
    "residual": Epilogue.RESIDUAL,
}
ROWS = (1, 16, 32, 48, 64, 96, 128, 160, 192, 256, 512, 1024, 2048, 4096, 8192)
GROUP = 128  # 4-bit numbers per group
FEW_ROWS = 256  # up to this number of rows we have kernels for a layer's products without a gate


@dataclass(frozen=True)
class Shape:
    """Columns and depth of the products of a layer, and sizes of the output matrix."""

    layer: dict[str, tuple[int, int]]
    vocabulary: int
    width: int


SHAPES = {
    "llada-8b": Shape(
        {
            "qkv": (12288, 4096),
            "grouped qkv": (6144, 4096),
            "out": (4096, 4096),
            "gate_up": (24576, 4096),
            "down": (4096, 12288),
        },
        126464,
        4096,
    ),
    "qwen3-0.6b": Shape(
        {
            "grouped qkv": (4096, 1024),
            "out": (1024, 2048),
            "gate_up": (6144, 1024),
            "down": (1024, 3072),
        },
        151936,
        1024,
    ),
}
OP_OF = {
    "qkv": "linear",
    "grouped qkv": "linear",
    "gate_up": "gated",
    "out": "residual",
    "down": "residual",
}


@dataclass(frozen=True)
class Case:
    """Product to measure; a variant is a call for each of several inputs."""

    op: str
    shape: str
    num_rows: int
    flops: float
    num_bytes: float
    ours: Sequence[Callable[[], object]]
    torch: Sequence[Callable[[], object]]
    is_ours_chosen: bool


def head_cases(model: Shape, ops: Sequence[str], all_rows: Sequence[int]) -> Iterator[Case]:
    device, vocabulary, width = torch.device("cuda"), model.vocabulary, model.width
    weight = random(vocabulary, width) * 0.02
    stored = random(max(all_rows), vocabulary)
    shape = f"{vocabulary} x {width}"

    def sample(x: Tensor) -> object:
        return low_confidence(torch.mm(x, weight.t(), out=stored[: len(x)]))

    for num_rows in all_rows:
        x, out = random(num_rows, width), stored[:num_rows]
        flops = 2.0 * num_rows * vocabulary * width
        read = weight.nbytes + 2.0 * num_rows * width
        case = partial(Case, shape=shape, num_rows=num_rows, flops=flops)
        if "top" in ops:
            yield case(
                op="top",
                num_bytes=read,
                ours=[partial(gather_top, x, None, weight)],
                torch=[partial(sample, x)],
                is_ours_chosen=dispatch.samples_in_head(num_rows, vocabulary, device),
            )
        if "gather" in ops:
            yield case(
                op="gather",
                num_bytes=read + out.nbytes,
                ours=[partial(gather_gemm, x, None, weight, out)],
                torch=[partial(torch.mm, x, weight.t(), out=out)],
                is_ours_chosen=dispatch.multiplies_head(num_rows, vocabulary, device),
            )


@dataclass(frozen=True)
class Kind:
    """Kind of weights of a layer, and the functions that multiply by them."""

    prefix: str  # prefix of its ops
    weight: Callable[[int, int], Any]  # makes a random weight
    tiling: Callable[..., Tiling | None]  # arguments: rows, columns, depth, gated=, card=
    ours: Callable[..., object]
    torch: Callable[[str, Tensor, Any, Tensor], None]


def layer_cases(model: Shape, ops: Sequence[str], all_rows: Sequence[int]) -> Iterator[Case]:
    card = dispatch.card_of(torch.device("cuda", torch.cuda.current_device()))
    for kind, (name, (num_columns, depth)) in itertools.product(KINDS, model.layer.items()):
        op = OP_OF[name]
        if kind.prefix + op not in ops:
            continue
        # Together several times the cache, like the weights of a model's layers.
        weights = [kind.weight(num_columns, depth) for _ in range(16)]
        ends = kind is PLAIN and op != "gated"
        for num_rows in (rows for rows in all_rows if not ends or rows <= FEW_ROWS):
            x = random(num_rows, depth)
            out = random(num_rows, num_columns // 2 if op == "gated" else num_columns)
            tiling = kind.tiling(
                *(num_rows, num_columns, depth),
                gated=op == "gated",
                card=card,
            )
            ours = partial(kind.ours, tiling=tiling, epilogue=EPILOGUES[op], early=True)
            yield Case(
                kind.prefix + op,
                f"{name} {num_columns} x {depth}",
                num_rows,
                2.0 * num_rows * num_columns * depth,
                _num_bytes(weights[0]) + x.nbytes + out.nbytes,
                [partial(ours, x, weight, out) for weight in weights],
                [partial(kind.torch, op, x, weight, out) for weight in weights],
                tiling is not None,
            )


def _random_plain(num_columns: int, depth: int) -> Tensor:
    return random(num_columns, depth) * 0.02


def _random_packed(num_columns: int, depth: int) -> Packed:
    size = (num_columns, depth // GROUP)
    values = torch.randint(256, (num_columns, depth // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(size, device="cuda") * 0.01
    return Packed(values, scales, torch.randint(16, size, dtype=torch.uint8, device="cuda"))


def _packed_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, card: dispatch.DeviceInfo
) -> Tiling | None:
    return dispatch.packed_tiling(num_rows, num_columns, depth, GROUP, card=card)


def _num_bytes(weight: Tensor | Packed) -> int:
    parts = weight[:3] if isinstance(weight, Packed) else (weight,)
    return sum(part.nbytes for part in parts if part is not None)


def _unpacked(op: str, x: Tensor, weight: Packed, out: Tensor) -> None:
    plain = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    fused_ops.unpack(weight, plain)
    _plain(op, x, plain, out)


def fp8_cases(model: Shape, ops: Sequence[str], all_rows: Sequence[int]) -> Iterator[Case]:
    if not {FP8 + op for op in PRODUCTS} & set(ops):
        return
    from vllm.diffusion.core.stages import FreshBuffers  # The engine's way, with its imports.
    from vllm.diffusion.ops.fp8 import Fp8Projection

    scratch = FreshBuffers(torch.device("cuda"))
    for name, (num_columns, depth) in model.layer.items():
        op = FP8 + OP_OF[name]
        if op not in ops:
            continue
        weights = [_quantised(num_columns, depth) for _ in range(16)]
        projections = [Fp8Projection(_layer(weight)) for weight in weights]
        for num_rows in all_rows:
            x, out = _quantised(num_rows, depth), random(num_rows, num_columns)
            activated = _quantised(num_rows, num_columns // 2)
            ours = {
                "fp8-linear": [partial(p.project, x, out, scratch) for p in projections],
                "fp8-residual": [partial(p.add_to, out, x, scratch) for p in projections],
                "fp8-gated": [partial(p.gated, x, activated, scratch) for p in projections],
            }
            written = activated.values if op == "fp8-gated" else out
            yield Case(
                op,
                f"{name} {num_columns} x {depth}",
                num_rows,
                2.0 * num_rows * num_columns * depth,
                weights[0].values.nbytes + x.values.nbytes + written.nbytes,
                ours[op],
                [partial(_plain_fp8, op, x, weight, out, activated) for weight in weights],
                is_ours_chosen=True,
            )


def _quantised(num_rows: int, width: int) -> QuantisedRows:
    values = torch.empty(num_rows, width, dtype=fused_ops.FP8, device="cuda")
    rows = QuantisedRows(values, torch.empty(num_rows, device="cuda"))
    fused_ops.quantise_rows(random(num_rows, width) * 0.02, rows)
    return rows


def _layer(weight: QuantisedRows) -> Any:
    """Return the attributes of a layer with an fp8 weight that the engine reads."""
    return SimpleNamespace(
        weight=weight.values, weight_scale=weight.scales, bias=None, params_dtype=torch.bfloat16
    )


def _plain_fp8(
    op: str, x: QuantisedRows, weight: QuantisedRows, out: Tensor, activated: QuantisedRows
) -> None:
    scales = x.scales[:, None], weight.scales[None]
    product = torch._scaled_mm(
        x.values, weight.values.t(), *scales, out_dtype=out.dtype, use_fast_accum=True
    )
    if op == "fp8-gated":
        fused_ops.silu_mul_quantised(product, activated)
    elif op == "fp8-residual":
        out.add_(product)


def _plain(op: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
    if op == "gated":
        fused_ops.silu_mul(torch.mm(x, weight.t()), out)
    elif op == "residual":
        out.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=out)


PLAIN = Kind("", _random_plain, dispatch.linear_tiling, fused_ops.fused_linear, _plain)
KINDS = (
    PLAIN,
    Kind(PACKED, _random_packed, _packed_tiling, fused_ops.fused_linear_packed, _unpacked),
)


def measure(case: Case) -> list[object]:
    """Measure a row of the table."""
    variants = {"torch": case.torch}
    # If there is no kernel of ours, "ours" would be PyTorch's way again.
    if case.is_ours_chosen or case.op in ("top", "gather"):
        variants["ours"] = case.ours
    times = compare(variants, repeats=10, warm_up_s=0.04)
    chosen = times["ours" if case.is_ours_chosen else "torch"]
    return [
        case.op,
        case.shape,
        case.num_rows,
        round(times["ours"].median_us, 1) if "ours" in times else None,
        round(times["torch"].median_us, 1),
        round(chosen.median_us, 1),
        round(chosen.median_us / times["torch"].median_us, 3),
        round(case.flops / chosen.seconds / 1e12, 1),
        round(case.num_bytes / chosen.seconds / 1e12, 2),
    ]


def main() -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--ops", OPS, choices=OPS)
    parser.option("--model", "llada-8b", "model with these shapes", choices=tuple(SHAPES))
    options = parser.parse()
    cases = (
        case
        for kind in (layer_cases, fp8_cases, head_cases)
        for case in kind(SHAPES[options.model], options.ops, options.rows)
    )
    rows = (measure(case) for case in cases)
    title = "products: sample rows with the output matrix, and few rows with a layer's"
    report(options.json, title, COLUMNS, rows)


if __name__ == "__main__":
    main()
