"""Text that others wrote, as records have it, in the languages of pages: one function."""

import re

# What no page can show: control characters, halves of surrogate pairs, and what XML forbids beside them.
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+")
LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
SPECIAL = {
    "plain": re.compile(r"((?!))"),  # nothing
    "md": re.compile(
        r"([\\`*\[\]<>#|$~&]|(?<![^\W_])_|_(?![^\W_]))"
    ),  # a paragraph; an _ within a word is one
    "cell": re.compile(r"([\\|<])"),  # of a Markdown table, whose cells may be links or bold
    "mathtext": re.compile(r"(\$)"),  # matplotlib's
}


def escape(text: str, form: str) -> str:
    """The text on one line, so that a reader of `form`, a key of SPECIAL or "latex", sees it as it is."""
    text = UNSEEN.sub(" ", text)
    if form == "latex":
        return re.sub("-(?=-)", "-{}", text.translate(str.maketrans(LATEX)))  # two hyphens, not a dash
    return SPECIAL[form].sub(r"\\\1", text)
