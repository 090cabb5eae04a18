"""`bertsmith corpus`: turn raw text into a token store."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_facts, print_json
from bertsmith.cli.terminal import reporting_stops
from bertsmith.inference.embedded_models import embedded_models

if TYPE_CHECKING:
    from bertsmith.corpus.build_store import CorpusReport

OTHER_RULES = "the rules of a related language or of English are used"


def corpus(
    sources: Annotated[
        list[str], Argument(metavar="TEXT...", help="Files, folders or patterns; - is standard input.")
    ],
    vocab: Annotated[
        Path, Option(help="Tokenizer folder, of `bertsmith vocab` or of any model, or bertsmith-small.")
    ],
    out: Annotated[Path, Option(help="Folder of the store to write.")],
    workers: Annotated[int, Option(min=1, help="Processes; the result is always the same.")] = (
        os.cpu_count() or 1
    ),
    engine: Annotated[
        Literal["pool", "ray"],
        Option(help="Processes of this machine, or Ray: on the cluster that RAY_ADDRESS names, or here."),
    ] = "pool",
    text_format: Annotated[
        Literal["auto", "text", "jsonl", "parquet", "wiki"], Option("--format", help="Format of the text.")
    ] = "auto",
    field: Annotated[str, Option("--text", help="Field or column of the text.")] = "text",
    encoding_errors: Annotated[
        Literal["strict", "replace"], Option(help="strict: stop at bytes that are not UTF-8.")
    ] = "strict",
    sentences: Annotated[
        Literal["split", "line"],
        Option(help="Split paragraphs into sentences, or treat each line as one (BERT's own input)."),
    ] = "split",
    language: Annotated[
        str, Option(help="Language of the abbreviations for splitting: en, de, ru ...")
    ] = "en",
    min_characters: Annotated[int, Option(min=0, help="Drop shorter documents.")] = 0,
    repair_mojibake: Annotated[
        bool, Option("--repair-mojibake", help="Repair wrongly decoded text: schÃ¶n to schön.")
    ] = False,
    drop_junk: Annotated[
        bool, Option("--drop-junk", help="Drop documents that are not prose: tables, lists, code.")
    ] = False,
    duplicates: Annotated[
        Literal["none", "exact", "near"], Option(help="Drop exact, or near, duplicates of earlier documents.")
    ] = "none",
    exclude: Annotated[
        list[Path] | None,
        Option(help="A task's file: drop documents that contain its texts. Can be repeated."),
    ] = None,
    add_words: Annotated[
        list[Path] | None,
        Option(help="Words to add to the vocabulary, one per line: [unused] slots first. Repeatable."),
    ] = None,
    lexicon: Annotated[
        list[Path] | None,
        Option(
            help="Phrases or entities to mark, one per line, perhaps a tab and phrase|entity. Repeatable."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Turn text into a token store.

    Reads plain text (an empty line between documents), JSON lines, Parquet and WikiExtractor's output,
    compressed or not. Cleans the text as requested, splits sentences, and writes their token ids, which
    pre-training reads from disk. The same text gives the same bytes on any number of workers.

    Example: bertsmith corpus corpus/*.txt.xz --vocab vocab/ --out store/ --workers 8

    Example: bertsmith corpus web.jsonl --vocab vocab/ --out store/ --drop-junk --duplicates near
    --exclude glue/RTE/dev.tsv
    """
    from bertsmith.core.processes import Workers
    from bertsmith.corpus.build_store import CorpusSettings, build_store
    from bertsmith.corpus.clean import Cleaning
    from bertsmith.corpus.documents import check_language, has_rules

    settings = CorpusSettings(
        format=text_format,
        field=field,
        encoding_errors=encoding_errors,
        sentences=sentences,
        language=language,
        cleaning=Cleaning(repair_mojibake, min_characters, drop_junk),
        duplicates=duplicates,
        exclude=tuple(exclude or ()),
        lexicons=tuple(lexicon or ()),
        add_words=tuple(add_words or ()),
    )
    if sentences == "split" and not has_rules(check_language(language)):
        echo(f"bertsmith: {language} does not have sentence rules; {OTHER_RULES}", err=True)
    with reporting_stops():
        report = build_store(
            sources,
            out,
            vocabulary=embedded_models().get(str(vocab), vocab),
            settings=settings,
            workers=Workers(workers, engine),
        )
    if as_json:
        print_json(asdict(report) | {"out": str(report.out)})
    else:
        show(report)


def show(report: "CorpusReport") -> None:
    """Print the report as a few lines for people."""
    speed = f"{report.megabytes_per_second:,.1f} MB of text a second"
    facts = [
        ("wrote", f"{report.out} in {report.seconds:,.1f} s, {speed}"),
        ("documents", f"{report.documents:,}"),
        ("sentences", f"{report.sentences:,}"),
        ("tokens", f"{report.tokens:,}, {report.tokens_per_word:.3f} a word"),
    ]
    if report.unknown_rate is not None:
        facts += [("unknown", f"{report.unknown_rate:.4%} of the tokens")]
    if report.added_words:
        facts += [("added", f"{report.added_words:,} words to the vocabulary")]
    if report.marked:
        phrases, entities = (report.marked[kind] for kind in ("phrase", "entity"))
        facts += [("marked", f"{phrases:,} phrases, {entities:,} entities")]
    for reason, count in report.dropped.items():
        facts += [("dropped", f"{count:,} {reason}")]
    for name, texts in report.task_files.items():
        searched = (
            f"{texts['texts']:,} texts of {name}, {texts['too_short']:,} more are too short to search for"
        )
        facts += [("searched for", searched)]
    print_facts(facts)
