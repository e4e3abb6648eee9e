# SPDX-License-Identifier: Apache-2.0
"""The description of the distribution: README.md without its pictures, which a package index cannot show."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r":\n\n!\[[^]]*\]\(docs/[^)]*\)\n", ".\n", readme),
    long_description_content_type="text/markdown",
)
