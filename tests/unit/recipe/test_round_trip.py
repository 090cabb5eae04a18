"""Any recipe that can be held can be written, and what is written is the same recipe."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.recipe import load
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.toml_text import toml_text, value_text
from tests.unit.recipe.random_recipes import KEYS, recipes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.toml"


@given(recipe=recipes())
def test_a_written_recipe_loads_as_an_equal_one(place, recipe):
    place.write_bytes(load.recipe_text(recipe).encode())
    assert load.load_recipe(place) == recipe


@given(recipe=recipes())
def test_every_value_can_be_given_by_set(recipe):
    overrides = [f"{key}={value_text(value)}" for key, value in load.leaves(recipe.model_dump()).items()]
    assert load.load_recipe("bert-base", overrides) == recipe


@given(recipe=recipes(), other=recipes())
def test_differences_name_exactly_the_keys_that_differ(recipe, other):
    ours, theirs = load.leaves(recipe.model_dump()), load.leaves(other.model_dump())
    found = [each.key for each in load.differences(recipe.model_dump(), other.model_dump())]
    assert found == [key for key in KEYS if ours[key] != theirs[key]]
    assert load.differences(recipe.model_dump(), recipe.model_dump()) == []


def test_a_difference_shows_both_values():
    base = load.load_recipe("bert-base")
    other = load.load_recipe(
        "bert-base", ["optim.peak_lr=3e-5", "optim.clip_norm=off", "examples.pairs=none"]
    )
    assert [str(each) for each in load.differences(base.model_dump(), other.model_dump())] == [
        'examples.pairs: "nsp" there, "none" now',
        "optim.peak_lr: 0.0001 there, 3e-5 now",
        'optim.clip_norm: 1.0 there, "off" now',
    ]


@pytest.mark.parametrize("name", load.preset_names())
def test_a_preset_survives_being_written_and_being_shown(name, place):
    loaded = load.load_recipe_with_origins(name)
    for text in (load.recipe_text(loaded.recipe), load.annotated_text(loaded)):
        place.write_text(text)
        assert load.load_recipe(place) == loaded.recipe


def test_a_written_recipe_is_complete():
    written = tomllib.loads(load.recipe_text(load.load_recipe("albert-large")))
    assert list(load.leaves(written)) == list(load.leaves(Recipe().model_dump())) == KEYS


def test_a_written_recipe_reads_well():
    lines = load.recipe_text(load.load_recipe("bert-base")).splitlines()
    assert lines[0] == 'name = "bert-base"'
    assert "steps = 1_000_000" in lines and "norm_eps = 1e-12" in lines and "width = 768" in lines
    assert "recompute = false" in lines and "[optim]" in lines
    stages = (
        "{ fraction = 0.9, length = 128, predictions = 20 }, "
        "{ fraction = 0.1, length = 512, predictions = 77 }"
    )
    assert f"stages = [{stages}]" in lines


# ---- the writer alone

plain = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
tables = st.recursive(
    st.dictionaries(st.text(), plain, max_size=4),
    lambda inner: st.dictionaries(
        st.text(),
        st.one_of(plain, inner, st.lists(plain, max_size=3), st.lists(inner, max_size=3)),
        max_size=4,
    ),
    max_leaves=12,
)


@given(tree=tables)
def test_any_tree_of_plain_values_is_read_back_by_the_standard_library(tree):
    again = tomllib.loads(toml_text(tree))
    assert again == tree
    assert repr(sorted(map(repr, load.leaves(again).values()))) == repr(
        sorted(map(repr, load.leaves(tree).values()))
    )


def test_a_comment_stands_on_the_line_of_its_key():
    text = toml_text({"a": 1, "b": {"c": "x", "d": 2}}, {"a": "one", "b.c": "two"})
    assert text == (
        "a = 1                                 # one\n\n[b]\n"
        'c = "x"                               # two\nd = 2\n'
    )
