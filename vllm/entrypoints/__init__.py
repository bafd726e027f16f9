# SPDX-License-Identifier: Apache-2.0
"""Entry of the sub-package: this folder is searched first, upstream's folder second."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
