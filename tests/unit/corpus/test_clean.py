import base64
import sys

import pytest

from bertsmith.core.errors import UserError
from bertsmith.corpus.clean import Cleaning, clean_document, junk_reason
from bertsmith.corpus.documents import Document

PROSE = {
    "English": """The lighthouse stood on the rock for a hundred years before the storm of 1987 took it.
"Nobody lived there by then," said the keeper's daughter; she had left in the 1950s.
It cost £3,400 (about $5,000) to build - a fortune at the time.""",
    "German": "Die Straßenbahnhaltestelle wurde 2004 verlegt; die Donaudampfschifffahrtsgesellschaft zog um.",
    "Chinese": "北京是中华人民共和国的首都，位于华北平原的北部，是全国的政治、文化中心，2019年人口为2153万。"
    * 20,
    "Japanese": "東京都は、日本の首都である。関東地方に位置し、2021年の人口は約1,400万人で、最も多い。" * 20,
    "Korean": "서울특별시는 대한민국의 수도이자 최대 도시이다. 백제의 첫 수도인 위례성이었다.",
    "Arabic": "القاهرة هي عاصمة جمهورية مصر العربية وأكبر مدنها، وتُعدّ أكبر مدينة عربية من حيث السكان.",
    "Hebrew": "ירושלים היא עיר הבירה של מדינת ישראל, והעיר הגדולה ביותר בה; בשנת 2020 חיו בה כ-950,000 איש.",
    "Thai": "กรุงเทพมหานครเป็นเมืองหลวงและนครที่มีประชากรมากที่สุดของประเทศไทยเป็นศูนย์กลางการปกครอง" * 5,
    "Hindi": "दिल्ली भारत की राजधानी और एक महानगर है। इसमें नई दिल्ली सम्मिलित है जो पुरानी दिल्ली के बाद बसी।",
    "Persian": "تهران پرجمعیت‌ترین شهر و پایتخت ایران است و می‌توان آن را بزرگ‌ترین شهر غرب آسیا دانست.",
    "Russian": "Москва — столица России, город федерального значения. — Когда? — спросил он. — В 1147 году.",
    "Greek": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και η μεγαλύτερη πόλη της χώρας, με ιστορία 3.400 ετών.",
    "Amharic": "አዲስ አበባ የኢትዮጵያ ዋና ከተማ ስትሆን በተጨማሪ የአፍሪካ ኅብረት መቀመጫ ናት።",
    "Yoruba": "Ìlú Ìbàdàn jẹ́ olú-ìlú ìpínlẹ̀ Ọ̀yọ́ ní orílẹ̀-èdè Nàìjíríà; ó tóbi gan-an ni.",
    "prose with code": """To open the file, call open(path, "rb") and read it; parse_header() looks at it.
If it fails, it raises ValueError: see https://example.org/docs/parsing#errors for what each of them means.
The result is a dict such as {"width": 3, "height": 4}, which you may pass to draw(**result) as it is.""",
    "two languages": "Yaar, kal ka match dekha? मुझे तो यकीन ही नहीं हुआ, last over mein 18 runs चाहिए थे!",
    "dialogue": "- Are you coming?\n- I do not know yet, ask me tomorrow.\nShe closed the door behind her.",
}

JUNK = {
    "junk: few letters": "12:30 14:50 18:05\n07:15 09:20 11:45 Paris\n1,204 3,305 4,406 99.5% 88.1%",
    "junk: symbols": "int total = first + second * third; return total == limit || $name <= #{count} # end",
    "junk: long words": base64.b64encode(b"The quick brown fox jumps over the lazy dog" * 20).decode(),
    "junk: repeated lines": "Click here to read more about it\n" * 4 + "A line of text that stands alone",
    "junk: lists": "• Home\n• About our company\n• Contact\n| Name of person | Place |\n- Sitemap",
}


def cleaned(text: str, **settings):
    return clean_document(Document(text, "a.txt:1"), Cleaning(**settings))


def test_a_document_is_left_as_it_is_unless_cleaning_is_asked_for():
    document = Document("12 schÃ¶n ==", "a.txt:1")
    assert clean_document(document, Cleaning()) is document


@pytest.mark.parametrize("language", PROSE)
def test_prose_of_any_script_is_kept(language):
    assert junk_reason(PROSE[language]) is None


@pytest.mark.parametrize("reason", JUNK)
def test_junk_is_dropped_with_its_reason(reason):
    assert cleaned(JUNK[reason], drop_junk=True) == reason


@pytest.mark.parametrize(("symbols", "reason"), [(10, None), (11, "junk: symbols")])
def test_symbols_may_be_a_tenth_of_all_characters_but_spaces(symbols, reason):
    assert junk_reason("+" * symbols + " word" * 20 + " c" * (20 - symbols)) == reason


def test_prose_around_an_address_or_a_repeated_line_is_kept():
    assert junk_reason(PROSE["English"] + "\nhttps://example.org/" + "a" * 60) is None
    assert junk_reason(PROSE["English"] + "\nYes.\nYes.") is None


def test_a_document_shorter_than_asked_is_dropped():
    assert cleaned("語" * 9, minimum_characters=10) == "short"
    assert cleaned("語" * 10, minimum_characters=10) == Document("語" * 10, "a.txt:1")


def test_mojibake_is_repaired_line_by_line_and_good_text_left_alone():
    text = "Das ist schÃ¶n.\n東京 “quoted” ﬁne\nâ€œQuotedâ€\u009d"
    assert cleaned(text, repair_mojibake=True) == Document(
        "Das ist schön.\n東京 “quoted” ﬁne\n“Quoted”", "a.txt:1"
    )


@pytest.mark.parametrize("language", PROSE)
def test_good_text_of_any_script_is_not_repaired(language):
    assert cleaned(PROSE[language], repair_mojibake=True).text == PROSE[language]


def test_ftfy_that_is_not_installed_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UserError, match=r"pip install 'bertsmith\[data\]'"):
        cleaned("schÃ¶n", repair_mojibake=True)
