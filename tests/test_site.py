"""The README and the site: its commands, its examples, the paper in code, and the build."""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from commands import transduce
from melodies import NOTES, melody
from pages import (
    DOCS,
    PAGES,
    ROOT,
    blocks,
    commands,
    commands_and_outputs,
    comment_below,
    printed,
    transduce_arguments,
    without_redirection,
)

import transduce as package
from transduce import cli
from transduce.cli.train import _overrides
from transduce.settings import OptionError, setting_names
from transduce.training.corpus import DataConfig
from transduce.training.recipe import Recipe, read_recipe, recipe_file, shipped_recipes

sys.path.insert(0, str(ROOT / "website"))
import paper_in_code
from equations import SECTIONS
from settings_reference import field_comments

SPEECH = "1089-134691-0019"  # of LibriSpeech's test-clean
SPOKEN = "a voice from beyond the world was calling"
SERVERS = {"explore", "serve"}  # they run until they are stopped; tests of their own start them
# Small and short, so that the commands of the pages run in seconds.
SMALLER = (
    *("--network.hidden_size", "8", "--network.num_layers", "2", "--network.prediction_size", "8"),
    *("--train.max_epochs", "1", "--train.validate_every", "1"),
    # So that the network learns to emit nulls: a search without them takes long.
    *("--train.warm_up", "5", "--train.averaging", "0"),
)


# --- Commands ------------------------------------------------------------------------------------


def shell_blocks():
    return [block for page in PAGES for block in blocks(page, "sh")]


def test_every_command_of_a_page_is_one_that_the_program_takes():
    checked = 0
    for block in shell_blocks():
        for line in commands(block):
            for words in transduce_arguments(re.sub(r"[][]", "", line)):
                cli.app.parse_args(words, exit_on_error=False, print_error=False)
                check_settings(words)
                checked += 1
    assert checked > 100


def check_settings(words):
    """Read the recipe that a command trains, with its settings: a misspelt one is an error."""
    if words[0] == "train" and words[1] in shipped_recipes():
        bound = cli.app.parse_args(words, exit_on_error=False, print_error=False)[1]
        read_recipe(recipe_file(Path(words[1])), _overrides(bound.arguments.get("settings", ())))


def test_a_misspelt_setting_of_a_page_is_found():
    with pytest.raises(OptionError, match="max_epochs"):
        check_settings(["train", "speech-ctc", "--train.max_epoch", "3"])


def test_every_make_target_of_a_page_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        name for block in shell_blocks() for name in re.findall(r"^make (\w+)", block.code, re.M)
    }
    assert {"demo", "test"} <= targets
    for name in targets:
        assert re.search(rf"^{name}:", makefile, re.M), name


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """Write the files that the commands of the pages name: words, sounds, manifests, a run."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "words.txt").write_text("transducer\nhello\n")
    (folder / "recordings").mkdir()
    for part, seeds in (("train", range(8)), ("dev", range(8, 11)), ("test", range(11, 14))):
        lines = []
        for seed in seeds:
            samples, notes = melody(seed)
            path = folder / f"{part}-{seed}.wav"
            soundfile.write(path, samples.numpy(), 16_000)
            phones = " ".join(list(NOTES)[note] for note in notes)
            lines.append(json.dumps({"audio_filepath": path.name, "phones": phones}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    for name in "ab":
        soundfile.write(folder / "recordings" / f"{name}.wav", melody(20)[0].numpy(), 16_000)
    package.load("english-pronouncer").save_pretrained(folder / "runs" / "demo" / "transducer")
    speech = find_speech()
    if speech is not None:
        samples, rate = soundfile.read(speech)
        for name in ("speech.wav", "chapter.wav"):
            soundfile.write(folder / name, samples, rate)
        (folder / "chapter.txt").write_text(SPOKEN)
        line = json.dumps({"audio_filepath": "speech.wav", "text": SPOKEN})
        (folder / "corpus.jsonl").write_text(line + "\n")
    return folder


def find_speech():
    """Return a recording of LibriSpeech, which the project does not carry; None without it."""
    folder = ROOT.parent / "shared" / "data" / "librispeech-10s"
    return next(folder.rglob(f"{SPEECH}.*"), None) if folder.is_dir() else None


NEED_SPEECH = re.compile(r"speech\.wav|chapter|corpus\.jsonl")
# In this order, because the guides use the runs of those before them.
GUIDES = ("letters-to-sounds", "speech-to-phones", "own-encoder", "decoding", "alignment")
GUIDES += ("streaming", "export", "many-machines", "notebooks")
RUN = [
    *(ROOT / "README.md", DOCS / "index.md", DOCS / "guide.md", DOCS / "explorer.md"),
    *(DOCS / "analysis.md", DOCS / "deployment.md", DOCS / "pronunciations.md"),
    *(DOCS / "guides" / f"{name}.md" for name in GUIDES),
]


def test_commands_and_examples_that_no_test_runs_say_what_they_need():
    assert set((DOCS / "guides").glob("*.md")) <= set(RUN)
    for page in PAGES:
        if page not in RUN and page.name != "api.md":
            for block in blocks(page, "sh", "python"):
                assert block.needs, f"{block.page} has a block that is not run: {block.code}"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_and_examples_of_a_page_run(page, sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    for written in ("exported", "grids", "out"):  # by the page before
        shutil.rmtree(written, ignore_errors=True)
    namespace = {}
    for block in blocks(page, "sh", "python", "toml"):
        if block.needs or (NEED_SPEECH.search(block.code) and not Path("speech.wav").exists()):
            continue
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            run_example(block.code, namespace)
        elif block.language == "sh":
            for line, expected in commands_and_outputs(block):
                found = run_command(line, sandbox)
                assert not expected or found.splitlines() == expected, line


def test_the_readme_is_short_and_its_session_runs(sandbox, monkeypatch):
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    if find_speech() is None:
        pytest.skip("there is no recording of LibriSpeech")
    monkeypatch.chdir(sandbox)
    [session] = re.findall(r"```pycon\n(.*?)```", text, re.S)
    example = doctest.DocTestParser().get_doctest(session, {}, "README.md", "README.md", 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def run_example(code, namespace):
    """Run an example of Python; where a comment below a statement shows its output, compare."""
    for line, output in printed(code, namespace):
        if expected := comment_below(code, line):
            assert output == expected


def run_command(line, folder):
    """Run a line of shell in a folder, ours in this process; return the output of its end."""
    target = re.search(r"\s>\s*(\S+)", line)
    source = re.search(r"\s<\s*(\S+)", line)
    text = Path(source[1]).read_bytes() if source else b""
    for part in without_redirection(line).split(" | "):
        [words] = transduce_arguments(part) or [None]
        if words is None:
            if not part.startswith("make "):
                part = part.replace("python ", f"{sys.executable} ", 1)
                text = shell_output(part.replace("examples/", f"{ROOT}/examples/"), text)
        elif words[0] == "listen":  # it reads the process's own standard input
            text = shell_output(f"{sys.executable} -m {part}", text)
        elif words[0] not in SERVERS:
            smaller = SMALLER if words[0] == "train" and words[1] in shipped_recipes() else ()
            done = transduce(*words, *smaller, folder=folder, text=text)
            assert done.returncode == 0, (line, done.stderr)
            text = done.stdout.encode()
    if target:
        Path(target[1]).write_bytes(text)
    return text.decode()


def shell_output(line, text):
    """Run a line of shell with bytes as its standard input; return its standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shell = ["bash", "-c", line]
    done = subprocess.run(shell, input=text, capture_output=True, env=environment)
    assert done.returncode == 0, (line, done.stderr.decode())
    return done.stdout


