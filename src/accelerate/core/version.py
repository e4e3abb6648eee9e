# SPDX-License-Identifier: Apache-2.0
"""The version of this package and of the API that it implements, defined only here.

MAJOR.MINOR is that of the API with 1000 added to the minor number: 1.1015 implements API 1.15. This satisfies the
requirements of client packages (`>=1.1.0`, `~=1.1`, `<2`) and is newer than each release of the other distribution of
this name with the same major number, so that `pip install -U` keeps this package. The last number counts our releases.
"""

__version__ = "1.1015.0"
# The version of the Accelerate API.
API_VERSION = "1.15"


def implemented() -> str:
    """Both versions, for errors about what the API does not have."""
    return f"accelerate {__version__} implements version {API_VERSION} of the API"
