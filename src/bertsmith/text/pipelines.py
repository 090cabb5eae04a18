"""The two published pipelines around a vocabulary: that of BERT and that of RoBERTa."""

from typing import Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from bertsmith.text.tokenizer_files import BERT_NAMES, ROBERTA_NAMES, USUAL_LONGEST_WORD

Case = Literal["uncased", "cased"]

INSIDE = "##"  # BERT's mark of a piece that continues a word


def bert_normalizer(case: Case) -> normalizers.Normalizer:
    """BERT's normaliser: no control characters, CJK characters apart, uncased without case and accents."""
    return normalizers.BertNormalizer(lowercase=case == "uncased", strip_accents=None)


def bert_pipeline(vocabulary: dict[str, int], *, case: Case) -> Library:
    """The pipeline of bert-base-uncased or bert-base-cased over a WordPiece vocabulary."""
    unknown, cls, sep = (BERT_NAMES[role] for role in ("unk_token", "cls_token", "sep_token"))
    library = Library(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=USUAL_LONGEST_WORD)
    )
    library.normalizer = bert_normalizer(case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=INSIDE)
    library.post_processor = processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"],
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    library.add_special_tokens(sorted(BERT_NAMES.values(), key=vocabulary.__getitem__))
    return library


def roberta_pipeline(vocabulary: dict[str, int], *, merges: list[tuple[str, str]]) -> Library:
    """The pipeline of roberta-base over a vocabulary of byte-level BPE."""
    cls, sep, mask = (ROBERTA_NAMES[role] for role in ("cls_token", "sep_token", "mask_token"))
    library = Library(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.RobertaProcessing(
        (sep, vocabulary[sep]), (cls, vocabulary[cls]), trim_offsets=True, add_prefix_space=False
    )
    others = sorted(set(ROBERTA_NAMES.values()) - {mask}, key=vocabulary.__getitem__)
    # The mask takes the space before it along, as a word of RoBERTa does.
    library.add_special_tokens([*others, AddedToken(mask, lstrip=True, special=True)])
    return library
