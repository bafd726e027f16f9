# SPDX-License-Identifier: Apache-2.0
"""Which kernel is chosen for given rows and shapes."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from vllm.diffusion.core import devices
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops import dispatch
from vllm_add_llada.cuda_kernels.fused_ops import PORTABLE, Tiling

CARD = dispatch.DeviceInfo(dispatch.KernelTier.HOPPER, 132)  # an H200
OTHER_CARD = dispatch.DeviceInfo(dispatch.KernelTier.PORTABLE, 48)


def tiling(num_rows: int, columns: int, depth: int, *, gated: bool = False) -> Tiling | None:
    return dispatch.linear_tiling(num_rows, columns, depth, gated=gated, card=CARD)


@pytest.mark.parametrize(
    ("columns", "depth", "gated"),
    [
        *((12288, 256, False), (4096, 384, False), (6144, 128, False), (2048, 256, False)),
        *((24576, 256, True), (12288, 256, True), (3584, 18944, False)),
    ],
)
def test_tilings_give_each_multiprocessor_one_block(columns: int, depth: int, gated: bool) -> None:
    actual = tiling(32, columns, depth, gated=gated)
    assert actual is not None
    assert 110 <= columns // actual.columns * actual.split <= CARD.multiprocessors
    assert columns % actual.columns == 0 and depth % (64 * actual.split) == 0


@pytest.mark.parametrize(
    ("columns", "further", "wanted", "is_ours"),
    [
        (12288, 48, 96, True),
        (12288, 384, 384, True),
        (24576, 32, 192, True),
        (4096, 128, 128, True),
        (1024, 16, 32, True),
        (2048, 40, 64, True),
        (12288, 400, 416, False),  # more blocks than multiprocessors
    ],
)
def test_extended_weights_keep_a_tiling_for_few_rows(
    columns: int, further: int, wanted: int, is_ours: bool
) -> None:
    extended = dispatch.extended_columns(columns + further, 256, card=CARD)
    assert extended == columns + wanted
    assert (tiling(32, extended, 256) is not None) == is_ours
    assert dispatch.extended_columns(columns + further, 256, card=OTHER_CARD) % 32 == 0


def test_few_rows_are_ours_as_far_as_they_are_faster() -> None:
    chosen = [rows for rows in range(300) if tiling(rows, 4096, 4096) is not None]
    assert chosen == [*range(1, 129), *range(144, 193)]
    chosen = [rows for rows in range(300) if tiling(rows, 6144, 4096) is not None]
    assert chosen == [*range(1, 129)]
    assert tiling(32, 4096, 4096 + 64) is None  # the depth has no two halves of whole steps
    assert tiling(128, 24576, 4096) == Tiling(192)
    assert tiling(129, 24576, 4096) is None
    assert tiling(32, 24576, 4096, gated=True) == Tiling(192)
    assert tiling(32, 12288, 4096, gated=True) == Tiling(96)


def test_tilings_of_many_rows_leave_little_of_the_card_idle() -> None:
    cases = [(250, 24576), (384, 24576), (505, 24576), (1000, 24576), (512, 37888)]
    chosen = [tiling(*case, 256, gated=True) for case in cases]
    assert chosen == [Tiling(192, rows=rows) for rows in (256, 128, 256, 256, 256)]
    for num_rows in (0, 129, 192, 300, 448):
        assert tiling(num_rows, 24576, 256, gated=True) is None
    assert tiling(256, 24576, 256 + 8, gated=True) is None
    assert tiling(256, 24576, 256) is None


def test_tails_take_tiles_that_fill_the_card_or_one_tile_of_rows() -> None:
    def tail_tiling(num_rows: int, columns: int, depth: int = 256) -> Tiling | None:
        return dispatch.tail_tiling(num_rows, columns, depth, card=CARD)

    low = Tiling(192, rows=128)
    chosen = [rows for rows in range(1, 237) if tail_tiling(rows, 24576) is not None]
    assert chosen == [*range(65, 129)]
    assert {tail_tiling(rows, 24576) for rows in chosen} == {low}
    assert tail_tiling(384, 24576) == low
    assert tail_tiling(505, 24576) == Tiling(192, rows=256)
    # A few blocks leave the card idle, as some of a second wave do.
    assert tail_tiling(100, 12288) is None
    assert tail_tiling(100, 192 * 133) is None
    assert tail_tiling(100, 24576, 256 + 8) is None
    assert dispatch.tail_tiling(512, 24576, 256, card=OTHER_CARD) is None


def test_without_the_card_there_is_no_kernel() -> None:
    assert dispatch.card_of(torch.device("cpu")) == dispatch.NO_CARD
    for gated in (False, True):
        shape = (256, 4096, 4096)
        assert dispatch.linear_tiling(*shape, gated=gated, card=dispatch.NO_CARD) is None


def test_other_cards_have_one_tiling_for_up_to_256_rows() -> None:
    card = OTHER_CARD
    for gated, tiling_of in itertools.product(
        (False, True), (dispatch.linear_tiling, dispatch.fp8_tiling)
    ):
        actual = [tiling_of(rows, 4096, 4096, gated=gated, card=card) for rows in (0, 1, 256, 257)]
        assert actual == [None, PORTABLE, PORTABLE, None]
    few = [dispatch.packed_tiling(rows, 4096, 4096, 128, card=card) for rows in (0, 1, 256, 257)]
    assert few == [None, PORTABLE, PORTABLE, None]
    assert dispatch.gated_tiling(1024, 24576, 4096, card=card) is None


@pytest.mark.parametrize(("given", "is_refused"), [((7, 5), True), ((8, 0), False)])
def test_cards_before_ampere_are_refused(
    given: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A Card")
    wanted = "^GPU: given A Card of compute capability 7.5; wanted 8.0 or later$"
    with pytest.raises(ServerConfigError, match=wanted) if is_refused else nullcontext():
        devices.check_card(torch.device("cuda", 0))


def test_the_head_by_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for serves in (dispatch.multiplies_head, dispatch.samples_in_head):
        assert not serves(1, 126464, cpu)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: device == gpu)
    rows = (0, 1, 64, 65, 128, 129)
    assert [num for num in rows if dispatch.multiplies_head(num, 126464, gpu)] == [1, 64]
    assert [num for num in rows if dispatch.samples_in_head(num, 126464, gpu)] == [1, 64, 65, 128]
    for serves in (dispatch.multiplies_head, dispatch.samples_in_head):
        assert not serves(1, 24576, gpu)


def test_experts_by_their_rows() -> None:
    assert [rows for rows in (8, 9, 64, 65) if dispatch.routes_compiled(rows, 64)] == [9, 64]
    assert [rows for rows in (7, 8, 32, 33) if dispatch.routes_compiled(rows, 128)] == [8, 32]
    assert not dispatch.routes_compiled(32, 256)
    for card, most in ((CARD, 128), (OTHER_CARD, 256)):
        assert dispatch.routes_in_parts(most, card) and not dispatch.routes_in_parts(most + 1, card)
    slots = (63, 64, 2048, 2049)
    assert [num for num in slots if dispatch.streams_gated(num, 64)] == [2049]
    assert [num for num in slots if dispatch.streams_weighted(num, 64)] == [64, 2048, 2049]


@pytest.mark.parametrize(
    ("columns", "depth", "wanted"),
    [
        *((12288, 4096, Tiling(192, split=2)), (24576, 4096, Tiling(192))),
        *((4096, 4096, Tiling(64, split=2)), (4096, 12288, Tiling(64, split=2))),
        *((37888, 3584, Tiling(64)), (3584, 18944, Tiling(64, split=2))),
        *((4096, 4096 + 128, None), (4096 + 32, 4096, None)),  # no tile divides these sizes
    ],
)
def test_4_bit_weights_have_one_tiling_for_all_few_rows(
    columns: int, depth: int, wanted: Tiling | None
) -> None:
    assert {packed(rows, columns, depth) for rows in (1, 32, 64)} == {wanted}
    assert packed(0, columns, depth) is None
    assert dispatch.packed_tiling(1, columns, depth, 128, card=dispatch.NO_CARD) is None


def packed(num_rows: int, columns: int, depth: int, group: int = 128) -> Tiling | None:
    return dispatch.packed_tiling(num_rows, columns, depth, group, card=CARD)


@pytest.mark.parametrize(
    ("columns", "depth", "few_hundred", "thousand"),
    [
        (12288, 4096, Tiling(192, rows=128), Tiling(128, rows=256)),
        (24576, 4096, Tiling(192, rows=128), Tiling(128, rows=256)),
        (4096, 4096, Tiling(128, 2, rows=128), Tiling(128, rows=256)),
        (4096, 12288, Tiling(128, 2, rows=128), Tiling(128, rows=256)),
    ],
)
def test_more_rows_times_4_bit_weights_have_the_fastest_tiling(
    columns: int, depth: int, few_hundred: Tiling, thousand: Tiling
) -> None:
    assert packed(256, columns, depth) == few_hundred
    assert packed(1024, columns, depth) == thousand
    assert packed(4096, columns, depth) is None  # unpacking takes little of the product's time
    assert packed(256, columns + 64, depth) is None


@pytest.mark.parametrize(
    ("num_rows", "most", "wanted"),
    [
        *((4096, 8192, 8192), (4096, 3072, 3072), (2048, 3072, 2048), (1300, 4096, 3072)),
        *((100, 8192, 8192), (4096, 256, 256), (4096, 100, 256)),
    ],
)
def test_slices_are_whole_turns_of_the_card(num_rows: int, most: int, wanted: int) -> None:
    options = (num_rows, 12288, 4096, most, dispatch.UNPACKED)
    assert dispatch.slice_columns(*options, card=CARD) == wanted
    largest = max(most // 256, 1) * 256
    assert dispatch.slice_columns(*options, card=dispatch.NO_CARD) == largest


def test_the_scales_of_a_tile_find_room() -> None:
    assert packed(1024, 4096, 12288, group=64) == Tiling(128, 2, rows=256)
    assert packed(256, 4096, 65536, group=64) is None
