# SPDX-License-Identifier: Apache-2.0
"""The version of this package and of the API that it implements, defined only here."""

__version__ = "2.0.0.dev0"
# The version of the Accelerate API.
API_VERSION = "1.15"


def implemented() -> str:
    """Both versions, for errors about what the API does not have."""
    return f"accelerate {__version__} implements version {API_VERSION} of the API"
