# SPDX-License-Identifier: Apache-2.0
"""Write the `.pyi` stub of each module that exports names through `core.lazy.attach`.

    python tools/stubs.py            # write them
    python tools/stubs.py --check    # fail where a stub is absent or differs from what would be written

Type checkers and editors cannot follow a `__getattr__`; from the stub they know where each name is defined.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import accelerate

ROOT = Path(accelerate.__file__).parent
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of {module}. Change the table, then run the script.
"""


def lazy_modules() -> Iterator[tuple[Path, ModuleType]]:
    """Each module with a table of exports, and its file."""
    for path in sorted(ROOT.rglob("*.py")):
        if "attach(__name__, EXPORTS" in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            yield (
                path,
                importlib.import_module(".".join(part for part in parts if part != "__init__")),
            )


def stub(path: Path, module: ModuleType) -> str:
    """The text of a module's stub: one import for each exported name."""
    package = path.parent.relative_to(ROOT).parts
    names = {
        (_relative(package, home), name) for home, names in module.EXPORTS.items() for name in names
    }
    exported = {name for _, name in names}
    names |= {(".", name) for name in module.__all__ if name not in exported}
    if hasattr(module, "__version__"):
        names.add((".core.version", "__version__"))
    lines = [f"from {home} import {name} as {name}" for home, name in sorted(names)]
    return "\n".join(
        [HEADER.format(module=module.__name__), *lines, "", "EXPORTS: dict[str, list[str]]", ""]
    )


def _relative(package: tuple[str, ...], home: str) -> str:
    """The module `home`, a path inside accelerate, as a relative import in `package` names it."""
    parts = home.split(".")
    shared = 0
    while shared < min(len(package), len(parts) - 1) and package[shared] == parts[shared]:
        shared += 1
    return "." * (len(package) - shared + 1) + ".".join(parts[shared:])


def main(arguments: list[str]) -> int:
    """Write or check the stubs; the exit code."""
    differ = []
    for path, module in lazy_modules():
        target, text = path.with_suffix(".pyi"), stub(path, module)
        if target.exists() and target.read_text() == text:
            continue
        if "--check" in arguments:
            differ.append(str(target))
        else:
            target.write_text(text)
    if differ:
        print(
            "run `python tools/stubs.py`: these stubs do not match their tables:",
            *differ,
            sep="\n  ",
        )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
