# SPDX-License-Identifier: Apache-2.0
"""A plain model of the revision of a text by LLaDA2.2, which tests compare with the rule."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm.diffusion.decoding.base import Array
from vllm.diffusion.request.params import DiffusionParams


@dataclass
class Token:
    """A token of the stream: whether it is pinned, the canvas's own mask, or of the text."""

    id: int
    is_pinned: bool = False
    is_own: bool = True
    is_text: bool = False


@dataclass
class Plain:
    """Revises a text block by block, with lists.

    Attributes:
        params: parameters of the request.
        prompt: its prompt.
        logits: the model: from a sequence and the start of a block, the logits [B, V] of the block.
        most_steps: most forward passes of a block.
        settled: prompt and finished blocks.
        stream: everything after them.
        steps: number of forward passes of each block with a change, by its number.
    """

    params: DiffusionParams
    prompt: list[int]
    logits: Callable[[Array, int], Array]
    most_steps: int

    def __post_init__(self) -> None:
        params, self.settled = self.params, list(self.prompt)
        self.mask, self.delete, self.split = params.mask_id, *params.edit_ids
        revision = params.revision
        assert revision is not None
        ids, is_pinned = revision.token_ids, revision.is_pinned(len(revision.token_ids))
        end = revision.num_before_end(params.stop_ids)
        pairs = enumerate(zip(ids, is_pinned, strict=True))
        self.stream = [
            Token(i, bool(p) and i != self.mask, True, at < end and i != self.mask)
            for at, (i, p) in pairs
        ]
        self.has_masks = not params.ends_with_text
        self.most = len(self.prompt) + params.max_tokens
        if self.has_masks:
            self.stream += [Token(self.mask) for _ in range(params.max_tokens - len(ids))]
        self.steps: dict[int, int] = {}
        self.last_open = 0

    def run(self) -> "Plain":
        length = self.params.block_length
        while any(not token.is_pinned for token in self.stream):
            self.last_open = number = len(self.settled) // length
            room = (number + 1) * length - len(self.settled)
            self.wants_change = False
            num_steps = self._block(room)
            if self.wants_change:
                self.steps[number] = num_steps
            self.settled += [token.id for token in self.stream[:room]]
            del self.stream[:room]
        self.settled += [token.id for token in self.stream]
        return self

    @property
    def num_forwards(self) -> int:
        ends_last = bool(self.steps) and max(self.steps) == self.last_open
        return sum(self.steps.values()) + (not ends_last)

    def _rows(self, room: int) -> Array:
        """Return the probabilities [R, V] of the tokens that may be written in each row."""
        ids = [*self.settled, *(token.id for token in self.stream)]
        unit = self.params.block_length
        start = len(self.settled) // unit * unit
        ids += [self.params.pad_id] * (start + unit - len(ids))
        rows = self.logits(np.array(ids), start)[len(self.settled) - start :][:room]
        rows[:, self.mask] = -np.inf
        last = max((at for at, token in enumerate(self.stream) if token.is_text), default=-1)
        rows[: last + 1, list(self.params.stop_ids)] = -np.inf
        odds = np.exp(rows - rows.max(axis=1, keepdims=True))
        result: Array = odds / odds.sum(axis=1, keepdims=True)
        return result

    def _block(self, room: int) -> int:
        """Decode the block of the first `room` tokens, and return its number of forward passes."""
        params, seen = self.params, set[tuple[int | None, ...]]()
        steps = params.steps_per_block or params.block_length
        num_own = sum(t.id == self.mask and t.is_own for t in self.stream[:room])
        num_post = 0
        for step in range(self.most_steps):
            block, odds = self.stream[:room], self._rows(room)
            ranked = [np.argsort(-row, kind="stable")[:3].tolist() for row in odds]
            best = [float(row.max()) for row in odds]
            masked = [at for at, token in enumerate(block) if token.id == self.mask]
            filled = self._filled(block, best, masked, step, steps, num_own)
            own = {at for at in masked if block[at].is_own}
            is_last = num_post >= params.max_post_steps > 0 or step + 1 >= self.most_steps
            if not params.max_post_steps:
                is_last |= bool(own) and own <= filled
            if is_last:
                filled = set(masked)
            written = [token.id for token in block]
            for at, token in enumerate(block):
                choice = ranked[at][0]
                if is_last:
                    choice = next(t for t in ranked[at] if t not in (self.delete, self.split))
                is_edited = token.id not in (self.mask, ranked[at][0]) and not token.is_pinned
                is_edited &= best[at] > params.editing_threshold
                self.wants_change |= is_edited or at in masked
                if at in filled or is_edited:
                    written[at] = choice
            if not is_last:
                self._swap([token.id for token in block], written, best, ranked, seen)
            seen.add(self._padded(written, room))
            before = [token.id for token in block]
            self._write(written, room)
            after = self.stream[:room]
            has_masks = any(token.id == self.mask for token in after)
            has_own = any(token.id == self.mask and token.is_own for token in after)
            num_post = 0 if has_own else num_post + 1
            rest = [self.params.pad_id] * (room - len(after))
            is_stable = [*(t.id for t in after), *rest][: len(before)] == before
            is_stable &= all(token.id == self.params.pad_id for token in after[len(before) :])
            if not has_masks and (is_stable or num_post > params.max_post_steps):
                return step + 1
        return self.most_steps

    def _filled(
        self,
        block: list[Token],
        best: list[float],
        masked: list[int],
        step: int,
        steps: int,
        num_own: int,
    ) -> set[int]:
        if step >= steps:
            return set(masked)
        quota = num_own // steps + (step < num_own % steps)
        needed = quota + sum(not block[at].is_own for at in masked)
        filled = {at for at in masked if best[at] > self.params.threshold}
        if len(filled) < needed:
            filled = set(sorted(masked, key=lambda at: -best[at])[:needed])
        return filled

    def _padded(self, written: list[int], room: int) -> tuple[int | None, ...]:
        return (*written, *[self.params.pad_id] * (room - len(written)))

    def _swap(
        self,
        before: list[int],
        written: list[int],
        best: list[float],
        ranked: list[list[int]],
        seen: set[tuple[int | None, ...]],
    ) -> None:
        for _ in range(5):
            changed = [at for at in range(len(before)) if written[at] != before[at]]
            room = max((len(one) for one in seen), default=0)
            if not changed or self._padded(written, room) not in seen:
                return
            weakest = min(changed, key=lambda at: best[at])
            first, second, _ = ranked[weakest]
            written[weakest] = second if written[weakest] == first else first

    def _write(self, written: list[int], room: int) -> None:
        """Replace the tokens of the block by `written`, and close or open gaps in the stream."""
        last = max((at for at, token in enumerate(self.stream) if token.is_text), default=-1)
        inserts = [at for at, token in enumerate(written) if token == self.split and at <= last]
        num_deleted = sum(token == self.delete for token in written[: last + 1])
        free = self.most - len(self.settled) - last - 1
        for at in inserts[max(free + num_deleted, 0) :]:
            written[at] = self.stream[at].id
        size, block = len(self.stream), list[Token]()
        for token, old in zip(written, self.stream, strict=False):
            if token == self.split:
                block += [Token(self.mask, is_own=False), old]
            elif token != self.delete:
                block.append(Token(token, old.is_pinned, old.is_own, old.is_text))
        self.stream = [*block, *self.stream[len(written) :]][: self.most - len(self.settled)]
        if self.has_masks:
            missing = range(len(self.stream), size)
            self.stream += [Token(self.mask, is_own=at >= room) for at in missing]
