# SPDX-License-Identifier: Apache-2.0
"""Joint choices of all requests of a step on a GPU: rows read as logits come, a few launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.guided import kernel
from vllm.diffusion.guided.window import FREE, OPEN
from vllm.diffusion.scoring import GUIDED, TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.guided.language import Language

_MOST_COLUMNS = 4096  # of a tile
_GIANTS = 3  # classes that are reduced in registers
_SETS, _MEMBERS = 16, 16
_STATES, _EDGES = 64, 16
_FIELDS = 24


class DeviceTables:
    """A language on a device.

    Attributes:
        class_of: [V] int32.
        table: int32: starts of sets, members, sets and targets of edges, room.
        offsets: where these begin.
    """

    def __init__(self, language: Language, device: torch.device) -> None:
        parts = (
            language.set_starts,
            language.set_members,
            language.edge_sets,
            language.edge_targets,
            language.room,
        )
        flat = [part.astype(np.int32).ravel() for part in parts]
        self.offsets = np.cumsum([0, *map(len, flat)])[:-1].tolist()
        found = ops.to_device(
            [language.class_of_token.astype(np.int32), np.concatenate(flat)], device
        )
        self.class_of, self.table = found


_TABLES: dict[tuple[int, str], tuple[Language, DeviceTables]] = {}
_MOST_TABLES = 128


def _tables(language: Language, device: torch.device) -> DeviceTables:
    """A language's tables, made once while it is kept."""
    key = (id(language), str(device))
    if key not in _TABLES:
        while len(_TABLES) >= _MOST_TABLES:
            del _TABLES[next(iter(_TABLES))]
        _TABLES[key] = (language, DeviceTables(language, device))
    return _TABLES[key][1]


