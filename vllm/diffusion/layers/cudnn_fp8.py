# SPDX-License-Identifier: Apache-2.0
"""Attention of fp8 (e4m3) heads: by cuDNN on a GPU, by PyTorch elsewhere; one call per sequence.

cuDNN's fp8 attention has no binding in PyTorch, so its Python front end (`nvidia-cudnn-frontend`)
builds the graphs, one for each shape, which are cached. The probabilities are fp8, too: each is
multiplied by 448 over the largest of its row so far, so that the largest becomes the largest number
of the format.

Letters: R query rows, N rows of the keys and values, H and KV query and key/value heads, hd head
width.
"""

from __future__ import annotations

import functools
import math
from importlib import import_module, metadata, util
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.diffusion.core.devices import capability
from vllm.diffusion.core.fp8_stages import FP8, LARGEST
from vllm.diffusion.core.spans import check_tiling

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout

PACKAGE = "nvidia-cudnn-frontend"
_MIN_FRONT_END, _MIN_CUDNN = (1, 19, 1), 91900
_REFERENCE_ROWS = 512  # queries at a time without a GPU
_MAX_PLANS = 256
# Maximum relative error of results and weights that are rounded to fp8 in another order.
_MAX_ERROR = 0.1
_ALIGNMENT = 16  # bytes, for everything that cuDNN reads


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout[Tensor], scales: Tensor, out: Tensor
) -> Tensor:
    """Compute softmax(q k^T / sqrt(hd)) v of every sequence; weights and results are fp8.

    Args:
        q: [R, H, hd] fp8; rows may be strided.
        k, v: [N, KV, hd] fp8, likewise; KV divides H.
        layout: the sequences, with host spans, in ranges of rows, without grids of blocks.
        scales: [4] fp32, of queries, keys, values and results; larger numbers saturate at 448.
        out: [R, H, hd] fp8, contiguous, written and returned.
    """
    assert layout.spans is not None
    check_tiling(layout.spans, q.shape[0])
    compute = _by_cudnn if q.is_cuda else _by_torch
    for span in layout.spans:
        rows, keys = slice(span.q_start, span.q_end), slice(span.kv_start, span.kv_end)
        if not span.num_keys:  # without keys, cuDNN would never return
            out[rows].view(torch.uint8).zero_()
        elif span.num_queries:
            compute(q[rows], k[keys], v[keys], scales, out[rows])
    return out


def why_not(device: torch.device, head_dim: int) -> str | None:
    """Return what fp8 attention requires on a device; None if it is available."""
    if device.type != "cuda":
        return None
    if capability(device) != (9, 0):
        return "a GPU of compute capability 9.0"
    if head_dim % 16 or head_dim > 256:
        return f"a model whose heads are a multiple of 16 wide, and at most 256 (given {head_dim})"
    if util.find_spec("cudnn") is None:
        return f"the package {PACKAGE}: pip install {PACKAGE}"
    versions = _version(metadata.version(PACKAGE)), torch.backends.cudnn.version() or 0
    if versions[0] < _MIN_FRONT_END or versions[1] < _MIN_CUDNN:
        return (
            f"{PACKAGE} {'.'.join(map(str, _MIN_FRONT_END))} and cuDNN {_MIN_CUDNN} at least "
            f"(given {metadata.version(PACKAGE)} and {versions[1]})"
        )
    try:
        error = _tried(device, head_dim)
    except Exception as failure:
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        return f"a cuDNN that computes it (it says: {lines[0]})"
    if not error < _MAX_ERROR:
        return f"a cuDNN that computes it right (relative error {error:.3f})"
    return None


def _tried(device: torch.device, head_dim: int) -> float:
    """Compute a small case on a GPU; return its relative error against PyTorch's result."""
    draws = torch.Generator(device).manual_seed(0)
    heads = (64 * torch.randn(200, 12, head_dim, device=device, generator=draws)).to(FP8)
    q, k, v = heads.split((6, 3, 3), dim=1)
    scales = torch.full((4,), 1 / 64, device=device)
    outputs = [torch.empty(q.shape, dtype=FP8, device=device) for _ in range(2)]
    _by_cudnn(q[:150], k, v, scales, outputs[0][:150])
    _by_cudnn(q[150:], k, v, scales, outputs[0][150:])
    _by_torch(q, k, v, scales, outputs[1])
    result, expected = (part.float() for part in outputs)
    return float((result - expected).norm() / expected.norm())


def described(device: torch.device) -> str:
    """Return the library for fp8 attention on a device, with its versions, for the log."""
    if device.type != "cuda":
        return "PyTorch"
    return f"cuDNN {torch.backends.cudnn.version()} ({PACKAGE} {metadata.version(PACKAGE)})"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


# ---- PyTorch ----


