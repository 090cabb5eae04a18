"""What a token store's folder holds: the names of its files, and the manifest that states them.

manifest.json            what the store holds, how it was made, and the sha256 of every other file
tokenizer/               the tokenizer the ids belong to
shard-00000.tokens ...   token ids, little-endian; every shard but the last holds `shard_tokens` of them
shard-00000.units  ...   only with a lexicon: one byte a token, 2 * kind where a unit begins, + 1 inside it
sentence_starts.npy      the token at which each sentence starts, and where the last one ends
document_starts.npy      the sentence at which each document starts, and where the last one ends
token_counts.npy         how often each id occurs
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json
from bertsmith.text.fast_encoder import IdType

FORMAT = "bertsmith token store"
VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
SENTENCE_STARTS, DOCUMENT_STARTS = "sentence_starts.npy", "document_starts.npy"
TOKEN_COUNTS = "token_counts.npy"
SHARD_TOKENS = 1 << 26
MAKE_ANEW = "make the store again with `bertsmith corpus`"


class FileEntry(BaseModel):
    """What a file of the store must look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """What a store holds, how it was made, and the look of each of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: str = FORMAT
    version: int = VERSION
    tokenizer: str
    vocabulary: PositiveInt
    token_type: IdType
    units: list[str]  # the kinds that unit codes tell apart, code // 2 being the place in this list
    shard_tokens: PositiveInt
    documents: PositiveInt
    sentences: PositiveInt
    tokens: PositiveInt
    settings: dict[str, Any]
    summary: dict[str, Any]
    files: dict[str, FileEntry]

    @property
    def shards(self) -> list[str]:
        """The names of the shards without their suffix; all but the last are full."""
        return [shard_name(number) for number in range(-(-self.tokens // self.shard_tokens))]


def shard_name(number: int) -> str:
    """The name of a shard's files, without their suffix."""
    return f"shard-{number:05d}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store, if it is one that this version reads."""
    if not (folder / MANIFEST).is_file():
        what = "holds no token store" if folder.is_dir() else "is no folder"
        remedy = "give the folder that `bertsmith corpus ... --out FOLDER` wrote"
        raise UserError(what, where=str(folder), remedy=remedy)
    values = read_json(folder / MANIFEST, remedy=MAKE_ANEW)
    if values.get("format") != FORMAT:
        raise UserError("is not the manifest of a token store", where=str(folder / MANIFEST))
    if values.get("version") != VERSION:
        what = f"is a store of format version {values.get('version')!r}, and this program reads {VERSION}"
        raise UserError(what, where=str(folder), remedy=MAKE_ANEW)
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{key}: {first['msg']}", where=str(folder / MANIFEST), remedy=MAKE_ANEW) from error
