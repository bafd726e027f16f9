# SPDX-License-Identifier: Apache-2.0
"""Purposes of a request's random numbers; each purpose has its own stream."""

from __future__ import annotations

TOKEN = 0  # Gumbel noise of a token, one per column
REMASKING = 1  # score of random remasking
CATEGORICAL = 2  # sampling of a token from its distribution, one per column
COMMIT = 3  # whether a position is committed
CHOICE = 4  # choice of the positions to commit
GUIDED = 5  # step of a joint sample, one per position
NOISE = 6  # random token of a canvas without a mask token, one per position
