"""What a run begins with: a freshly drawn network, or one from a model folder with what it lacks."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError

from bertsmith.corpus.store import TokenStore, tokenizer_hash
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json
from bertsmith.ground.seeds import key_of
from bertsmith.model.family import FAMILY, add_fresh_head, member_of, new_network
from bertsmith.model.network import Network
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape
from bertsmith.model.weights import read_model
from bertsmith.objectives.pretraining import PairHead
from bertsmith.pretraining.added_words import grow_for_words
from bertsmith.recipe.mistakes import explained
from bertsmith.recipe.schema import ModelSection, Recipe
from bertsmith.text.added_words import read_words, with_words
from bertsmith.text.tokenizer import Tokenizer

SIZES_IN_CONFIG = {
    "distilbert": {"dim": "width", "n_layers": "layers", "n_heads": "heads", "hidden_dim": "inner"},
}
USUAL_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "inner",
}


@dataclass(frozen=True, slots=True)
class Beginning:
    """A network to train, with what the user should know of it."""

    network: Network
    notes: tuple[str, ...] = ()


def pair_head_of(recipe: Recipe) -> PairHead:
    """Which sentence-pair head the recipe trains."""
    return recipe.examples.pairs if recipe.examples.pairs in ("nsp", "sop") else "none"


def begin(recipe: Recipe, store: TokenStore) -> Beginning:
    """The network that the recipe asks for, for the store's vocabulary."""
    stream = torch.Generator().manual_seed(key_of(recipe.run.seed, "initial weights"))
    if recipe.start.model == "scratch":
        shape = shape_of(recipe.model, store.tokenizer())
        return Beginning(new_network(shape, _heads(recipe), stream))
    return _adapted(recipe, store, stream)


def shape_of(model: ModelSection, tokenizer: Tokenizer) -> Shape:
    """The shape of a new network for this vocabulary."""
    names = SIZES_IN_CONFIG.get(model.type, USUAL_SIZES)
    sizes = {theirs: getattr(model, ours) for theirs, ours in names.items()}
    config = {"vocab_size": tokenizer.vocabulary_size, "max_position_embeddings": model.positions, **sizes}
    plain = FAMILY[model.type].read_shape(Settings({"model_type": model.type, **config}, "recipe"))
    return replace(
        plain,
        positions=model.positions,  # RoBERTa's config counts two more
        embedding_width=model.width if model.embedding_width == "width" else model.embedding_width,
        segments=model.segments,
        task_types=model.task_types,
        activation=model.activation,
        norm_eps=model.norm_eps,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        initial_std=model.initial_std,
        pad_id=tokenizer.pad_id,
    )


def with_true_model(recipe: Recipe) -> Recipe:
    """The recipe with the architecture of the model folder it goes on from, so that it tells the truth."""
    if recipe.start.model == "scratch":
        _refuse_words_for_no_model(recipe)
        return recipe
    folder = Path(recipe.start.model).expanduser()
    config = read_json(folder / "config.json", remedy="give --from a model folder")
    shape = member_of(str(config.get("model_type")), where=str(folder)).read_shape(
        Settings(config, str(folder / "config.json"))
    )
    values = {**recipe.model_dump(), "model": model_section_of(shape).model_dump()}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, {f"model.{key}": str(folder) for key in values["model"]}) from error


def model_section_of(shape: Shape) -> ModelSection:
    """The recipe's words for the shape of a model folder, so that a run's recipe.toml tells the truth."""
    return ModelSection.model_validate(
        {
            "type": shape.model_type,
            "embedding_width": "width" if shape.embedding_width == shape.width else shape.embedding_width,
            "activation": "gelu" if shape.activation == "gelu" else "gelu_new",
            **{
                name: getattr(shape, name)
                for name in ("layers", "width", "heads", "inner", "positions", "segments", "task_types")
            },
            **{
                name: getattr(shape, name)
                for name in ("dropout", "attention_dropout", "norm_eps", "initial_std")
            },
        }
    )


def _refuse_words_for_no_model(recipe: Recipe) -> None:
    if recipe.start.add_words != "none":
        what = "words are added to the vocabulary of a model, and this run starts from scratch"
        where = f"--add-words {recipe.start.add_words}"
        raise UserError(what, where=where, remedy="give --from that model's folder, or leave the words out")


def _heads(recipe: Recipe) -> dict[str, int]:
    pair = pair_head_of(recipe)
    if pair == "none":
        return {"mlm": 0}
    plans = member_of(recipe.model.type).heads
    if pair not in plans:
        what = f"{recipe.model.type} has no {pair} head"
        raise UserError(what, where="recipe: examples.pairs", remedy="choose full-sentences or another model")
    return {**{support: 0 for support in plans[pair].needs}, "mlm": 0, pair: 2}


def _adapted(recipe: Recipe, store: TokenStore, stream: torch.Generator) -> Beginning:
    folder = Path(recipe.start.model).expanduser()
    model, tokenizer = read_model(folder), Tokenizer.load(folder)
    notes = list(model.notes)
    if recipe.start.add_words != "none":
        words = read_words(Path(recipe.start.add_words).expanduser())
        extended = with_words(tokenizer, words)
        notes.append(grow_for_words(model.network, tokenizer, extended, words))
        tokenizer = extended
    _refuse_other_store(tokenizer, store, recipe)
    wanted = _heads(recipe)
    for unwanted in set(model.network.heads) - set(wanted):
        del model.network.heads[unwanted]
    for head, outputs in wanted.items():
        if head not in model.network.heads or head in model.untrained:
            notes.append(f"the head {head} is not in the folder: it starts from fresh weights")
            if head not in model.network.heads:
                add_fresh_head(model.network, head, outputs, stream)
    return Beginning(model.network, tuple(dict.fromkeys(notes)))


def _refuse_other_store(tokenizer: Tokenizer, store: TokenStore, recipe: Recipe) -> None:
    if tokenizer_hash(tokenizer) != store.tokenizer_hash:
        what = f"the store was tokenised with another vocabulary than {recipe.start.model}'s"
        source = "--vocab (and --add-words) of that model"
        raise UserError(what, where=str(store.folder), remedy=f"make the store again with {source}")
