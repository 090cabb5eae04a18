"""The models that come with the package: which there are, and what each is taken for.

A model is a folder of its name in the package's data. One that is not there is passed over, so that weights
are added by putting their folder there, and a task without one keeps asking for a model.
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
"""For which abilities each is taken where no model is named; of several, the first. Those called after
another are adapters over it, which name it as their base."""


def embedded_models() -> dict[str, Path]:
    """The folders of those that are there, the encoder first."""
    folders = {name: PRETRAINED / name for name in EMBEDDED_MODELS}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def embedded_models_for(*abilities: str) -> list[Path]:
    """The folders of those that are taken for one of these abilities, the best first."""
    wanted = set(abilities)
    return [folder for name, folder in embedded_models().items() if wanted & set(EMBEDDED_MODELS[name])]


def default_model() -> Path:
    """The encoder that is opened, and fine-tuned, where none is named."""
    return embedded_models_for("embed")[0]
