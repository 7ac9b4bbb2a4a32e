"""The package as others get it: version, citation, README on an index, licences, materials."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import transduce

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_at(path):
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


index_readme = module_at(ROOT / "hatch_build.py").index_readme
RELATIVE = r"\]\((?!\w+:|#)"


def test_the_citation_and_the_changelog_name_the_version_and_its_date():
    citation = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.M))
    assert fields["version"] == transduce.__version__
    assert fields["license"] == PROJECT["license"]
    released = f"## {transduce.__version__} - {fields['date-released']}"
    assert released in (ROOT / "CHANGELOG.md").read_text().splitlines()


def test_without_an_address_the_index_shows_no_picture_and_no_dead_link(readme):
    assert re.search(RELATIVE, readme)
    shown = index_readme(readme, "")
    assert not re.search(RELATIVE, shown)
    assert "![" not in shown
    assert "departures" in shown, "the text of a link stays"
    assert "(https://arxiv.org/abs/1211.3711)" in shown
    text = "![A](docs/a.png)\n\n*The caption.*\n\nMore [about *it*](docs/b.md#c), [here](#d).\n"
    assert index_readme(text, "") == "More about *it*, [here](#d).\n"
    assert index_readme("![A](https://x.org/a.png)", "") == "![A](https://x.org/a.png)"


def test_with_an_address_all_links_and_pictures_lead_there(readme):
    for address in ("https://example.org/raw/main", "https://example.org/raw/main/"):
        shown = index_readme(readme, address)
        assert not re.search(RELATIVE, shown)
        links = re.findall(r"\]\(https://example\.org/raw/main/([^)#]*)", shown)
        assert len(links) == len(re.findall(RELATIVE, readme))
        assert all((ROOT / link).exists() for link in links)


def test_the_licences_of_all_direct_dependencies_are_listed():
    page = (ROOT / "docs" / "licences.md").read_text()
    extras = PROJECT["optional-dependencies"]
    needed = list(PROJECT["dependencies"])
    needed += [
        line for extra, lines in extras.items() if extra not in ("dev", "docs") for line in lines
    ]
    listed = set(re.findall(r"^\| ([\w.-]+) \|", page, re.M))
    listed |= set(re.findall(r"`([\w.-]+)`", page.partition("Not installed here")[2]))
    names = {re.match(r"[\w.-]+", line)[0] for line in needed}
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in listed}
    assert {name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in normal} == set()
    assert "| not stated |" not in page


def test_the_bill_of_materials_has_every_package_once_and_refers_to_what_it_has():
    command = [sys.executable, ROOT / "tools" / "dependencies.py", "sbom"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    own = bill["metadata"]["component"]
    references = [part["bom-ref"] for part in (own, *bill["components"])]
    assert len(references) == len(set(references))
    assert {"torch", "numpy", "numba"} <= {part["name"] for part in bill["components"]}
    depends = {part["ref"]: part["dependsOn"] for part in bill["dependencies"]}
    assert list(depends) == references
    assert any("pkg:pypi/torch@" in ref for ref in depends[own["bom-ref"]])
    assert {ref for refs in depends.values() for ref in refs} <= set(references)
    # Every package is there because another one, or ours, needs it.
    assert {ref for refs in depends.values() for ref in refs} == set(references[1:])
