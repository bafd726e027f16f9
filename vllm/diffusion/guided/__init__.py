# SPDX-License-Identifier: Apache-2.0
"""Guided output: answers that match a schema, a regex or a choice, by construction."""