def _by_torch(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, out: Tensor) -> None:
    """Attend in one sequence, with the kernel's number formats, some queries at a time."""
    factor = scales[0] * scales[1] / math.sqrt(q.shape[2])
    by, per_group = scales[2] / (scales[3] * LARGEST), q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        keys, values = k[:, head // per_group].float(), v[:, head // per_group].float()
        for rows in torch.arange(len(q)).split(_REFERENCE_ROWS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = (q[part, head].float() @ keys.t()) * factor
            weights = (logits - logits.amax(1, keepdim=True)).exp()
            rounded = (weights * LARGEST).to(FP8).float()
            product = (rounded @ values) * by / weights.sum(1, keepdim=True)
            out[part, head] = product.clamp(-LARGEST, LARGEST).to(FP8)


# ---- cuDNN ----


class _Shape(NamedTuple):
    """Key of a graph: sizes and strides of one sequence."""

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_strides: tuple[int, int]  # strides of rows and heads
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]
    out_strides: tuple[int, int]


class _Graph:
    """A cuDNN graph for one shape, and its workspace in bytes."""

    NAMES = ("q", "k", "v", "out", "of_q", "of_k", "of_v", "of_weights", "weights_by", "out_by")

    def __init__(self, cudnn: Any, handle: Any, shape: _Shape) -> None:
        types = cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )

        def heads(name: str, rows: int, count: int, strides: tuple[int, int]) -> Any:
            sizes, steps = _sizes(rows, count, shape.head_dim, strides)
            return graph.tensor(name=name, dim=sizes, stride=steps, data_type=types.FP8_E4M3)

        def number(name: str) -> Any:
            ones = (1, 1, 1, 1)
            return graph.tensor(name=name, dim=ones, stride=ones, data_type=types.FLOAT)

        keys = shape.num_keys, shape.num_kv_heads
        q = heads("q", shape.num_queries, shape.num_heads, shape.q_strides)
        k, v = heads("k", *keys, shape.k_strides), heads("v", *keys, shape.v_strides)
        of_q, of_k, of_v, of_weights, weights_by, out_by = map(number, self.NAMES[4:])
        out, *_ = graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            descale_q=of_q,
            descale_k=of_k,
            descale_v=of_v,
            descale_s=of_weights,
            scale_s=weights_by,
            scale_o=out_by,
            generate_stats=False,
            attn_scale=1.0 / math.sqrt(shape.head_dim),
        )
        sizes, steps = _sizes(shape.num_queries, shape.num_heads, shape.head_dim, shape.out_strides)
        out.set_output(True).set_dim(sizes).set_stride(steps).set_data_type(types.FP8_E4M3)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self._graph, self._handle = graph, handle
        self._tensors = q, k, v, out, of_q, of_k, of_v, of_weights, weights_by, out_by
        self.workspace_bytes = int(graph.get_workspace_size())

    def run(self, given: tuple[Tensor, ...], workspace: Tensor) -> None:
        """Launch on the handle's stream; `given` is in the order of `NAMES`."""
        self._graph.execute(dict(zip(self._tensors, given, strict=True)), workspace, self._handle)


class _Library:
    """cuDNN on one device: its handle, constants, and the graphs built so far."""

    def __init__(self, device: torch.device) -> None:
        self._cudnn: Any = import_module("cudnn")
        with torch.cuda.device(device):
            self._handle = self._cudnn.create_handle()
        # Scales of the weights: to and from fp8.
        self._weights = torch.tensor((1.0 / LARGEST, LARGEST), device=device)
        self.graph_of = functools.lru_cache(_MAX_PLANS)(
            functools.partial(_Graph, self._cudnn, self._handle)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scales: Tensor, out: Tensor) -> None:
        strides = [(part.stride(0), part.stride(1)) for part in (q, k, v, out)]
        graph = self.graph_of(_Shape(len(q), len(k), q.shape[1], *k.shape[1:], *strides))
        stream = torch.cuda.current_stream(q.device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        workspace = torch.empty(graph.workspace_bytes, dtype=torch.uint8, device=q.device)
        factors = torch.cat((scales[:3], self._weights, 1.0 / scales[3:]))
        aligned = factors[:, None].repeat(1, _ALIGNMENT // factors.itemsize)
        graph.run((q, k, v, out, *aligned.unbind()), workspace)


@functools.cache
def _library(device: torch.device) -> _Library:
    return _Library(device)


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, out: Tensor) -> None:
    """Attend in one sequence by cuDNN, on the current stream.

    cuDNN has no kernel for a single query, so a single query is computed twice.
    """
    if len(q) == 1:
        twice = q.view(torch.uint8).repeat(2, 1, 1).view(FP8)
        product = torch.empty_like(twice)
        _library(q.device).attend(twice, k, v, scales, product)
        out.copy_(product[:1])
        return
    _library(q.device).attend(q, k, v, scales, out)


def _sizes(
    rows: int, heads: int, head_dim: int, strides: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of heads in cuDNN's order: batch, heads, rows, channels."""
    of_rows, of_heads = strides
    return (1, heads, rows, head_dim), (rows * of_rows, of_heads, of_rows, 1)
