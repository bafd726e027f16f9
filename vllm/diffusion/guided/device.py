# SPDX-License-Identifier: Apache-2.0
"""Joint choices of all requests of a step on a GPU, with a constant number of launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import GUIDED, TOKEN
from vllm.diffusion.core.triton_kernels import power_of_two
from vllm.diffusion.guided import joint_kernel as kernel
from vllm.diffusion.guided.open_window import FREE, OPEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.diffusion.guided.language import Language

_TILE = 2048  # tokens per program
_SETS, _MEMBERS = 16, 16
_CLASSES, _CLASS_SEGMENTS = 16, 64
_STATES, _EDGES = 512, 16  # tile of states and edges of a program
_FIELDS = 32
_BYTES_OF_SEGMENT = 16  # bytes per segment: three fp32 numbers and a token
_MAX_SEGMENT_BYTES = 32 << 20  # maximum bytes of intermediate results of segments


class DeviceTables:
    """Languages on a device, concatenated in one table.

    Attributes:
        table: int32.
        offsets: by id of a language, the starts of its parts: segments, starts of classes, starts
            of sets, members, sets and targets of edges, room.
    """

    def __init__(self, languages: Iterable[Language], device: torch.device) -> None:
        self._kept = list(languages)
        self.offsets: dict[int, list[int]] = {}
        flat, end = [], 0
        for language in self._kept:
            parts = [part.astype(np.int32).ravel() for part in _parts(language)]
            begins = np.cumsum([end, *map(len, parts)]).tolist()
            self.offsets[id(language)] = begins[:-1]
            end = _aligned(begins[-1])  # start of the next language's segments
            flat += [*parts, np.zeros(end - begins[-1], dtype=np.int32)]
        (self.table,) = ops.to_device((np.concatenate(flat),), device)


def _parts(language: Language) -> tuple[ops.Array, ...]:
    return (
        language.segments.tokens,
        language.segments.starts,
        language.set_starts,
        language.set_members,
        language.edge_sets,
        language.edge_targets,
        language.room,
    )


class _LastTables:
    """Cache of the last step's languages, which the next step usually needs again."""

    tables: tuple[tuple[frozenset[int], str], DeviceTables] | None = None


def _tables(languages: Sequence[Language], device: torch.device) -> DeviceTables:
    distinct = {id(language): language for language in languages}
    key = (frozenset(distinct), str(device))
    # Read the attribute once, because kernels are compiled in several threads.
    cached = _LastTables.tables
    if cached is None or cached[0] != key:
        cached = _LastTables.tables = key, DeviceTables(distinct.values(), device)
    return cached[1]


