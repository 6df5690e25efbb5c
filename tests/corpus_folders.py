"""Local folders in the layouts of the papers' data sets, with text made on the spot."""

import json
import random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

# Seconds after each reading of several files, so that a process does not end before Arrow's threads: tests go on.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
TEXT = "the of and a key value cache codebook vector layer attention token error head größe naïve 1999 @-@ ( ) , . ;"
WORDS = TEXT.split(" ")


def text(rng: random.Random, words: int) -> str:
    """Random words in lines."""
    return " ".join(rng.choice(WORDS) + ("\n" if rng.random() < 0.05 else "") for _ in range(words))


def slimpajama(folder, shards: int = 3, docs: int = 40, test: bool = True, words: int = 60):
    """Parquet shards with ``text`` and a struct ``meta``, in row groups of 7."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    for split, count in (("train", shards), ("test", int(test))):
        for shard in range(count):
            texts = [f"{split} {shard} {i} " + text(rng, rng.randrange(1, words)) for i in range(docs)]
            table = {"text": texts, "meta": [{"redpajama_set_name": "RedPajamaC4"}] * docs}
            name = f"{split}-{shard:05d}-of-{count:05d}.parquet"
            pq.write_table(pa.table(table), folder / name, row_group_size=7)
    return folder


def redpajama(folder, docs: int = 40):
    """A jsonl file per source, whose other fields differ; no test split."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(8)
    for source, about in (("arxiv", {"meta": {"timestamp": "x"}}), ("c4", {"meta": "{}"}), ("cc_2023-06", {"rank": 1})):
        rows = [{"text": f"{source} {i} " + text(rng, 50)} | about for i in range(docs)]
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"{source}_sample.jsonl").write_text(lines + "\n", encoding="utf-8")
    return folder


def pg19(folder, books: int = 4):
    """Parquet with PG-19's columns and long texts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(9)
    for split in ("train", "test"):
        texts = [f"{split} book {i}\r\n\r\n" + text(rng, 2000) for i in range(books)]
        table = {"short_book_title": [f"B{i}" for i in range(books)], "publication_date": [1900] * books}
        table |= {"url": ["http://x"] * books, "text": texts}
        pq.write_table(pa.table(table), folder / f"{split}-00000-of-00001.parquet")
    return folder


def wikitext_rows(articles: int, seed: int = 1) -> list[str]:
    """A line a row, blank rows, headings between ``=``."""
    rng, rows = random.Random(seed), []
    for i in range(articles):
        rows += ["", f" = Article {i} = \n", ""]
        for section in range(rng.randrange(3)):
            rows += [f" = = Section {section} = = \n", "", " " + text(rng, 80).replace("\n", "") + " \n"]
    return rows


def wikitext(folder, articles: int = 30):
    """Parquet with one text column."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, split in enumerate(("train", "validation", "test")):
        table = pa.table({"text": wikitext_rows(articles, seed)})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder
