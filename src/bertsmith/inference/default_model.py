"""The model that is used where none is named: a small one that is part of the package."""

from pathlib import Path

DEFAULT_MODEL = Path(__file__).parents[1] / "pretrained" / "bertsmith-tiny"
"""4 layers of width 256, pre-trained by `bertsmith pretrain` in five minutes on one H200; see its card."""
