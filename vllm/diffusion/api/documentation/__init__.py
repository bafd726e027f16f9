# SPDX-License-Identifier: Apache-2.0
"""The page at `/docs`: every route with its fields, and requests to try.

Swagger UI draws it from `/openapi.json`; upstream's package brings that library, so the page works
where nothing but the server can be reached.
"""
