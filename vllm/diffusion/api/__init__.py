# SPDX-License-Identifier: Apache-2.0
"""HTTP: the `/generate` route, and the validation of every request."""
