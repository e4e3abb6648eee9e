# SPDX-License-Identifier: Apache-2.0
"""The description of the distribution: README.md without pictures and links to files, which a package index lacks."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(r"^(!\[[^]]*\]\(docs/.*|<p><img .*)\n", "", readme, flags=re.MULTILINE)
setup(
    long_description=re.sub(
        r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", readme
    ),  # the text of a link to a file
    long_description_content_type="text/markdown",
)
