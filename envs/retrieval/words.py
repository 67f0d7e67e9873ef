"""Words of a text for lexical search: what counts as the same word in a query and in a passage."""

from __future__ import annotations

import re
import unicodedata

STOP_WORDS = frozenset(
    """a an and are as at be by for from had has have he her his in is it its of on or she that the their
    there they this to was were what when where which who whom whose will with""".split()  # noqa: SIM905
)
"""Left out of a query that has other words."""

# A dotted abbreviation (u.s., p.o.w), or a word with its inner apostrophes, or one with + or # at its end
# (c++, f#).
_WORD = re.compile(r"(?:[^\W\d_]\.){2,}[^\W\d_]?(?!\w)|[^\W_]+(?:['’][^\W_]+)*(?:\+\+|#|\+(?!\w))?")


_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def words(text: str) -> list[str]:
    """Lower-case words without accents: ``U.S.`` is ``us``, ``C++`` ``c++``, ``Lincoln's`` ``lincoln``.

    A plural ``s`` is dropped. Chinese, Japanese and other scripts without spaces give one word a character.
    """
    return [plain_word(word) for word in raw_words(text)]


def raw_words(text: str) -> list[str]:
    """Words as they stand in the text, lower case and without accents: what `plain_word` takes."""
    if text.isascii():
        return _WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKD", text.casefold())
    folded = "".join(character for character in folded if not unicodedata.combining(character))
    found: list[str] = []
    for word in _WORD.findall(folded):
        if word.isascii():
            found.append(word)
        else:
            found.extend(_UNSPACED.sub(r" \g<0> ", word).split())
    return found


def plain_word(word: str) -> str:
    """The form under which a raw word is indexed."""
    if "'" in word or "’" in word:
        word = word.replace("’", "'").removesuffix("'s").replace("'", "")
    if "." in word:
        return word.replace(".", "")
    if len(word) > 3 and word[-1] == "s" and word[-2] not in "siu" and word.isascii():
        return word[:-1]
    return word


def query_words(text: str) -> list[str]:
    """The distinct words of a query, stop words left out unless there are no others."""
    found = list(dict.fromkeys(words(text)))
    return [word for word in found if word not in STOP_WORDS] or found
