#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/decoding.md: what each decoding algorithm commits, step by step.

    PYTHONPATH=. .venv/bin/python scripts/draw_algorithms.py

The rules are the engine's rules. In place of a model there are confidences that are the same in
every picture: some positions are easy, and all positions become easier when their neighbours are
known.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from vllm.diffusion.decoding import Candidates, make_rule  # noqa: E402
from vllm.diffusion.request import decision, fields  # noqa: E402
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS  # noqa: E402
from vllm.diffusion.request.families import (  # noqa: E402
    FAST_DLLM,
    IDLM,
    LLADA,
    LLADA21,
    LLADA22,
    NEMOTRON,
    SDAR,
)
from vllm.diffusion.request.served_model import ServedModel, SpecialIds  # noqa: E402

if TYPE_CHECKING:
    from vllm.diffusion.request.algorithms import Algorithm

FOLDER = ROOT / "docs" / "images" / "algorithms"
MASK, LENGTH, BLOCK, PROMPT = 15, 32, 8, 8
MAX_STEPS = 40
FAMILIES = {
    "hierarchy_block": FAST_DLLM,
    "joint_threshold": LLADA21,
    "levenshtein": LLADA22,
    "self_speculation": NEMOTRON,
    "autoregressive": NEMOTRON,
    "introspective": IDLM,
}
EDITS = (12, 13)
ASKED: dict[str, dict[str, object]] = {
    "semi_ar": {"steps": 16},
    "dream": {"steps": 16},
    "low_confidence_dynamic": {"steps": 16},
    "sequential": {"steps": 16},
    "levenshtein": {"steps": 16, "threshold": 0.9},
    "full_attn_multi_block": {"threshold": 0.3},
    "multi_block": {"threshold": 0.3},
    "hierarchy_block": {"threshold": 0.9, "sub_block_length": 4},
}
CELL, GAP, BETWEEN = 11, 2, 6  # pixels
STYLE = """
.m{fill:#1f1d1a;opacity:.05}.p{fill:#1f1d1a}.c,.n,.e{fill:#bf4a1b}.e{stroke:#1f1d1a;stroke-width:1.5}
@media (prefers-color-scheme:dark){.m,.p{fill:#ece8df}.c,.n,.e{fill:#ee8250}.e{stroke:#ece8df}}
"""


def confidences(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the confidences [R] float64 of candidates; known tokens around them raise them."""
    ease = np.random.default_rng(7).beta(2.2, 1.6, size=PROMPT + LENGTH + 2 * BLOCK)
    known = np.append(tokens != MASK, np.zeros(4, dtype=bool))
    around = sum(known[positions + d] for d in (-2, -1, 1, 2)) / 4
    return np.minimum(0.6 + 0.36 * ease[positions] + 0.18 * around, 0.995)


def steps_of(algorithm: Algorithm) -> list[list[tuple[str, float]]]:
    """Return, for every step, each canvas position's kind and its candidate's confidence."""
    is_block = algorithm.is_block_causal
    family = FAMILIES.get(algorithm.name, SDAR) if is_block else LLADA
    model = ServedModel(family, SpecialIds(MASK, 14, None, frozenset(), edit=EDITS), 4096, 16)
    request = {"algorithm": algorithm.name, "gen_length": LENGTH, **ASKED.get(algorithm.name, {})}
    if algorithm.blocks != "none":
        request["block_length"] = BLOCK
    params = decision.decide(fields.canonical(request), model, [1] * PROMPT)
    rule = make_rule(params, PROMPT)
    tokens = np.array([1] * PROMPT + [MASK] * LENGTH)
    sure = np.zeros(LENGTH + PROMPT)
    rows: list[list[tuple[str, float]]] = []
    while len(rows) < MAX_STEPS and (target := rule.prepare(tokens)) is not None:
        positions = target.eligible[target.eligible < len(tokens)]
        if not positions.size or rule.num_settled(tokens) >= len(tokens):
            break
        known = confidences(tokens, positions)
        # A few positions get another candidate token once all tokens around them are known.
        proposed = np.where((positions % 7 == 3) & (known > 0.8), 2, 1)
        scores = 3 * (known - 1) if _is_entropy(algorithm) else known
        if rule.adjusts_logits:  # The rule reads more than the likeliest token.
            rule.adjust_logits(_logits(proposed, known), torch.from_numpy(positions - PROMPT))
        draws = np.random.default_rng(len(rows)).random(len(positions))
        commit = rule.decide(Candidates(positions, proposed, scores, proposed, draws))
        rows.append(_row(tokens, sure, dict(zip(positions, known, strict=True)), commit))
        tokens[commit.positions] = commit.tokens
    return rows


def _logits(proposed: np.ndarray, probabilities: np.ndarray) -> torch.Tensor:
    """Return logits [R, 16] that give the proposed tokens these probabilities."""
    rest = np.repeat((1 - probabilities)[:, None] / 15, 16, axis=1)
    rest[np.arange(len(probabilities)), proposed] = probabilities
    return torch.from_numpy(np.log(rest))


def _is_entropy(algorithm: Algorithm) -> bool:
    return algorithm.score in ("entropy", "alg")


def _row(
    tokens: np.ndarray, sure: np.ndarray, confidences: dict[int, float], commit: object
) -> list[tuple[str, float]]:
    new = dict(zip(commit.positions.tolist(), commit.tokens.tolist(), strict=True))  # type: ignore[attr-defined]
    row = []
    for position in range(PROMPT, PROMPT + LENGTH):
        before = tokens[position]
        if position in new and new[position] not in (MASK, before):
            sure[position] = confidences[position]
            row.append(("n" if before == MASK else "e", 1.0))
        elif before != MASK:
            row.append(("c", 0.12 + 0.4 * sure[position] ** 2))
        elif position in confidences:
            row.append(("p", 0.06 + 0.3 * confidences[position] ** 3))
        else:
            row.append(("m", 0.0))
    return row


def drawn(algorithm: Algorithm) -> str:
    """Draw the picture as SVG: one row per step, one column per canvas position."""
    rows = steps_of(algorithm)
    width = LENGTH * CELL + (LENGTH // BLOCK - 1) * BETWEEN
    height = len(rows) * CELL
    size = CELL - GAP
    cells: dict[str, list[str]] = {}  # cells by their attributes
    for y, row in enumerate(rows):
        for x, (kind, shade) in enumerate(row):
            opacity = "" if kind in "mne" else f' opacity="{round(shade * 20) / 20:g}"'
            corner = f"M{x * CELL + x // BLOCK * BETWEEN} {y * CELL}"
            cells.setdefault(f'class="{kind}"{opacity}', []).append(
                f"{corner}h{size}v{size}h-{size}z"
            )
    title = f"{algorithm.name}: {LENGTH} tokens in blocks of {BLOCK}, {len(rows)} steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width + 2} {height + 2}" '
        f'width="{width + 2}" role="img">\n<title>{title}</title>\n<style>{STYLE}</style>\n'
        + "\n".join(f'<path {look} d="{"".join(parts)}"/>' for look, parts in sorted(cells.items()))
        + "\n</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """Draw all pictures; the keys are their files."""
    return {
        FOLDER / f"{'block' if a.is_block_causal else 'full'}_{a.name}.svg": drawn(a)
        for a in (*ALGORITHMS.values(), *BLOCK_ALGORITHMS.values())
        if not a.is_open  # every step changes the whole canvas
    }


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pictures().items():
        file.write_text(text)
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
