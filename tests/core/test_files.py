# SPDX-License-Identifier: Apache-2.0
"""Files of a fixed name are opened without waiting, and never through a link that is written to."""

from __future__ import annotations

import os

import pytest

from accelerate.core.files import open_regular


@pytest.mark.timeout(30)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_pipes_folders_and_links(tmp_path, flags):
    notes = tmp_path / "notes"
    notes.write_text("kept")
    os.close(open_regular(notes, flags))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"regular file|irectory|No such device"):
            open_regular(path, flags)
    (tmp_path / "link").symlink_to(notes)
    if flags == os.O_RDONLY:
        os.close(open_regular(tmp_path / "link", flags))
    else:
        with pytest.raises(OSError, match="link"):
            open_regular(tmp_path / "link", flags)
    assert notes.read_text() == "kept"
