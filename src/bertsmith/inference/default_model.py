"""The model that is used where none is named: a small one that comes with the project."""

from pathlib import Path

DEFAULT_MODEL = Path(__file__).parents[3] / "models" / "bertsmith-tiny"
"""4 layers of width 256, pre-trained by `bertsmith pretrain` in five minutes on one H200; see its card."""
