# SPDX-License-Identifier: Apache-2.0
"""Model families: configuration, weights and stages."""
