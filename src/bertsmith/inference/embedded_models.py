"""The models that come with the package, and the default abilities of each.

Each model is a folder of its name in the package's data. Missing folders are skipped: adding the folder adds
the model, and a task without an embedded model requires one from the user.
"""

from pathlib import Path

PRETRAINED = Path(__file__).parents[1] / "pretrained"
OF_ENCODERS = ("fill", "next", "embed", "look")
EMBEDDED_MODELS: dict[str, tuple[str, ...]] = {
    "bertsmith-small": OF_ENCODERS,
    "bertsmith-small-sentiment": ("classify",),
    "bertsmith-small-entities": ("tag",),
    "bertsmith-small-questions": ("answer",),
}
"""Abilities that each model is the default for; if several models share one, the first.

A model with another model's name as prefix is an adapter over it, and names it as its base.
"""


def embedded_models() -> dict[str, Path]:
    """Return the folders of the models that are installed, the encoder first."""
    folders = {name: PRETRAINED / name for name in EMBEDDED_MODELS}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def embedded_models_for(*abilities: str) -> list[Path]:
    """Return the folders of the default models for one of these abilities, the best first."""
    wanted = set(abilities)
    return [folder for name, folder in embedded_models().items() if wanted & set(EMBEDDED_MODELS[name])]


def default_model() -> Path:
    """Return the encoder that is opened and fine-tuned by default."""
    return embedded_models_for("embed")[0]
