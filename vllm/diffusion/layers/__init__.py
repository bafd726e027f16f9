# SPDX-License-Identifier: Apache-2.0
"""Row-wise stages of a transformer layer, and the attention between them.

A stage accepts any chunk of rows of the packed batch, including an empty one, and writes to the
given buffers. So the caller decides which buffers stay in memory and how many rows are computed at
a time. Weights belong to upstream's parallel layers; the stages only read them.
"""
