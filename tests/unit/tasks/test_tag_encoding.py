"""Tagged words as sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import TextSection
from tests.unit.tasks.encoding_tools import DROPPED, KINDS, WORDS, encode_split, kinds, rows_of, sentence
from tests.unit.tasks.test_windows import plain_best, plain_windows

every_kind = pytest.mark.parametrize("kind", KINDS)
any_words = st.lists(st.sampled_from([*WORDS, *DROPPED, "", "\u00a0x", "iron" * 20]), max_size=25)
contexts = st.sampled_from(["sentence", "document"])


@given(
    kind=kinds,
    sentences=st.lists(st.tuples(any_words, st.integers(0, 2)), max_size=4),
    longest=st.integers(8, 40),
    context=contexts,
)
def test_every_word_is_asked_about_exactly_once(kind, tokenizers, sentences, longest, context) -> None:
    examples = [
        sentence(words, [f"t{len(word)}" for word in words], document) for words, document in sentences
    ]
    labels = tuple(sorted({tag for example in examples for tag in example.tags}))
    encoded = encode_split("tag", examples, labels, tokenizers[kind], section(longest, context=context))
    asked = [tuple(pair) for pair in encoded.words_P2.tolist()]
    all_words = [(row, place) for row, (words, _) in enumerate(sentences) for place in range(len(words))]
    assert sorted(asked) == all_words
    assert [labels[tag] for tag in encoded.targets] == [examples[row].tags[place] for row, place in asked]
    assert (encoded.rows_P[1:] > encoded.rows_P[:-1]).all()
    lengths = encoded.lengths_M().tolist()
    assert max(lengths, default=0) <= longest
    windows_asked = set(encoded.starts_N1.searchsorted(encoded.rows_P, side="right").tolist())
    assert len(windows_asked) == encoded.items


def section(longest: int, **changes) -> TextSection:
    return TextSection(longest=longest, **changes)


@given(kind=kinds, words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
def test_a_sentence_has_the_tokens_of_its_words_joined_by_spaces(kind, tokenizers, words) -> None:
    encoded = encode_split("tag", [sentence(words)], (), tokenizers[kind], section(2000))
    assert rows_of(encoded) == [tokenizers[kind].encode(" ".join(words)).ids]
    assert encoded.targets.tolist() == [-1] * len(words)


@every_kind
def test_a_word_is_asked_about_at_its_first_piece(kind, tokenizers) -> None:
    words, tokenizer = ["The", "horseshoes", "cost", "naïvety", "👩🏽\u200d🏭", "."], tokenizers[kind]
    encoded = encode_split("tag", [sentence(words)], (), tokenizer, section(200))
    before = [len(tokenizer.encode(" ".join(words[:count]))) - 1 for count in range(len(words))]
    assert encoded.rows_P.tolist() == before


def test_a_word_without_pieces_is_the_unknown_token(tokenizers) -> None:
    tokenizer = tokenizers["uncased_wordpiece"]
    encoded = encode_split("tag", [sentence(["iron", "\u200b", "hot"])], (), tokenizer, section(16))
    expected = [tokenizer.id(token) for token in ("[CLS]", "iron", "[UNK]", "hot", "[SEP]")]
    assert rows_of(encoded) == [expected]
    assert encoded.rows_P.tolist() == [1, 2, 3]


@given(lengths=st.lists(st.integers(1, 15), min_size=1, max_size=5), step=st.integers(1, 20))
def test_a_word_is_asked_about_where_its_document_gives_it_most_context(tokenizers, lengths, step) -> None:
    tokenizer, room = tokenizers["uncased_wordpiece"], 10
    examples = [sentence(["iron"] * length, document=7) for length in lengths]
    text = section(room + 2, context="document", step=step)
    encoded = encode_split("tag", examples, (), tokenizer, text)
    windows = plain_windows(sum(lengths), room, min(step, room // 2))
    expected = []
    for token in range(sum(lengths)):
        number = plain_best(windows, token)
        expected.append((windows[number], token - windows[number][0]))
    used = sorted({window for window, _ in expected})
    rows = [
        encoded.starts_N1[used.index(window)] + 1 + place
        for window, place in sorted(expected, key=lambda each: (each[0][0], each[1]))
    ]
    assert encoded.rows_P.tolist() == rows
    assert encoded.lengths_M().tolist() == [shown + 2 for _, shown in used]


def test_sentences_of_one_document_are_context_of_each_other_even_if_others_stand_between(tokenizers) -> None:
    tokenizer = tokenizers["byte_bpe"]
    examples = [
        sentence(["The", "iron"], document=1),
        sentence(["it"], document=2),
        sentence(["hot"], document=1),
    ]
    encoded = encode_split("tag", examples, (), tokenizer, section(32, context="document"))
    assert rows_of(encoded) == [tokenizer.encode(text).ids for text in ("The iron hot", "it")]
    assert encoded.words_P2.tolist() == [[0, 0], [0, 1], [2, 0], [1, 0]]


def test_sentences_alone_see_nothing_of_their_document(tokenizers) -> None:
    tokenizer = tokenizers["byte_bpe"]
    encoded = encode_split("tag", [sentence(["The", "iron"]), sentence(["hot"])], (), tokenizer, section(32))
    assert rows_of(encoded) == [tokenizer.encode(text).ids for text in ("The iron", "hot")]


def test_tags_that_training_has_not_are_each_a_number_below_minus_one(tokenizers) -> None:
    examples = [sentence(["the", "iron", "is", "hot"], ["B-Y", "O", "B-X", "B-Y"]), sentence(["it"], ["B-X"])]
    encoded = encode_split("tag", examples, ("O", "B-PER"), tokenizers["byte_bpe"], section(16))
    assert encoded.targets.tolist() == [-2, 0, -3, -2, -3]


def test_another_number_of_tags_than_words_is_rejected_with_its_place(tokenizers) -> None:
    with pytest.raises(UserError) as caught:
        encode_split("tag", [sentence(["the", "iron"], ["O"])], ("O",), tokenizers["byte_bpe"], section(16))
    assert str(caught.value) == "here:1: has 2 words but 1 tags; give a tag for each word"
