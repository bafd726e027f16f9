# SPDX-License-Identifier: Apache-2.0
"""Guided output: answers that always match a schema, a regular expression or a choice."""
