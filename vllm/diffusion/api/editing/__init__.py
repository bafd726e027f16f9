# SPDX-License-Identifier: Apache-2.0
"""Routes that revise texts."""
