# SPDX-License-Identifier: Apache-2.0
"""Revision of texts: which tokens are masked again, and how two texts differ."""
