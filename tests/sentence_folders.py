"""What sentence-transformers puts beside a model."""

import json
from pathlib import Path

KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write_modules(
    folder: Path,
    mode: str,
    *,
    normalize: bool = True,
    modes: list[str] | None = None,
    more: str = "",
    prompts: dict[str, str] | None = None,
    default: str | None = None,
    longest: int | None = None,
    lower: bool = False,
) -> None:
    """Make a folder of sentence-transformers of a model folder."""
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    steps += [("Normalize", "2_Normalize")] if normalize and not more else []
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(steps)
    ]
    if more:
        listed.append({"idx": len(listed), "name": "x", "path": "2_More", "type": more})
    write(folder / "modules.json", listed)
    chosen = modes or [mode]
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 64, **{key: name in chosen for name, key in KEYS.items()}},
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": lower})
    if prompts is not None:
        write(
            folder / "config_sentence_transformers.json",
            {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"},
        )


def write(file: Path, value: object) -> None:
    """Write JSON, in a folder that may be new."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))
