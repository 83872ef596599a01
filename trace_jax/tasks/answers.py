"""Where a completion states its final answer, and which gold answers are mathematics.

The rule, from the strictest mark to the loosest (pitfall REW-02: no mark counts just because it occurs somewhere):

1. the last `\\boxed{...}` or `\\fbox{...}` with balanced braces;
2. `#### ...` if it begins the last line that is not empty (GSM8K);
3. what follows the last "answer is" or "answer:" up to the end of its line;
4. the last line that is not empty.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_PHRASE = re.compile(r"\banswer\s*(?:\bis\b\s*:?|:|=)\s*(?P<answer>[^\n]*)", re.IGNORECASE)
_DATE_OR_TIME = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}:\d{2}(:\d{2})?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MATH_CHARACTERS = re.compile(r"[0-9a-zA-Z\s+\-*/^().,{}\[\]\\%$=<>|_!&:;]+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt pi inf max min mod".split())


def normalise(text: str) -> str:
    """Text without outer white space, inner white space as single blanks."""
    return " ".join(text.split())


def last_box(text: str) -> str | None:
    """Content of the last box with balanced braces, None without one. Escaped braces do not count."""
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth, place = 1, start
        while place < len(text):
            if text[place] == "\\":
                place += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place].strip()
            place += 1
    return None


def marked_answer(text: str) -> str | None:
    """The answer that a box, a final `####` line or an "answer is" marks, None without such a mark (rules 1-3)."""
    box = last_box(text)
    if box is not None:
        return box
    line = _last_line(text)
    if line.startswith("####"):
        return line.lstrip("#").strip()
    phrases = list(_PHRASE.finditer(text))
    return phrases[-1].group("answer").strip().rstrip(".").strip("*") if phrases else None


def final_answer(text: str) -> str:
    """The final answer of a completion by the rules above; empty for an empty completion."""
    marked = marked_answer(text)
    return _last_line(text) if marked is None else marked


def gold_of_worked_answer(text: str) -> str | None:
    """The gold answer inside a worked one: after a final `####`, else in the last box, else None."""
    line = _last_line(text)
    if "####" in line:
        return line.rsplit("####", 1)[1].strip()
    return last_box(text)


def looks_like_math(gold: str) -> bool:
    """Whether a gold answer is a number or formula: only mathematical characters, a digit or LaTeX command, and no words.

    Dates and times are text; single letters are variables.
    """
    text = gold.strip()
    if not text or _DATE_OR_TIME.fullmatch(text) or not _MATH_CHARACTERS.fullmatch(text):
        return False
    if not (_COMMAND.search(text) or any(character.isdigit() for character in text)):
        return False
    if _COMMAND.match(text) and re.fullmatch(r"\\(text|mathrm|textbf|mbox)\s*\{[^{}]*[a-zA-Z]{2}[^{}]*\}", text):
        return False
    words = re.findall(r"[a-zA-Z]{2,}", re.sub(r"\\(text|mathrm|textbf|mbox)\s*\{[^{}]*\}", " ", _COMMAND.sub(_keep_text_command, text)))
    return all(word in _FUNCTIONS for word in words)


def _keep_text_command(match: re.Match[str]) -> str:
    return match.group() if match.group() in ("\\text", "\\mathrm", "\\textbf", "\\mbox") else " "


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
