# SPDX-License-Identifier: Apache-2.0
"""Joint choice of a request's tokens in a forward pass, whose logits are read as they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.logprobs import Logprobs
from vllm.diffusion.core.random_streams import GUIDED, TOKEN
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.triton_kernels import IS_INTERPRETED
from vllm.diffusion.guided.language import Language
from vllm.diffusion.guided.open_window import (
    OPEN,
    CandidateRows,
    OpenWindow,
    choose,
    num_uniform,
    read,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm.diffusion.guided.device import DeviceStep
    from vllm.diffusion.ops import Array

_ROWS = 2  # rows of each choice that compiles kernels
# Kernels are specialised by the number of a state's edges, rounded up to a power of two.
_EDGES = (16, 32, 64)


@dataclass(eq=False)
class Joint:
    """The tokens that one forward pass of a request chooses together.

    Attributes:
        language: language of the answer.
        window: positions to choose for.
        temperature: 0 selects the best string; above 0 a string is drawn.
        seed, step: keys of the request's random numbers.
        is_tempered: whether confidences are computed at the temperature.
        sets_scores: whether the probability of a candidate's token becomes its score; otherwise the
            score of sampling is kept.
        excluded: at most two token ids whose probability counts as zero.
        num_logprobs: number of most likely tokens reported with the log probabilities; None if no
            log probabilities are requested.
        peers: all joint choices of the step, including this one.
        end: end (last + 1) of its columns among all sample rows of the step.
        num_seen: number of rows read so far.
        on_device: state of the step's choices on a device; None on the host.
    """

    language: Language
    window: OpenWindow
    temperature: float
    seed: int
    step: int
    is_tempered: bool
    sets_scores: bool
    excluded: tuple[int, ...] = ()
    num_logprobs: int | None = None
    peers: Sequence[Joint] = ()
    end: int = 0
    num_seen: int = 0
    on_device: DeviceStep | None = None
    _read: list[CandidateRows] = field(default_factory=list)

    @cached_property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self.window.kinds == OPEN))

    @property
    def scales(self) -> tuple[float, float]:
        """Factors of the logits for the draw and for the score."""
        scale = 1 / self.temperature if self.temperature > 0 else 1.0
        return scale, scale if self.is_tempered else 1.0

    @property
    def first_column(self) -> int:
        """Column of the next row of logits in the step's tensor of samples."""
        return self.end - self.num_rows + self.num_seen

    def rows_among(self, positions: Array) -> slice:
        """Return the range of this choice's rows among ascending canvas positions."""
        start, stop = np.searchsorted(positions, [self.window.first, self.window.stop])
        return slice(int(start), int(stop))

    def read(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Read whole rows of logits [R, V] of canvas `positions` [R], which ascend."""
        uniform = None
        if self.temperature > 0:
            columns = range(num_uniform(self.language))
            uniform = ops.philox_uniform(self.seed, TOKEN, self.step, positions, columns).numpy()
        row_logits = logits.float().numpy()
        choice = read(
            self.language, row_logits, uniform, self.temperature, is_tempered=self.is_tempered
        )
        self._read.append(choice)

    def device_step(self, logits: torch.Tensor) -> DeviceStep:
        """Return the step's state on the device of `logits`; it is created at first use."""
        if self.on_device is None:
            from vllm.diffusion.guided.device import DeviceStep

            step = DeviceStep(self.peers, logits.device)
            for joint in self.peers:
                joint.on_device = step
            return step
        return self.on_device

    def choose(self) -> tuple[Array, Array]:
        """Choose on the host; return tokens [R] int64 and log probabilities [R] of all rows."""
        rows = CandidateRows(*(np.concatenate(parts) for parts in zip(*self._read, strict=True)))
        window, draws = self.window, None
        if self.temperature > 0:
            positions = torch.arange(window.first, window.first + len(window.kinds))
            drawn = ops.philox_uniform(self.seed, GUIDED, self.step, positions, range(1))
            draws = drawn[:, 0].numpy()
        chosen = choose(self.language, window, rows, draws)[:, None]
        tokens = np.take_along_axis(rows.tokens, chosen, axis=1)[:, 0]
        logprobs = np.take_along_axis(rows.logprobs, chosen, axis=1)[:, 0]
        return tokens, logprobs


def gather(joints: Sequence[Joint], ends: Sequence[int]) -> None:
    """Link the joint choices of one step.

    Args:
        joints: joint choices in the order of their rows.
        ends: for each choice, the end (last + 1) of its columns among all sample rows.
    """
    for joint, end in zip(joints, ends, strict=True):
        joint.peers, joint.end = joints, end


def read_all(logits: torch.Tensor, readers: Sequence[tuple[Joint, slice, torch.Tensor]]) -> None:
    """Read rows of logits for the joint choices of one step.

    Args:
        logits: [R, V], consecutive sample rows.
        readers: choices with their rows and canvas positions, in order; other rows may be between.
    """
    lead, rows, _ = readers[0]
    if logits.is_cuda or IS_INTERPRETED:
        lead.device_step(logits).read(logits, lead.first_column - rows.start)
        for joint, joint_rows, _ in readers:
            joint.num_seen += joint_rows.stop - joint_rows.start
        return
    for joint, joint_rows, positions in readers:
        joint.read(logits[joint_rows], positions)


def choose_all(samples: Samples[torch.Tensor], joints: Sequence[Joint]) -> None:
    """Replace tokens that were sampled row by row with the joint choices, in place.

    Args:
        samples: all samples of the step; changed.
        joints: the choices of a step, all of whose rows have been read.
    """
    step = joints[0].on_device
    if step is not None:
        tokens, logprobs = step.choose(samples.table)
    else:
        choices = [joint.choose() for joint in joints]
        tokens, logprobs = (torch.from_numpy(np.concatenate(x)) for x in zip(*choices, strict=True))
    start = 0
    for joint in joints:
        joint_samples: Samples[torch.Tensor] = Samples(
            samples.table[:, joint.end - joint.num_rows : joint.end]
        )
        rows = slice(start, start + joint.num_rows)
        start = rows.stop
        if step is None:
            _put(joint_samples, tokens[rows], logprobs[rows], joint)
        if joint.num_logprobs is not None:
            _put_logprobs(joint_samples, logprobs[rows], joint.num_logprobs)


def _put(
    samples: Samples[torch.Tensor], tokens: torch.Tensor, logprobs: torch.Tensor, joint: Joint
) -> None:
    """Write tokens [R] and their scores into samples."""
    samples.tokens.copy_(tokens)
    samples.greedy.copy_(tokens)
    if joint.sets_scores:
        scores = torch.exp(logprobs)
        for token in joint.excluded:
            scores = scores.masked_fill(tokens == token, 0.0)
        samples.scores.copy_(scores)


def _put_logprobs(samples: Samples[torch.Tensor], logprobs: torch.Tensor, num_top: int) -> None:
    """Write log probabilities [R]; ranks are counted only among the most likely tokens."""
    unpacked = Logprobs.unpack(samples.extras, num_top)
    ranks = 1 + (unpacked.top > logprobs).sum(dim=0)
    for value, rank in (
        (unpacked.token, unpacked.token_rank),
        (unpacked.greedy, unpacked.greedy_rank),
    ):
        value.copy_(logprobs)
        rank.copy_(ranks)


def kernel_calls(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Yield joint choices, each of which compiles kernels that the others do not.

    Logits have `dtype`, and edited logits are fp32.
    """
    for temperature in (0.0, 1.0):
        for kind, edges in ((dtype, _EDGES), (torch.float32, _EDGES[:1])):
            for num_edges in edges:
                language = _any_tokens(vocab_size, num_edges)
                yield partial(_choose_zeros, language, temperature, kind, device)


def _any_tokens(vocab_size: int, num_edges: int) -> Language:
    """Return the language of all strings, which the last token ends; most edges are unused."""
    of_token = np.zeros(vocab_size, dtype=np.int16)
    of_token[-1] = 1
    edges = np.full((2, num_edges), 2, dtype=np.int32)
    targets = np.zeros((2, num_edges), dtype=np.int32)
    edges[0, :2], targets[0, :2] = (0, 1), (0, 1)
    starts, members = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int16)
    return Language(of_token, starts, members, edges, targets, np.zeros(2, dtype=np.int32))


def _choose_zeros(
    language: Language, temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Choose for rows of zeros."""
    window = OpenWindow(0, 0, np.full(_ROWS, OPEN, dtype=np.int32), 0)
    joint = Joint(language, window, temperature, 0, 0, is_tempered=False, sets_scores=True)
    gather([joint], [_ROWS])
    logits = torch.zeros(_ROWS, len(language.class_of_token), dtype=dtype, device=device)
    positions = torch.arange(_ROWS, device=device)
    read_all(logits, [(joint, slice(0, _ROWS), positions)])
    choose_all(Samples(torch.zeros(3, _ROWS, dtype=torch.float64, device=device)), [joint])
