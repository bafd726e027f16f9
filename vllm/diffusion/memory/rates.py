# SPDX-License-Identifier: Apache-2.0
"""Rates of the device: measured when an engine starts, and cached on disk.

A large product, attention of a long sequence and large copies run for a moment each. Products run
first, until the card reaches its power limit, as in a long step (an idle H200 multiplies a tenth
faster for a fifth of a second). For products, and for attention, which follows at once, the median
round counts. Copies reach no such limit, so their fastest round counts: a round is shorter than the
time slice of another process on the card. If other processes use the card, rates far below the
rates expected from its clocks and widths are replaced by the expected rates. Measurements with
other processes, or with replaced rates, are not cached.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm import envs
from vllm.diffusion.memory.cost import CPU, H200, Rates
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.parallel.groups import RankGroup

logger = init_logger(__name__)

# Rates that can be derived from the card's properties.
MEASURED = ("product_flops", "attention_flops", "memory_bytes")
THERMAL_WARMUP_S = 0.22  # seconds of products until the card has reached its power limit
# Seconds of measured rounds: of products and of attention, and of copies.
MOMENT_S, COPIES_S = 0.04, 0.015
LINK_BYTES = 32 << 20  # bytes of pinned host memory used for the measurement
# Fraction of the expected rate. Few cards without other processes reach less.
PEAK_FRACTION = 0.6
COPIED_BYTES = 512 << 20  # large enough that a copy's start and end do not matter
# Memory of the card that this process has not allocated: above it, other processes use the card.
OTHERS_BYTES = 2 << 30

# Operations of dense 16-bit products with fp32 sums per clock and multiprocessor, by compute
# capability. If cards of one capability differ, the value is the smallest, which is that of gaming
# cards.
_OPERATIONS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_MIN_OPERATIONS = 512  # for 8.6, 8.9, 12.0 and 12.1
_H200_KILOHERTZ, _H200_MEMORY_KILOHERTZ, _H200_MEMORY_BITS = 1_980_000, 3_201_000, 6144

_ROWS, _DEPTH, _COLUMNS = 8192, 4096, 12_288
_HEADS, _HEAD_DIM = 32, 128
_QUERIES = 8448  # 66 tiles of 128 in each of 32 heads: whole waves on 132 multiprocessors


def rates_of(device: torch.device, ranks: RankGroup) -> Rates:
    """Return the minimum rates over all ranks, because all ranks follow the same plans.

    On a CPU nothing is measured, because other processes may use its cores at any moment.
    """
    if device.type != "cuda":
        return CPU
    own_rates, source = _rates_here(device)
    slowest = {
        name: ranks.all_reduce_min(int(getattr(own_rates, name)))
        for name in (*MEASURED, "host_bytes")
    }
    rates = own_rates._replace(
        **slowest, multiprocessors=ranks.all_reduce_min(own_rates.multiprocessors)
    )
    if ranks.rank == 0:
        logger.info(
            "%s: products %.0f and attention %.0f TFLOP/s, memory %.2f TB/s, host %.1f GB/s; %s",
            torch.cuda.get_device_name(device),
            rates.product_flops / 1e12,
            rates.attention_flops / 1e12,
            rates.memory_bytes / 1e12,
            rates.host_bytes / 1e9,
            source,
        )
    return rates


def _rates_here(device: torch.device) -> tuple[Rates, str]:
    """Return the rates of this rank's device, and a description of their source."""
    path, started = _path_of(device), time.perf_counter()
    rates, source = _remembered(path), f"remembered in {path}"
    if rates is None:
        promised = promised_rates(device)
        try:
            measured, has_company = measured_rates(device, promised), _has_company(device)
            plausible = plausible_rates(measured, promised)
            rates = plausible if has_company else measured
            if plausible == measured and not has_company:
                _remember(path, rates)
            source = f"measured in {time.perf_counter() - started:.2f} s"
        except Exception as error:  # after any error, the promised rates are good enough
            first_line, *_ = str(error).splitlines() or [type(error).__name__]
            rates, source = promised, f"by its properties, as it cannot be measured: {first_line}"
    return rates, source


