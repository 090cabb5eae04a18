"""The architecture of an encoder as frozen data; nothing of how it is trained."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes, activation and rates of an encoder; the defaults are those of BERT (Devlin et al. 2018)."""

    model_type: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    """Width inside the feed-forward layer."""
    embedding_width: int
    """ALBERT and ELECTRA keep narrow embeddings and widen them; elsewhere equal to `width`."""
    positions: int
    """The longest text the model takes, in tokens."""
    segments: int = 2
    task_types: int = 0
    """ERNIE's task embeddings; 0 where there are none."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float = 0.1
    """Before the output layer of a task head."""
    initial_std: float = 0.02
    pad_id: int = 0
