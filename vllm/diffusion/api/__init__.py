# SPDX-License-Identifier: Apache-2.0
"""The HTTP API: `/generate`, upstream's routes, and the validation of every request."""