def promised_rates(device: torch.device) -> Rates:
    """Return the rates of an H200, scaled by the card's clocks and widths.

    An unknown clock or width counts as the H200's.
    """
    card = torch.cuda.get_device_properties(device)

    def part(name: str, of: float) -> float:
        return (getattr(card, name, 0) or of) / of

    operations = _OPERATIONS.get((card.major, card.minor), _MIN_OPERATIONS)
    products = operations / _OPERATIONS[9, 0] * part("clock_rate", _H200_KILOHERTZ)
    products *= card.multi_processor_count / H200.multiprocessors
    memory = part("memory_clock_rate", _H200_MEMORY_KILOHERTZ)
    memory *= part("memory_bus_width", _H200_MEMORY_BITS)
    return H200._replace(
        product_flops=H200.product_flops * products,
        attention_flops=H200.attention_flops * products,
        memory_bytes=H200.memory_bytes * memory,
        multiprocessors=card.multi_processor_count,
    )


def plausible_rates(measured: Rates, promised: Rates) -> Rates:
    """Return the measured rates, replacing rates that are far too low by the promised ones.

    The speed of the link to the host is never replaced, because no property promises it.
    """
    slow = {
        name: getattr(promised, name)
        for name in MEASURED
        if getattr(measured, name) < PEAK_FRACTION * getattr(promised, name)
    }
    return measured._replace(**slow)


def measured_rates(device: torch.device, promised: Rates) -> Rates:
    """Measure the card; rates that cannot be measured are the promised ones.

    Raises:
        RuntimeError: the card cannot be used, or it has less than about a gigabyte of free memory.
    """
    return promised._replace(
        product_flops=_product_flops(device),
        attention_flops=_attention_flops(device),
        memory_bytes=_memory_bytes(device),
        host_bytes=_host_bytes(device),
    )


def _normal(*shape: int, device: torch.device) -> torch.Tensor:
    """Return normal random numbers: with zeros a card uses less power and runs faster."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _product_flops(device: torch.device) -> float:
    x, weights = _normal(_ROWS, _DEPTH, device=device), _normal(_DEPTH, _COLUMNS, device=device)
    out = _normal(_ROWS, _COLUMNS, device=device)

    def multiply() -> object:
        return torch.mm(x, weights, out=out)

    _rounds(multiply, THERMAL_WARMUP_S)
    seconds = statistics.median(_rounds(multiply, MOMENT_S))
    return 2 * _ROWS * _DEPTH * _COLUMNS / seconds


def _attention_flops(device: torch.device) -> float:
    q, k, v = (_normal(1, _HEADS, _QUERIES, _HEAD_DIM, device=device) for _ in range(3))
    kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kinds, set_priority=True):
        rounds = _rounds(lambda: functional.scaled_dot_product_attention(q, k, v), MOMENT_S)
    seconds = statistics.median(rounds)
    return 4 * _QUERIES**2 * _HEADS * _HEAD_DIM / seconds


def _memory_bytes(device: torch.device) -> float:
    x = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, device=device)
    return 2 * COPIED_BYTES / min(_rounds(lambda: x[0].copy_(x[1]), COPIES_S))


def _host_bytes(device: torch.device) -> float:
    device_buffer = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    host_buffer = torch.empty_like(device_buffer, device="cpu", pin_memory=True)
    return host_buffer.nbytes / min(
        _rounds(lambda: device_buffer.copy_(host_buffer, non_blocking=True), COPIES_S)
    )


def _rounds(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds of every round within `seconds`, after a warm-up round."""
    run()
    torch.cuda.synchronize()
    rounds, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 2:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        rounds.append(first.elapsed_time(last) / 1000)
    return rounds


def _has_company(device: torch.device) -> bool:
    """Whether other processes hold memory of the card."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > OTHERS_BYTES


def _path_of(device: torch.device) -> Path:
    """Return the file with the cached rates of this kind of card."""
    parts = (torch.cuda.get_device_name(device), torch.__version__, str(torch.version.cuda))
    name = re.sub(r"[^\w.+]+", "-", "-".join(parts))
    return Path(envs.VLLM_CACHE_ROOT) / "diffusion_rates" / f"{name}.json"


def _remembered(path: Path) -> Rates | None:
    """Read rates from a file; None if it contains none."""
    try:
        numbers = json.loads(path.read_text())
        rates = Rates(**numbers)
        return rates if all(0 < number < math.inf for number in rates) else None
    except (OSError, ValueError, TypeError):
        return None


def _remember(path: Path, rates: Rates) -> None:
    """Write the rates to a file atomically; only log an error."""
    written = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(rates._asdict()))
        written.replace(path)
    except OSError as error:
        logger.debug("rates are not remembered: %s", error)
