"""The provider's library: the corpus, ranked with the BM25 of SQLite's FTS5."""

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"

# How far each mode reads: articles per search, sentences in the answer, rounds of searching.
DEPTH = {"quick": (3, 2, 1), "deep": (6, 5, 2)}

# Words that tell nothing about the subject of a question.
ASIDE = """
    a about according although an and are as at be been before by can come could did do does each even finally first
    for from had has have how in into is it its made many may much no nobody not of off on once one or out over should
    so than that the their them there they this to two used using was well were what when where which who whose why
    will with would
"""


@dataclass(frozen=True)
class Article:
    """One passage of the corpus."""

    title: str
    topic: str
    text: str

    @property
    def sentences(self) -> list[str]:
        """The text, split where a full stop is followed by a capital letter."""
        return re.split(r"(?<=[.?!])\s+(?=[A-Z])", self.text)


def read_corpus(folder: Path = CORPUS) -> Iterator[Article]:
    """Yields the articles: `## title` and its text, in files that begin with `# topic`."""
    for path in sorted(folder.glob("*.md")):
        heading, *articles = re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE)
        topic = heading.strip().removeprefix("# ")
        for article in articles:
            title, text = article.split("\n", 1)
            yield Article(title.strip(), topic, " ".join(text.split()))


class Library:
    """Answers questions out of the corpus."""

    def __init__(self, articles: Iterator[Article] | None = None) -> None:
        self._db = sqlite3.connect(":memory:")
        stemmed = "tokenize = 'porter unicode61 remove_diacritics 2'"
        self._db.execute(f"CREATE VIRTUAL TABLE article USING fts5(title, text, topic UNINDEXED, {stemmed})")
        self._db.execute(f"CREATE VIRTUAL TABLE sentence USING fts5(text, article UNINDEXED, {stemmed})")
        for number, article in enumerate(articles or read_corpus(), start=1):
            self._db.execute(
                "INSERT INTO article (rowid, title, text, topic) VALUES (?, ?, ?, ?)",
                (number, article.title, article.text, article.topic),
            )
            self._db.executemany(
                "INSERT INTO sentence (text, article) VALUES (?, ?)",
                [(sentence, number) for sentence in article.sentences],
            )

    def research(self, question: str, mode: str) -> dict[str, Any]:
        """Searches, in `deep` mode again with the best title added, and answers with the sentences that fit best."""
        articles, sentences, rounds = DEPTH[mode]
        words = question
        found: list[tuple[int, str, float]] = []
        for _ in range(rounds):
            words = f"{question} {found[0][1]}" if found else question
            found = self._rank(_query(words), articles)
        query = _query(words)
        found = [source for source in found if source[2] > 0.25 * found[0][2]]
        sources = [
            {"title": title, "score": score, "excerpt": " ".join(self._best_sentences(query, [number], 1))}
            for number, title, score in found
        ]
        # A source that merely touches the question is worth naming, but would dilute the answer.
        close = [number for number, _, score in found if score > 0.7 * found[0][2]]
        answer = " ".join(self._best_sentences(query, close, sentences)) or "The library holds nothing on this."
        return {"answer": answer, "sources": sources, "searches": rounds}

    def _rank(self, query: str, limit: int) -> list[tuple[int, str, float]]:
        """Articles, best first; a title weighs three times as much as the text. FTS5's own score is negative."""
        rows = self._db.execute(
            "SELECT rowid, title, round(-bm25(article, 3.0, 1.0), 3) FROM article WHERE article MATCH ?"
            " ORDER BY bm25(article, 3.0, 1.0), rowid LIMIT ?",
            (query, limit),
        )
        return rows.fetchall()

    def _best_sentences(self, query: str, articles: list[int], limit: int) -> list[str]:
        """The best sentences of these articles, in the order of reading."""
        rows = self._db.execute(
            "SELECT text FROM (SELECT rowid AS place, text FROM sentence WHERE sentence MATCH ?"
            " AND article IN (SELECT value FROM json_each(?)) ORDER BY rank LIMIT ?) ORDER BY place",
            (query, json.dumps(articles), limit),
        )
        return [text for (text,) in rows]


def _query(words: str) -> str:
    """An FTS5 query for any of the words; quoted, so that none is read as an operator."""
    aside = ASIDE.split()
    terms = dict.fromkeys(term for term in re.findall(r"\w+", words.lower()) if term not in aside)
    return " OR ".join(f'"{term}"' for term in terms) or '""'
