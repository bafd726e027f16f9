# SPDX-License-Identifier: Apache-2.0
"""Purposes of a request's random numbers; each has its own stream."""

from __future__ import annotations

TOKEN = 0  # Gumbel noise of a token, one per column
REMASKING = 1  # score of random remasking
CATEGORICAL = 2  # draw of a token from its distribution, one per column
COMMIT = 3  # whether a position is committed
CHOICE = 4  # which positions are committed
GUIDED = 5  # a step of a joint draw, one per position