class DeviceStep:
    """State of the joint choices of one step, filled as their logits are read.

    Args:
        joints: all `Joint`s of the step, after `gather`.
        device: device of their logits.
    """

    def __init__(self, joints: Sequence[Any], device: torch.device) -> None:
        self._joints, self._device = list(joints), device
        languages = [joint.language for joint in self._joints]
        tables = _tables(languages, device)
        self._table = tables.table
        self._num_rows = sum(joint.num_rows for joint in self._joints)
        most_segments = max(len(language.segments.tokens) for language in languages)
        self._width = languages[0].segments.tokens.shape[1]
        # Multiples of 16, so that Triton compiles one kernel for all languages.
        self._most_segments = _aligned(most_segments)
        self._most_classes = _aligned(max(language.num_classes for language in languages))
        self._drawn = {"DRAWN": any(joint.temperature > 0 for joint in self._joints)}
        numbers, self._num_values = _numbers(self._joints, tables)
        scales = np.array([joint.scales for joint in self._joints], dtype=np.float32)
        host = (numbers, scales, *_positions(self._joints))
        on_device = ops.to_device(host, device)
        self._numbers, self._scales, self._request_of, self._row_of, self._class_at = on_device[:5]
        self._places, self._row_at = on_device[5:]
        shape = (self._num_rows, self._most_classes)
        self._weights = torch.empty(shape, dtype=torch.float32, device=device)
        self._logprobs = torch.empty(shape, dtype=torch.float32, device=device)
        self._tokens = torch.empty(shape, dtype=torch.int32, device=device)

    def read(self, logits: torch.Tensor, first_column: int) -> None:
        """Read whole rows [r, V] of logits: sample rows of the step, from `first_column` on.

        Rows of other requests are skipped.
        """
        max_rows = max(_MAX_SEGMENT_BYTES // (_BYTES_OF_SEGMENT * self._most_segments), 1)
        for start in range(0, len(logits), max_rows):
            self._read(logits[start : start + max_rows], first_column + start)

    def _read(self, logits: torch.Tensor, first_column: int) -> None:
        num, num_segments = len(logits), self._most_segments
        weights = torch.empty(3, num, num_segments, dtype=torch.float32, device=self._device)
        tokens = torch.empty(num, num_segments, dtype=torch.int32, device=self._device)
        segments = max(_TILE // self._width, 1)
        given = (self._row_at, len(self._row_at), self._places, self._numbers)
        kernel.read_kernel[(num, -(-num_segments // segments))](
            *(logits, logits.stride(0), first_column, *given, self._scales, self._table),
            *(*weights, tokens, num_segments),
            PURPOSE=TOKEN,
            SEGMENTS=segments,
            WIDTH=self._width,
            **self._drawn,
        )
        kernel.class_kernel[(num, self._most_classes // _CLASSES)](
            *(first_column, *given, self._table, *weights, tokens, num_segments),
            *(self._weights, self._logprobs, self._tokens, self._most_classes),
            PURPOSE=TOKEN,
            CLASSES=_CLASSES,
            MEMBERS=_CLASS_SEGMENTS,
            BLOCK=1024,
            **self._drawn,
        )

    def choose(self, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the tokens, and write them into `sampled` [3 or more, columns] fp64.

        Returns:
            tokens [R] int64 and their log probabilities [R] float64.
        """
        languages = [joint.language for joint in self._joints]
        num = len(self._row_of)
        most_sets = _aligned(max(language.num_sets for language in languages) + 1)
        weights = torch.empty(num, most_sets, dtype=torch.float32, device=self._device)
        values = torch.empty(self._num_values, dtype=torch.float32, device=self._device)
        chosen = torch.empty(num, dtype=torch.int32, device=self._device)
        width = max(language.edge_sets.shape[1] for language in languages)
        kernel.set_kernel[(num, most_sets // _SETS)](
            *(self._numbers, self._request_of, self._row_of, self._class_at, self._table),
            *(self._weights, weights, self._most_classes, most_sets),
            SETS=_SETS,
            MEMBERS=_MEMBERS,
            **self._drawn,
        )
        kernel.choose_kernel[(len(self._joints),)](
            *(self._numbers, self._row_of, self._table, weights, values, chosen, most_sets),
            PURPOSE=GUIDED,
            STATES=_STATES,
            EDGES=_EDGES,
            WIDEST=max(_EDGES, power_of_two(width)),
            num_warps=16,
            **self._drawn,
        )
        tokens = torch.empty(self._num_rows, dtype=torch.int64, device=self._device)
        logprobs = torch.empty(self._num_rows, dtype=torch.float64, device=self._device)
        kernel.token_kernel[(self._num_rows,)](
            *(self._numbers, self._places, self._table, self._weights, self._logprobs),
            *(self._tokens, chosen, sampled, sampled.stride(0), logprobs, tokens),
            self._most_classes,
            PURPOSE=TOKEN,
            MEMBERS=64,
            num_warps=1,
            **self._drawn,
        )
        return tokens, logprobs


def _aligned(count: int) -> int:
    return -(-count // 16) * 16


def _numbers(joints: Sequence[Any], tables: DeviceTables) -> tuple[ops.Array, int]:
    """Return the kernels' parameters of requests [J, 32], and the number of values they store."""
    numbers = np.zeros((len(joints), _FIELDS), dtype=np.int64)
    num_positions = num_values = 0
    for fields, joint in zip(numbers, joints, strict=True):
        language, window = joint.language, joint.window
        tokens, classes, sets, members, *edges, room = tables.offsets[id(language)]
        count = len(window.kinds)
        excluded = (*joint.excluded, -1, -1)[:2]
        fields[:25] = (
            *(sets, members, language.num_sets, joint.temperature > 0),
            *(*edges, room, language.num_states, language.edge_sets.shape[1]),
            *(num_positions, count, num_values, window.start, window.left),
            *(joint.seed & 0xFFFFFFFF, joint.seed >> 32, joint.step, window.first),
            *(joint.sets_scores, *excluded),
            *(len(language.segments.tokens), tokens, classes, language.num_classes),
        )
        num_positions += count
        num_values += (count + 1) * language.num_states
    return numbers, num_values


def _positions(joints: Sequence[Any]) -> tuple[ops.Array, ...]:
    """Return the index arrays of N positions, R rows and the step's sample rows.

    Returns:
        int32: request of every position; its row (-1 if it has a token, -2 if any token may follow
        later); class of its token; [R, 3] position, column and request of every row; row of every
        column, -1 for none.
    """
    kinds = np.concatenate([joint.window.kinds for joint in joints])
    requests = np.arange(len(joints))
    request_of = np.repeat(requests, [len(joint.window.kinds) for joint in joints])
    is_open = kinds == OPEN
    row_of = np.where(is_open, np.cumsum(is_open) - 1, np.where(kinds == FREE, -2, -1))
    counts = np.array([joint.num_rows for joint in joints])
    ends = np.array([joint.end for joint in joints])
    columns = np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
    row_at = np.full(ends[-1], -1)
    row_at[columns] = np.arange(len(columns))
    places = np.stack([is_open.nonzero()[0], columns, np.repeat(requests, counts)], axis=1)
    parts = (request_of, row_of, kinds, places, row_at)
    return tuple(np.ascontiguousarray(part, dtype=np.int32) for part in parts)
