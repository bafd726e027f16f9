# SPDX-License-Identifier: Apache-2.0
"""Rates of a device: measured, checked for plausibility, and remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vllm import envs
from vllm.diffusion.memory import Rates, rates, rates_of
from vllm.diffusion.memory.cost import CPU, H200
from vllm.diffusion.parallel.groups import ALONE

if TYPE_CHECKING:
    from pathlib import Path

CARD = torch.device("cuda", 0)
MEASURED = H200._replace(product_flops=650e12, attention_flops=600e12, host_bytes=25e9)


class Card:
    """A GPU whose measured rates are set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.result: Rates | Exception = MEASURED
        self.has_company, self.num_measured = False, 0
        monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(folder))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some/Card 80GB")
        monkeypatch.setattr(rates, "promised_rates", lambda device: H200)
        monkeypatch.setattr(rates, "measured_rates", self._measured)
        monkeypatch.setattr(rates, "_has_company", lambda device: self.has_company)

    def _measured(self, device: torch.device, promised: Rates) -> Rates:
        self.num_measured += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    return Card(monkeypatch, tmp_path / "cache")


def test_a_cpu_is_not_measured(card: Card) -> None:
    assert rates_of(torch.device("cpu"), ALONE) == CPU
    assert card.num_measured == 0


def test_a_card_is_measured_once(card: Card, tmp_path: Path) -> None:
    assert [rates_of(CARD, ALONE) for _ in range(3)] == 3 * [MEASURED]
    assert card.num_measured == 1
    (path,) = (tmp_path / "cache" / "diffusion_rates").iterdir()
    assert path.name.startswith(f"Some-Card-80GB-{torch.__version__}")
    infinite = path.read_text().replace("132", "Infinity")
    for text in (
        "",
        "{}",
        "[1]",
        infinite,
        '{"product_flops": "x"}',
        path.read_text().replace("132", "-1"),
    ):
        path.write_text(text)
        assert rates_of(CARD, ALONE) == MEASURED
    assert card.num_measured == 7


def test_what_is_measured_beside_others_is_not_remembered(card: Card) -> None:
    card.has_company = True
    assert rates_of(CARD, ALONE) == MEASURED
    card.has_company = False
    assert rates_of(CARD, ALONE) == MEASURED
    assert card.num_measured == 2


def test_what_is_far_below_a_cards_properties_is_not_believed_beside_others(card: Card) -> None:
    slow = card.result = MEASURED._replace(attention_flops=0.5 * H200.attention_flops)
    assert rates_of(CARD, ALONE) == slow  # another process may have disturbed the measurement
    card.has_company = True
    assert rates_of(CARD, ALONE) == MEASURED._replace(attention_flops=H200.attention_flops)
    assert card.num_measured == 2
    card.result = MEASURED._replace(host_bytes=1e9)  # no property bounds this rate
    assert rates_of(CARD, ALONE) == card.result


def test_ranks_go_by_the_slowest_of_them(card: Card) -> None:
    numbers = list[int]()

    def all_reduce_min(number: int) -> int:
        numbers.append(number)
        return number if number > 200 else 100  # the other rank has fewer multiprocessors

    peers: Any = SimpleNamespace(rank=0, size=2, all_reduce_min=all_reduce_min)
    assert rates_of(CARD, peers) == MEASURED._replace(multiprocessors=100)
    assert numbers == [int(MEASURED[index]) for index in (0, 1, 2, 3, 5)]


def test_what_cannot_be_measured_is_taken_by_its_properties(card: Card) -> None:
    for card.result in (
        torch.OutOfMemoryError(),
        RuntimeError("CUDA error\nand more"),
        TypeError(),
    ):
        assert rates_of(CARD, ALONE) == H200


def test_a_card_is_promised_what_it_has_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = {"major": 8, "minor": 0, "multi_processor_count": 108, "clock_rate": 1_410_000}
    a100 |= {"memory_clock_rate": 1_593_000, "memory_bus_width": 5120}
    unknown = {"major": 9, "minor": 0, "multi_processor_count": 132}
    for properties, products_tflops, memory_tbps in ((a100, 210, 1.74), (unknown, 720, 4.2)):
        actual = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, actual=actual: actual)
        promised = rates.promised_rates(CARD)
        assert promised.product_flops == pytest.approx(products_tflops * 1e12, rel=0.01)
        assert promised.memory_bytes == pytest.approx(memory_tbps * 1e12, rel=0.01)
        assert promised.multiprocessors == properties["multi_processor_count"]


def test_rates_that_cannot_be_written_are_measured_anew(card: Card, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder is wanted")
    assert [rates_of(CARD, ALONE) for _ in range(2)] == 2 * [MEASURED]
    assert card.num_measured == 2


@pytest.mark.gpu
def test_a_card_does_what_its_properties_promise() -> None:
    """Rates are within the plausible range. Other tests may run meanwhile, so the range is wide."""
    promised = rates.promised_rates(CARD)
    actual = rates.measured_rates(CARD, promised)
    assert actual.multiprocessors == torch.cuda.get_device_properties(CARD).multi_processor_count
    for name in ("product_flops", "attention_flops", "memory_bytes"):
        assert 0 < getattr(actual, name) < 2 * getattr(promised, name)
    assert 1e9 < actual.host_bytes < 1e12
