# SPDX-License-Identifier: Apache-2.0
"""The version of this package, defined only here.

MAJOR.MINOR is the version of the Accelerate API that the package implements, with 1000 added to the minor number:
1.1015 implements API 1.15. This satisfies the requirements of client packages (`>=1.1.0`, `~=1.1`, `<2`) and is newer
than each release of the other distribution of this name with the same major number, so that `pip install -U` keeps
this package. The last number counts our own releases.
"""

__version__ = "1.1015.0"
