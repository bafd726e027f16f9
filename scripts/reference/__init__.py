# SPDX-License-Identifier: Apache-2.0
"""Slow and obvious references for comparison with the engine.

Nothing here imports the engine. The models, the decoding loops and the random numbers are written a
second time from their public descriptions, so that a mistake in one implementation is detected.
"""
