# SPDX-License-Identifier: Apache-2.0
"""The `accelerate` command as a script, for launches that are forked from the rank server.

launcher.py NAMESPACE WORDS...    # of the command, in a network namespace; "" for none
"""

import ctypes
import sys

from accelerate.commands.main import main

namespace = sys.argv.pop(1)
if namespace:
    with open(f"/var/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
main()