class DeviceStep:
    """What the joint choices of one step have read.

    Args:
        joints: of the step, `Joint`s.
        num_columns: of the logits.
        device: where these are.
    """

    def __init__(self, joints: Sequence[Any], num_columns: int, device: torch.device) -> None:
        self._joints, self._device = list(joints), device
        counts = [joint.num_rows for joint in self._joints]
        ends = np.cumsum(counts).tolist()
        self._num_rows = ends[-1]
        self._first = {id(j): end - n for j, n, end in zip(joints, counts, ends, strict=True)}
        self._tables = [_tables(joint.language, device) for joint in self._joints]
        self._num_classes = max(joint.language.num_classes for joint in self._joints)
        self._block = min(_MOST_COLUMNS, 1 << (num_columns - 1).bit_length())
        self._num_tiles = -(-num_columns // self._block)
        shape = (self._num_rows, self._num_classes)
        least = -(2**63)
        self._keys = torch.full(shape, least, dtype=torch.int64, device=device)
        is_drawn = any(joint.temperature > 0 for joint in self._joints)
        self._sums = torch.zeros(shape if is_drawn else (1, 1), dtype=torch.int64, device=device)
        tiles = (self._num_rows, self._num_tiles, 2)
        self._parts = torch.empty(tiles, dtype=torch.float32, device=device)
        self._read = dict.fromkeys(map(id, self._joints), 0)

    def read(self, joint: Any, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Take in whole rows [r, V] of canvas positions [r], behind those that it has read."""
        if not len(logits):
            return
        first = self._first[id(joint)] + self._read[id(joint)]
        self._read[id(joint)] += len(logits)
        tables = _tables(joint.language, self._device)
        num_columns, is_drawn = logits.shape[1], joint.temperature > 0
        scale, score_scale = joint.scales
        grid = (len(logits), self._num_tiles)
        low, high = joint.seed & 0xFFFFFFFF, joint.seed >> 32
        kernel.read_kernel[grid](
            *(logits, logits.stride(0), tables.class_of, positions, self._keys, self._parts),
            *(num_columns, self._num_classes, self._num_tiles, first, scale, score_scale),
            *(low, high, joint.step),
            PURPOSE=TOKEN,
            NOISY=is_drawn,
            GIANTS=_GIANTS,
            BLOCK=self._block,
        )
        if is_drawn:
            kernel.sum_kernel[grid](
                *(logits, logits.stride(0), tables.class_of, self._keys, self._sums),
                *(num_columns, self._num_classes, first, scale),
                GIANTS=_GIANTS,
                BLOCK=self._block,
            )

    def choose(
        self, sampled: torch.Tensor, ends: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what is chosen into `sampled` [3 or more, columns] fp64.

        Args:
            sampled: as sampling returns it, on the device.
            ends: of every request, its last column + 1.

        Returns:
            tokens [R] int64 and their log probabilities [R] float64.
        """
        host = self._packed(ends)
        numbers, scales, request_of, row_of, class_at, place_of = ops.to_device(host, self._device)
        tables = torch.cat([own.table for own in self._tables])
        num = len(host[2])
        most_sets = max(joint.language.num_sets for joint in self._joints) + 1
        weights = torch.empty(num, most_sets, dtype=torch.float32, device=self._device)
        values = torch.empty(self._num_values, dtype=torch.float32, device=self._device)
        chosen = torch.empty(num, dtype=torch.int32, device=self._device)
        tiles = 1 << max(self._num_tiles - 1, 1).bit_length()
        widest = max(joint.language.edge_sets.shape[1] for joint in self._joints)
        kernel.set_kernel[(num, -(-most_sets // _SETS))](
            *(numbers, scales, request_of, row_of, class_at, tables, self._keys, self._sums),
            *(self._parts, weights, self._num_classes, self._num_tiles, most_sets),
            SETS=_SETS,
            MEMBERS=_MEMBERS,
            TILES=tiles,
        )
        kernel.choose_kernel[(len(self._joints),)](
            *(numbers, row_of, tables, weights, values, chosen, most_sets),
            PURPOSE=GUIDED,
            STATES=_STATES,
            EDGES=_EDGES,
            WIDEST=max(16, 1 << (widest - 1).bit_length()),
            num_warps=8,
        )
        tokens = torch.empty(self._num_rows, dtype=torch.int64, device=self._device)
        logprobs = torch.empty(self._num_rows, dtype=torch.float64, device=self._device)
        kernel.token_kernel[(self._num_rows,)](
            *(numbers, scales, place_of, request_of, tables, self._keys, self._parts, chosen),
            *(sampled, sampled.stride(0), logprobs, tokens, self._num_classes, self._num_tiles),
            PURPOSE=TOKEN,
            MEMBERS=64,
            TILES=tiles,
        )
        return tokens, logprobs

    def _packed(self, ends: Sequence[int]) -> tuple[ops.Array, ...]:
        """What the kernels want to know of the requests, their positions and their rows."""
        numbers = np.zeros((len(self._joints), _FIELDS), dtype=np.int64)
        scales = np.empty((len(self._joints), 2), dtype=np.float32)
        request_of, row_of, class_at, places = [], [], [], []
        num_positions = num_values = base = row = 0
        for index, (joint, tables, end) in enumerate(
            zip(self._joints, self._tables, ends, strict=True)
        ):
            language, window = joint.language, joint.window
            starts, members, edge_sets, edge_targets, room = (base + o for o in tables.offsets)
            count = len(window.kinds)
            excluded = (*joint.excluded, -1, -1)[:2]
            numbers[index, :21] = (
                *(starts, members, language.num_sets, joint.temperature > 0),
                *(edge_sets, edge_targets, room, language.num_states, language.edge_sets.shape[1]),
                *(num_positions, count, num_values, window.start, window.left),
                *(joint.seed & 0xFFFFFFFF, joint.seed >> 32, joint.step, window.first),
                *(joint.sets_scores, *excluded),
            )
            scales[index] = joint.scales
            is_open = window.kinds == OPEN
            own = np.where(window.kinds == FREE, -2, -1).astype(np.int32)
            rows = np.arange(row, row + joint.num_rows)
            own[is_open] = rows
            request_of.append(np.full(count, index, dtype=np.int32))
            row_of.append(own)
            class_at.append(window.kinds)
            columns = end - joint.num_rows + np.arange(joint.num_rows)
            places.append(np.stack([num_positions + is_open.nonzero()[0], columns], axis=1))
            num_positions += count
            num_values += (count + 1) * language.num_states
            row += joint.num_rows
            base += tables.table.numel()
        self._num_values = num_values
        joined = [np.concatenate(part).astype(np.int32) for part in (request_of, row_of, class_at)]
        return numbers, scales, *joined, np.concatenate(places).astype(np.int32)
