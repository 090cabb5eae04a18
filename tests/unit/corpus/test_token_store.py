"""The token store: what is written is read back, and what is broken is named."""

import json
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenisedDocuments, TokenStore, tokenizer_hash, writing_store
from bertsmith.text.tokenizer import Tokenizer
from tests.plain_stores import write_store
from tests.tokenizer_makers import BERT_SPECIAL, MAKERS, uncased_wordpiece

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10, 11, 12]], [[13], [14, 15]]]
UNITS = [[[0, 1, 0], [0]], [[2, 3, 0, 0]], [[0], [4, 5]]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(uncased_wordpiece(tmp_path_factory.mktemp("vocabulary")))


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A store of three documents and eleven tokens, in shards of four."""
    write_store(tmp_path / "store", DOCUMENTS, tokenizer, units=UNITS, shard_tokens=4)
    return tmp_path / "store"


def complaint(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        TokenStore.open(folder)
    return str(caught.value)


def change_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_a_store_knows_where_sentences_and_documents_start(folder) -> None:
    store = TokenStore.open(folder)
    assert store.sentence_starts.tolist() == [0, 3, 4, 8, 9, 11]
    assert store.document_starts.tolist() == [0, 2, 3, 5]
    assert (store.tokens, store.has_units) == (11, True)


def test_spans_are_gathered_one_after_the_other_and_across_shards(folder) -> None:
    store = TokenStore.open(folder)
    starts, lengths = np.array([9, 2, 0, 5]), np.array([2, 7, 0, 1])
    assert store.gather(starts, lengths).tolist() == [14, 15, 7, 8, 9, 10, 11, 12, 13, 10]
    assert store.gather(starts, lengths).dtype == np.int64
    assert store.gather_units(starts, lengths).tolist() == [4, 5, 0, 0, 2, 3, 0, 0, 0, 3]


def test_spans_within_one_shard_are_gathered_from_it(folder) -> None:
    assert TokenStore.open(folder).gather(np.array([5, 4]), np.array([2, 1])).tolist() == [10, 11, 9]


def test_no_spans_are_no_tokens(folder) -> None:
    assert len(TokenStore.open(folder).gather(np.array([], np.int64), np.array([], np.int64))) == 0


@pytest.mark.parametrize("span", [(-1, 2), (10, 2)])
def test_a_span_outside_the_store_is_our_own_mistake(folder, span) -> None:
    with pytest.raises(IndexError, match="exceeds the 11 tokens"):
        TokenStore.open(folder).gather(np.array(span[:1]), np.array(span[1:]))


def test_shards_hold_little_endian_ids_of_two_bytes(folder) -> None:
    shards = sorted(folder.glob("*.tokens"))
    assert [shard.stat().st_size for shard in shards] == [8, 8, 6]
    assert np.fromfile(shards[1], "<u2").tolist() == [9, 10, 11, 12]


def test_tokens_are_counted_over_the_whole_vocabulary(folder, tokenizer) -> None:
    counts = TokenStore.open(folder).token_counts
    assert len(counts) == tokenizer.vocabulary_size
    assert (counts[:17].tolist(), counts.sum()) == ([0] * 5 + [1] * 11 + [0], 11)


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path) -> None:
    pieces = [*BERT_SPECIAL, *(f"word{number}" for number in range(1 << 16))]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = Tokenizer.load(tmp_path)
    write_store(tmp_path / "store", [[[5, 65540]]], tokenizer)
    assert (tmp_path / "store" / "shard-00000.tokens").stat().st_size == 8
    assert TokenStore.open(tmp_path / "store").gather(np.array([0]), np.array([2])).tolist() == [5, 65540]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_store_carries_its_tokenizer(maker, tmp_path) -> None:
    tokenizer = Tokenizer.load(maker(tmp_path / "vocabulary"))
    write_store(tmp_path / "store", [[[5, 6]]], tokenizer)
    store = TokenStore.open(tmp_path / "store")
    assert store.tokenizer_hash == tokenizer_hash(tokenizer) == tokenizer_hash(store.tokenizer())
    assert store.tokenizer().encode("The iron is hot") == tokenizer.encode("The iron is hot")


def test_a_store_reopens_in_another_process(folder) -> None:
    store = TokenStore.open(folder)
    again = pickle.loads(pickle.dumps(store))
    assert again.hash == store.hash
    assert again.gather(np.array([3]), np.array([3])).tolist() == [8, 9, 10]
    assert len(pickle.dumps(store)) < 1000


def test_the_same_tokens_give_the_same_store(folder, tokenizer, tmp_path) -> None:
    write_store(tmp_path / "again", DOCUMENTS, tokenizer, units=UNITS, shard_tokens=4)
    write_store(tmp_path / "other", DOCUMENTS[:2], tokenizer, shard_tokens=4)
    first, again, other = (TokenStore.open(tmp_path / name).hash for name in ("store", "again", "other"))
    assert first == again != other


def test_a_folder_inside_the_store_can_be_entered(folder) -> None:
    assert stat.S_IMODE((folder / "tokenizer").stat().st_mode) & 0o500 == 0o500


@pytest.mark.parametrize(
    "name", ["shard-00001.tokens", "shard-00002.units", "sentence_starts.npy", "tokenizer/tokenizer.json"]
)
def test_a_flipped_byte_is_named(folder, name) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    store = TokenStore.open(folder)
    store.verify()  # nothing is wrong yet
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: has changed since it was written .*; make the store again"):
        store.verify()


@pytest.mark.parametrize("name", ["shard-00001.tokens", "token_counts.npy", "tokenizer/vocab.txt"])
def test_a_missing_file_is_named(folder, name) -> None:
    (folder / name).unlink()
    assert complaint(folder) == f"{folder / name}: is missing; make the store again with `bertsmith corpus`"


def test_a_cut_file_is_named_with_its_sizes(folder) -> None:
    (folder / "shard-00002.tokens").write_bytes(b"1234")
    assert "shard-00002.tokens: has 4 bytes instead of 6" in complaint(folder)


def test_a_folder_without_a_manifest_is_no_store(tmp_path) -> None:
    assert complaint(tmp_path).startswith(f"{tmp_path}: is not a token store; give the folder that")


def test_a_path_that_leads_nowhere_is_not_told_to_be_made_again(tmp_path) -> None:
    told = complaint(tmp_path / "nostore")
    assert told.startswith(f"{tmp_path / 'nostore'}: is not a folder; give the folder that `bertsmith corpus")


def test_another_version_is_rejected(folder) -> None:
    change_manifest(folder, version=7)
    assert "is a store of format version 7, but this program reads 1" in complaint(folder)


def test_another_manifest_is_rejected(folder) -> None:
    change_manifest(folder, format="cake recipe")
    assert "is not the manifest of a token store" in complaint(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": "many"}, 'manifest.json: tokens = "many" is invalid; it should be a whole number'),
        ({"token_type": "float16"}, "token_type = \"float16\" is invalid; it should be 'uint16' or 'uint32'"),
        ({"token_type": "uint32"}, "states 11 tokens, but its tokens files hold 5"),
        ({"shard_tokens": 3}, "does not state shard-00003"),
        ({"sentences": 4}, "sentence_starts.npy: holds int64 of shape (6,) instead of 5 whole numbers"),
        ({"files": {}}, "does not state"),
        ({"extra": 1}, "unknown key extra"),
    ],
)
def test_a_damaged_manifest_is_named(folder, changes, told) -> None:
    change_manifest(folder, **changes)
    assert told in complaint(folder)


def test_starts_that_do_not_fit_the_tokens_are_named(folder) -> None:
    np.save(folder / "sentence_starts.npy", np.array([0, 3, 4, 8, 9, 12]))
    assert "sentence_starts.npy: runs from 0 to 12 instead of 0 to 11" in complaint(folder)


@pytest.mark.parametrize("name", ["sentence_starts.npy", "document_starts.npy", "token_counts.npy"])
@pytest.mark.parametrize("damage", [(b"\x93NUMPY", b"xxxxxx"), (b"'shape': (", b"'shape': ["), (b"}", b"(")])
def test_what_is_no_array_is_named(folder, name, damage) -> None:
    (folder / name).write_bytes((folder / name).read_bytes().replace(*damage))
    assert f"{name}: is not a whole .npy file" in complaint(folder)


def test_units_that_are_not_there_are_asked_of_the_lexicon(tmp_path, tokenizer) -> None:
    write_store(tmp_path / "store", DOCUMENTS, tokenizer)
    store = TokenStore.open(tmp_path / "store")
    assert not store.has_units
    with pytest.raises(
        UserError, match="was made without phrases and entities; make the store with .*--lexicon"
    ):
        store.gather_units(np.array([0]), np.array([1]))


def test_a_store_is_never_written_over(folder, tokenizer) -> None:
    before = TokenStore.open(folder).hash
    with pytest.raises(UserError, match="store: already exists; choose another `out`"):
        write_store(folder, [[[5]]], tokenizer)
    assert TokenStore.open(folder).hash == before


def test_other_peoples_files_are_left_alone(tmp_path, tokenizer) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(UserError, match="already exists; choose another `out`"):
        write_store(tmp_path, [[[5]]], tokenizer)


def test_an_empty_folder_becomes_a_store(tmp_path, tokenizer) -> None:
    write_store(tmp_path, [[[5]]], tokenizer)
    assert TokenStore.open(tmp_path).tokens == 1


def test_an_interrupted_store_leaves_nothing(tmp_path, tokenizer) -> None:
    documents = TokenisedDocuments(np.array([5, 6]), np.array([2]), np.array([1]))
    with pytest.raises(KeyboardInterrupt), writing_store(tmp_path / "store", tokenizer) as writer:
        writer.add(documents)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_documents_are_chosen_with_all_that_is_theirs() -> None:
    documents = TokenisedDocuments(
        tokens=np.array([5, 6, 7, 8, 9, 10]),
        sentence_lengths=np.array([1, 2, 3]),
        document_lengths=np.array([2, 1]),
        units=np.array([0, 2, 3, 4, 5, 5], np.uint8),
    )
    chosen = documents.only(np.array([False, True]))
    assert chosen.tokens.tolist() == [8, 9, 10]
    assert (chosen.sentence_lengths.tolist(), chosen.document_lengths.tolist()) == ([3], [1])
    assert chosen.units is not None and chosen.units.tolist() == [4, 5, 5]
