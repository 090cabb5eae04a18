"""Random valid recipes, drawn from the schema itself so that a new key is covered the day it is added."""

from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from bertsmith.recipe.load import leaves, load_recipe, preset_names
from bertsmith.recipe.schema import Recipe

SCHEMA = Recipe.model_json_schema()


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference points to."""
    return SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def values(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a key of this JSON schema takes."""
    node = resolved(node)
    if "anyOf" in node:
        return st.one_of(*map(values, node["anyOf"]))
    if "const" in node or "enum" in node:
        return st.sampled_from(node.get("enum", [node.get("const")]))
    return {"boolean": booleans, "integer": integers, "number": numbers, "string": texts}[node["type"]](node)


def booleans(_: dict[str, Any]) -> st.SearchStrategy[bool]:
    return st.booleans()


def integers(node: dict[str, Any]) -> st.SearchStrategy[int]:
    return st.integers(node["minimum"], 10**12)


def texts(_: dict[str, Any]) -> st.SearchStrategy[str]:
    return st.text(max_size=12)


def numbers(node: dict[str, Any]) -> st.SearchStrategy[float]:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    return st.floats(
        low if low is not None else above,
        high if high is not None else below,
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_infinity=False,
    )


def parts_of_a_whole(rest: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Tables whose shares add up to 1."""
    weighted = st.tuples(st.integers(1, 100), rest)

    def shared(parts: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
        total = sum(weight for weight, _ in parts)
        return [{**table, "fraction": weight / total} for weight, table in parts]

    return st.lists(weighted, min_size=1, max_size=4).map(shared)


LISTS = {
    "distill.layers": st.lists(st.integers(0, 30), max_size=4),
    "distill.relations": st.lists(st.sampled_from(["qk", "qq", "kk", "vv"]), max_size=4),
    "examples.stages": parts_of_a_whole(
        st.fixed_dictionaries({"length": st.integers(8, 512), "predictions": st.integers(1, 99)})
    ),
    "masking.levels": parts_of_a_whole(
        st.fixed_dictionaries({"unit": st.sampled_from(["token", "word", "ngram", "phrase", "entity"])})
    ),
    "model.global_layers": st.integers(1, 99) | st.lists(st.integers(0, 30), max_size=4),
    "run.keep_at": st.lists(st.integers(1, 10**9), max_size=4),
}


def values_of_key(key: str) -> st.SearchStrategy[Any]:
    """Values for a dotted key."""
    if key in LISTS:
        return LISTS[key]
    node = SCHEMA
    for part in key.split("."):
        node = resolved(node["properties"][part])
    return values(node)


PRESETS = [load_recipe(name) for name in preset_names()]
KEYS = list(leaves(PRESETS[0].model_dump()))
changes = st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key), values_of_key(key)))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A preset with some values changed; a change that breaks a rule between keys is left out."""
    recipe = draw(st.sampled_from(PRESETS))
    for key, value in draw(st.lists(changes, max_size=12)):
        tree = recipe.model_dump()
        *path, last = key.split(".")
        table = tree
        for part in path:
            table = table[part]
        table[last] = value
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            assert {each["type"] for each in error.errors()} == {"value_error"}, error
    return recipe
