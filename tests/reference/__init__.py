# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious references that the engine is compared with.

Nothing here imports the engine: the model, the decoding loops and the random numbers are written
a second time from their public descriptions, so that one mistake cannot hide in both places.
"""
