# SPDX-License-Identifier: Apache-2.0
"""Attention's Triton kernel compiles for GPU generations other than that of this machine."""

from typing import Any

import pytest

from vllm.diffusion.layers.split_attention import CONFIG, FIXED_PART_KEYS, WIDE_CONFIGS

triton = pytest.importorskip("triton")

MIN_SHARED_KIB = {80: 163, 86: 99, 90: 227, 120: 99}  # KiB of shared memory that a program may use
POINTERS = {"q": "bf16", "k": "bf16", "v": "bf16", "out": "bf16", "parts": "fp32", "totals": "fp32"}
COUNTS = ("num_sequences", "num_rows", "num_splits", "q_row", "q_head", "k_row", "k_head")
COUNTS += ("v_row", "v_head")


def compiled(
    capability: int, *, has_blocks: bool, head_dim: int = 128, window: int = 0, part_keys: int = 0
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm.diffusion.layers.split_attention.split_kernel import part_kernel

    config = WIDE_CONFIGS.get(head_dim, CONFIG)
    fixed: dict[str, Any] = {"HEADS": 32, "GROUP": 1, "HEAD_DIM": head_dim, "PAGE": 64}
    fixed |= {
        "ROWS": config.rows,
        "KEYS": config.keys,
        "MIN_KEYS": 256,
        "IS_SPLIT": True,
        "PART_KEYS": 0,
    }
    fixed |= {"WINDOW": window, "HAS_BLOCKS": has_blocks, "OVERLAPS": capability >= 90}
    if not has_blocks:
        fixed |= {"block_lengths": None, "firsts": None}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(part_kernel.arg_names):
        if name in fixed:
            signature[name], constants[index,] = "constexpr", fixed[name]
            continue
        is_number = name in COUNTS or name == "scale"
        kind = "fp32" if name == "scale" else "i32"
        signature[name] = kind if is_number else "*" + POINTERS.get(name, "i32")
        if not is_number or name.endswith(("_row", "_head")):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(part_kernel, signature, constants, aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(("capability", "has_blocks"), [(80, False), (86, True), (120, False)])
def test_a_tile_of_the_widest_heads_fits(capability: int, has_blocks: bool) -> None:
    shared = compiled(capability, has_blocks=has_blocks).metadata.shared
    assert 64 * 1024 < shared <= MIN_SHARED_KIB[capability] * 1024


@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_wide_heads_are_loaded_ahead(head_dim: int, window: int) -> None:
    """Triton can give up the pipeline of a loop without a word."""
    program = compiled(90, has_blocks=True, head_dim=head_dim, window=window)
    assert program.metadata.shared <= MIN_SHARED_KIB[90] * 1024
    assert "cp.async" in program.asm["ptx"]


def test_parts_of_one_program_are_loaded_ahead() -> None:
    program = compiled(90, has_blocks=True, part_keys=FIXED_PART_KEYS)
    assert program.metadata.shared <= MIN_SHARED_KIB[90] * 1024
    assert "cp.async" in program.asm["ptx"] and "wgmma" in program.asm["ptx"]
