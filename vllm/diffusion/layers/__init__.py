# SPDX-License-Identifier: Apache-2.0
"""Row-wise stages of a transformer layer, and the attention between them.

A stage accepts any chunk of rows of the packed batch, the empty one included, and writes into the
buffers that it is given, so that the caller decides what is resident and how many rows are in
flight. Weights belong to upstream's parallel layers; the stages only read them.
"""
