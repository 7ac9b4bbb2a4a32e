"""Link installed packages, and what they need, into another environment of the same Python.

    python tools/share_packages.py build/empty torch numpy

So an environment has PyTorch and nothing else of ours without a second copy of it.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from dependencies import closure


def main(environment: Path, names: list[str]) -> None:
    ours = Path(sysconfig.get_path("platlib"))
    theirs = environment.absolute() / ours.relative_to(sys.prefix)
    for name in sorted(closure(*names)):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (theirs / top).exists():
                (theirs / top).symlink_to(ours / top)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
