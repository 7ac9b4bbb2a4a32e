"""Recipes: allowed settings, and the errors of wrong ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from transduce.architectures import NetworkConfig
from transduce.audio.features import SPECTROGRAM
from transduce.data.pairs import Notation
from transduce.settings import OptionError, RecipeError, flat_settings
from transduce.training.corpus import DataConfig
from transduce.training.recipe import (
    Recipe,
    SpecAugment,
    TrainConfig,
    read_recipe,
    recipe_file,
    recipe_toml,
    shipped_recipes,
)

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


def recipe_of(tmp_path, text="", **overrides):
    (tmp_path / "recipe.toml").write_text(text)
    return read_recipe(
        tmp_path / "recipe.toml", {name.replace("__", "."): v for name, v in overrides.items()}
    )


def test_the_defaults_are_the_papers(tmp_path):
    assert recipe_of(tmp_path) == Recipe()


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("train.learning_rat", "train.learning_rate"),
        ("train.lerning_rate", "train.learning_rate"),
        ("network.hiden_size", "network.hidden_size"),
        ("network.dropuot", "network.dropout"),
        ("learning_rate", "train.learning_rate"),
        ("network.learning_rate", "train.learning_rate"),
        ("data.features.num_chanels", "data.features.num_channels"),
        ("train.spec_augment.time_mask", "train.spec_augment.time_masks"),
        ("train.seed.of", "train.seed"),
        ("optimizer", "train.optimiser"),
        ("seed", "train.seed"),
        ("lr", "train.learning_rate"),
        ("train.epochs", "train.max_epochs"),
        ("batch_size", "train.max_sequences"),
        ("layers", "network.num_layers"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_right_one(tmp_path, wrong, right):
    said = f"^there is no setting {wrong}; did you mean {right}\\?$"
    with pytest.raises(RecipeError, match=said):
        recipe_of(tmp_path, **{wrong.replace(".", "__"): "1"})
    with pytest.raises(RecipeError, match=f"recipe.toml: {said[1:]}"):
        recipe_of(tmp_path, f"{wrong} = 1")


def test_an_unknown_section_is_named_with_the_nearest_right_one(tmp_path):
    for wrong, right in [("trian", "train"), ("Data", "data")]:
        with pytest.raises(RecipeError, match=f"there is no section {wrong}; did you mean {right}"):
            recipe_of(tmp_path, f"[{wrong}]\nseed = 1")


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("train.learning_rate", "fast", 'train.learning_rate must be a number, not "fast"'),
        ("train.learning_rate", "0", "train.learning_rate must be positive, not 0.0"),
        ("train.learning_rate", "nan", "train.learning_rate must be a finite number in float32"),
        ("train.consistency", "inf", "train.consistency must be a finite number in float32"),
        ("network.hidden_size", "1000000000", "network.hidden_size must be at most 1,000,000"),
        ("network.num_layers", "1000000000", "network.num_layers must be at most 1,000,"),
        ("train.devices", "1000000000", "train.devices must be at most 1,000,"),
        ("data.features.window", "1e9", "data.features.window must be at most 10,"),
        ("train.seed", "1" + 30 * "0", "train.seed must be below 2^63, not a number of 31 digits"),
        ("train.max_epochs", "1.5", 'train.max_epochs must be a whole number, not "1.5"'),
        ("train.max_epochs", "0", "train.max_epochs must be at least 1, not 0"),
        ("network.bidirectional", "maybe", "network.bidirectional must be true or false"),
        ("network.network", "rnn", 'must be transducer, ctc, prediction or continuous, not "rnn"'),
        ("network.dropout", "1", "network.dropout must be at least 0 and below 1, not 1.0"),
        ("data.num_phones", "40", 'data.num_phones must be 61, 48 or 39, not "40"'),
        ("data.features.window", "-1", "data.features.window must be positive, not -1.0"),
        ("data.source_notation.normal_form", "NFX", "must be NFC, NFD, NFKC or NFKD"),
        ("train.spec_augment", "1", "train.spec_augment is a section"),
        ("train.distillation", "1.1", "train.distillation must be between 0 and 1, not 1.1"),
    ],
)
def test_a_setting_has_a_type_and_a_range(tmp_path, name, text, said):
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, **{name.replace(".", "__"): text})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_of_paths_is_in_toml_or_between_commas(tmp_path):
    written = recipe_of(tmp_path, '[train]\nteacher = ["a", "runs/b"]').train.teacher
    assert written == (tmp_path / "a", tmp_path / "runs/b")
    given = recipe_of(tmp_path, '[train]\nteacher = ["a"]', train__teacher="x,runs/y")
    assert given.train.teacher == (Path.cwd() / "x", Path.cwd() / "runs/y")
    (tmp_path / "again.toml").write_text(recipe_toml(given))
    assert read_recipe(tmp_path / "again.toml") == given
    none = recipe_of(tmp_path, '[train]\nteacher = ["a"]', train__teacher="none")
    assert none.train.teacher == ()
    with pytest.raises(RecipeError, match=r"^data.validation is empty; give a path, or none"):
        recipe_of(tmp_path, "", data__validation="")
    with pytest.raises(RecipeError, match=r"train.teacher must be a list, not 3"):
        recipe_of(tmp_path, "[train]\nteacher = 3")


@pytest.mark.parametrize(
    "line, said",
    [
        ('learning_rate = "1e-3"', 'train.learning_rate must be a number, not "1e-3"'),
        ("max_epochs = true", "train.max_epochs must be a whole number, not True"),
        ("max_epochs = 2.0", "train.max_epochs must be a whole number, not 2.0"),
        ("clip = [1]", "train.clip must be a number"),
        ("learning_rate = ", "is not TOML"),
        (f"clip = {5000 * '['}{5000 * ']'}", "recipe.toml nests lists or tables too deeply"),
        (f"clip = {'1' + 400 * '0'}", "train.clip must be below 2^63"),
    ],
)
def test_a_file_must_have_the_types_of_the_settings(tmp_path, line, said):
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, f"[train]\n{line}")
    assert said in str(error.value)
    assert "recipe.toml" in str(error.value)


NUMBERS = [name for name, value in flat_settings(Recipe()).items() if type(value) in (int, float)]


@pytest.mark.parametrize("name", [*NUMBERS, "train.clip", "data.num_training", "train.save_every"])
def test_no_number_may_be_infinite_or_beyond_those_of_pytorch(tmp_path, name):
    for text in ("nan", "inf", "-inf", "1e300", "1" + 60 * "0"):
        with pytest.raises(RecipeError, match=f"^{name} must be "):
            recipe_of(tmp_path, **{name.replace(".", "__"): text})


def test_overrides_are_converted_to_the_types_of_the_settings(tmp_path):
    recipe = recipe_of(
        tmp_path,
        "[train]\nclip = 3\nmax_epochs = 7",
        train__learning_rate="1e-3",
        train__clip="none",
        network__bidirectional="false",
        data__num_phones="48",
        data__language="2012",
        data__target_notation__split="spaces",
        train__spec_augment__time_masks="2",
    )
    assert recipe.train == TrainConfig(
        learning_rate=1e-3, max_epochs=7, spec_augment=SpecAugment(time_masks=2)
    )
    assert recipe.network == NetworkConfig(bidirectional=False)
    assert recipe.data == DataConfig(
        num_phones=48, language="2012", target_notation=Notation("spaces", None)
    )


def test_overrides_that_are_only_valid_together_may_come_in_any_order(tmp_path):
    network = recipe_of(tmp_path, network__lookahead="3", network__bidirectional="false").network
    assert (network.lookahead, network.bidirectional) == (3, False)
    with pytest.raises(OptionError, match=r"train is a setting and a section of train\.seed"):
        recipe_of(tmp_path, train="1", train__seed="1")


def test_paths_are_relative_to_the_recipe_and_those_of_overrides_to_the_working_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = recipe_of(tmp_path, "[data]\ntraining = 'a.jsonl'", data__test="b.jsonl").data
    assert data.training == tmp_path / "a.jsonl"
    assert data.test == tmp_path / "elsewhere" / "b.jsonl"


def test_a_written_recipe_is_read_back_unchanged(tmp_path):
    recipe = Recipe(
        DataConfig(
            corpus="cmudict-split",
            training=Path('/a "b" \\ ü \x7f 𝒢.tsv'),
            source_notation=Notation("spaces", "NFKD"),
            features=SPECTROGRAM,
            num_training=10,
            skip_bad=True,
        ),
        NetworkConfig("ctc", bidirectional=False, dropout=0.1),
        TrainConfig("adamw", 1e-7, clip=2.0, save_every=5, init_prediction=Path("/run")),
    )
    differing = sum(
        a != b
        for a, b in zip(
            flat_settings(recipe).values(), flat_settings(Recipe()).values(), strict=True
        )
    )
    assert differing > 12
    assert recipe_of(tmp_path, recipe_toml(recipe)) == recipe


def test_the_error_of_a_missing_recipe_is_one_sentence(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(tmp_path / "no.toml")


def test_a_recipe_is_found_by_its_name_or_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe_file(Path("pairs-transducer")) == RECIPES[0].parent / "pairs-transducer.toml"
    assert recipe_file(Path("no.toml")) == Path("no.toml")
    Path("paper-ctc").write_text("")  # a file of one's own comes before the name
    assert recipe_file(Path("paper-ctc")) == Path("paper-ctc")
    with pytest.raises(RecipeError, match=r"no recipe 'other'; give a .toml file, or a name that"):
        recipe_file(Path("other"))
    with pytest.raises(RecipeError, match=r"'leters-ctc' \(did you mean letters-ctc\?\); give a"):
        recipe_file(Path("leters-ctc"))
    assert list(shipped_recipes().values()) == RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_valid(path):
    recipe = read_recipe(path)
    name = "digits" if recipe.network.network == "continuous" else recipe.network.network
    assert path.stem.endswith(name)
    description, command = path.read_text().splitlines()[:2]
    assert description.startswith("# ") and description.endswith(".")
    assert command.startswith(f"# transduce train {path.stem}")


def test_the_recipes_cover_the_paper_letters_speech_and_pairs():
    kinds = {f"{data}-{kind}" for data in ("paper", "letters") for kind in ("ctc", "prediction")}
    kinds |= {f"{data}-transducer" for data in ("paper", "letters", "speech", "pairs")}
    kinds |= {
        "speak-digits",
        "speech-ctc",
        "streaming-transducer",
        "cmudict-transducer",
        "sigmorphon-transducer",
        "stress-transducer",
    }
    assert {path.stem for path in RECIPES} == kinds


@pytest.mark.parametrize("kind", ["transducer", "ctc", "prediction"])
def test_the_papers_recipes_have_the_papers_settings(kind):
    recipe = read_recipe(RECIPES[0].parent / f"paper-{kind}.toml")
    stop_at = "error_rate" if kind == "ctc" else "log_loss"
    assert recipe == replace(
        Recipe(),
        data=DataConfig(corpus="timit"),
        network=NetworkConfig(kind),
        train=TrainConfig(stop_at=stop_at),
    )
    train = recipe.train
    assert (train.optimiser, train.learning_rate, train.momentum) == ("sgd", 1e-4, 0.9)
    assert (train.weight_noise, train.max_sequences, train.clip) == (0.075, 1, None)
    assert (train.warm_up, train.decay, train.weight_decay) == (0, "none", 0.0)
