# SPDX-License-Identifier: Apache-2.0
"""Names are the field's own, and one name means one thing."""

import ast
import collections
import io
import re
import tokenize
from pathlib import Path

import accelerate

ROOT = Path(accelerate.__file__).parent
# Former private words for things that have a common name, and that name.
REPLACED = {
    "Council": "Agreement",
    "council": "agreement",
    "Draft": "PendingCheckpoint",
    "GoingOn": "ResumeController",
    "Lane": "GatherBuffer",
    "Keeper": "RayWorker",
    "Traffic": "CommunicationVolume",
    "draw_alike": "sync_rng_state",
    "others_in_place": "swappable",
    "held_bytes": "memory_usage",
    "preside": "collect",
    "knock": "register",
    "heed": "handle",
    "open_gradients": "accumulated_gradients",
}


# Words that are not used in names, comments, docstrings and messages; "floor" is a term of arithmetic as well.
UNUSED = re.compile(
    r"\b(councils?|presid(e|es|ed|ing)|heed(s|ed)?|hear out|knock(s|ed)?|shout(s|ed)?|rubbish|mend(s|ed)?|parted by"
    r"|gives? up|houses?|ground floor|meetings?|traffic|wings?|kin|going on|hands? in|what it is made of|the field's"
    r"|afresh|lends?|lent|spoken)\b",
    re.IGNORECASE,
)


def files():
    return sorted(path for path in ROOT.rglob("*.py") if "utils" not in path.relative_to(ROOT).parts)


def test_no_former_name_is_left():
    found = []
    for path in files():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and token.string in REPLACED:
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string} -> {REPLACED[token.string]}")
    assert not found, "\n".join(found)


def test_no_private_word_is_left():
    found = []
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := UNUSED.search(line.replace("_", " ")):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()!r} in: {line.strip()}")
    assert not found, "\n".join(found)


def test_a_public_class_name_means_one_class():
    homes = collections.defaultdict(list)
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in twice.items())
