# SPDX-License-Identifier: Apache-2.0
"""The page at `/docs`: every route with its fields and example requests.

Swagger UI renders it from `/openapi.json`. Upstream's package contains the Swagger UI library, so
the page works without access to other hosts.
"""