# --- The API -------------------------------------------------------------------------------------


def test_every_public_name_has_an_example_whose_output_is_as_printed(sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    page = (DOCS / "api.md").read_text()
    assert sorted(re.findall(r"^::: transduce\.(\w+)$", page, re.M)) == sorted(package.__all__)
    namespace = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        setup, *entries = re.split(r"^::: ", section, flags=re.M)
        for code in re.findall(r"```python\n(.*?)```", setup, re.S):
            exec(code, namespace)
        for entry in entries:
            name = entry.split()[0].removeprefix("transduce.")
            [code] = re.findall(r"```python\n(.*?)```", entry, re.S)
            assert re.search(rf"\b{name}\b", code), name
            if NEED_SPEECH.search(code) and not Path("speech.wav").exists():
                continue
            outputs = list(printed(code, namespace))
            assert outputs, f"the example of {name} prints nothing"
            for line, output in outputs:
                assert comment_below(code, line) == output, name


# --- The paper in code ---------------------------------------------------------------------------


def test_every_equation_of_the_paper_has_a_line_of_code():
    found = paper_in_code.places(ROOT)
    numbers = [equation.number for section in SECTIONS for equation in section.equations]
    assert numbers == list(range(1, 23))
    for number in numbers:
        place = paper_in_code.plainest(number, found)
        line = (ROOT / place.path).read_text().splitlines()[place.line - 1]
        assert number in paper_in_code.equation_numbers(line)
        assert place.first <= place.line <= place.last and place.function


def test_a_line_without_its_mark_is_missed():
    found = paper_in_code.places(ROOT)
    with pytest.raises(LookupError, match=r"no line of .* ends in `# Eq. 16`"):
        paper_in_code.plainest(16, [place for place in found if 16 not in place.numbers])


def test_algorithm_1_is_on_the_page_of_the_paper():
    code = paper_in_code.algorithm_code(ROOT)
    assert "def beam_steps(" in code and "def add_prefixes(" in code


def test_mentions_of_equations_are_read():
    assert paper_in_code.equation_numbers("(Eqs. 4-7, 12 and 13), Eq. 20") == (
        4,
        5,
        6,
        7,
        12,
        13,
        20,
    )
    assert paper_in_code.equation_numbers("Equation 3") == ()


# --- The build -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_the_net(site):
    loading = re.compile(
        r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?https?:|<link\b[^>]*rel="?stylesheet"?[^>]*https?:'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert not loading.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?https?:", style.read_text()), style


@pytest.mark.slow
def test_the_page_of_the_paper_has_every_formula_beside_its_code(site):
    page = (site / "paper-in-code.html").read_text()
    for number in range(1, 23):
        assert f'id="eq-{number}"' in page
    assert page.count("<math") == 22 and "add_prefixes" in page
    assert len(re.findall(r'<span class="hll"', page)) >= 22


@pytest.mark.slow
def test_the_page_of_settings_has_each_with_its_comment(site):
    page = (site / "settings.html").read_text()
    for name in setting_names(Recipe()):
        assert f"<code>{name}</code>" in page, name
    comments = field_comments(DataConfig)
    assert comments["memory"].startswith("Gigabytes of frames: a training set with more is read")
    assert comments["training"].startswith("a file, folder or pattern;")
    assert comments["language"].startswith("of sigmorphon, such as kor")


@pytest.mark.slow
def test_links_into_the_repository_lead_to_pages_of_the_site(site):
    page = (site / "architecture.html").read_text()
    assert 'href="source/transduce/lattice/reference.py.html"' in page
    source = (site / "source/transduce/lattice/reference.py.html").read_text()
    assert "forward_variables" in source
