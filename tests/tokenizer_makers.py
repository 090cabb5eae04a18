"""Small tokenizers of the four published kinds, each written into a folder as its family publishes it."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

PARAGRAPH = """\
The smith heats the iron, hammers it, and heats it again; then the iron is a horseshoe. A naïve café owner in
Zürich ordered twelve of them, "for luck", he said: déjà vu! Straße, Ångström, Ελλάδα, Москва and İstanbul.
铁匠在炉火旁打铁，火花飞溅。鍛冶屋は鉄を打つ。대장장이는 쇠를 두드린다.
يطرق الحداد الحديد وهو ساخن. लोहार लोहे को पीटता है। ช่างตีเหล็กตีเหล็ก
The iron is hot 🔥, she 👩🏽‍🏭 smiles 🙂; 3.14 horseshoes cost 42€ (or $45?) & the family 👨‍👩‍👧‍👦 pays.
"""
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ALBERT_SPECIAL = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def uncased_wordpiece(folder: Path) -> Path:
    """vocab.txt as of bert-base-uncased, without a tokenizer_config.json."""
    return _write_vocab_txt(folder, normalizers.BertNormalizer(lowercase=True))


def cased_wordpiece(folder: Path) -> Path:
    """vocab.txt as of bert-base-cased, without a tokenizer_config.json."""
    return _write_vocab_txt(folder, normalizers.BertNormalizer(lowercase=False))


def byte_bpe(folder: Path) -> Path:
    """vocab.json, merges.txt and special_tokens_map.json as of roberta-base."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _train_bpe(library, ROBERTA_SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    library.model.save(str(folder))
    # transformers 5 no longer knows by itself that the mask takes the space before it along.
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}), encoding="utf-8")
    return folder


def gpt_bpe(folder: Path) -> Path:
    """tokenizer.json and tokenizer_config.json as of gpt2: no template, no mask, no padding."""
    end = "<|endoftext|>"
    library = Library(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    _train_bpe(library, [end])
    _write_library(folder, library)
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}
    settings |= {role: end for role in ("unk_token", "bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def albert_unigram(folder: Path) -> Path:
    """tokenizer.json and tokenizer_config.json as of albert-base: special tokens are pieces with score 0."""
    return _write_unigram(folder, [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])


def cased_unigram(folder: Path) -> Path:
    """The same with NFKC alone, so that a text can spell the upper-case special tokens too."""
    return _write_unigram(folder, [normalizers.NFKC()])


def modern_bpe(folder: Path) -> Path:
    """tokenizer.json as of ModernBERT: special tokens and runs of spaces stand only in added_tokens."""
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    _train_bpe(library, [])
    library.add_tokens(["|||IP_ADDRESS|||"])
    library.add_special_tokens(["<|padding|>", "<|endoftext|>"])
    library.add_tokens([AddedToken(" " * width, normalized=True) for width in range(8, 1, -1)])
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    library.add_special_tokens([AddedToken("[MASK]", lstrip=True, special=True), "[unused0]", "[unused1]"])
    _add_bert_template(library)
    return _write_library(folder, library)


MAKERS = (uncased_wordpiece, cased_wordpiece, byte_bpe, albert_unigram, cased_unigram, modern_bpe)


def wordpiece_pieces(words: Iterable[str]) -> list[str]:
    """Special tokens, every character of the words as a start and as a continuation, and the words."""
    words = sorted(set(words))
    characters = sorted({character for word in words for character in word})
    pieces = [*BERT_SPECIAL, *characters, *(f"##{character}" for character in characters), *words]
    return list(dict.fromkeys(pieces))


def _write_vocab_txt(folder: Path, normalizer: normalizers.Normalizer) -> Path:
    splits = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(PARAGRAPH))
    pieces = wordpiece_pieces(word for word, _ in splits)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return folder


def _train_bpe(library: Library, special: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([PARAGRAPH], trainer)


def _write_unigram(folder: Path, normalizer: list[normalizers.Normalizer]) -> Path:
    library = Library(models.Unigram())
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    library.normalizer = normalizers.Sequence([*quotes, *normalizer])
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=ALBERT_SPECIAL, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(PARAGRAPH.splitlines(), trainer)
    library.add_special_tokens([AddedToken("[MASK]", lstrip=True, special=True)])
    _add_bert_template(library)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    names |= {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    _write_library(folder, library)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _add_bert_template(library: Library) -> None:
    library.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, library.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )


def _write_library(folder: Path, library: Library) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return folder
