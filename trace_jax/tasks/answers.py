"""Where a completion states its final answer, and which gold answers are mathematics.

The rule, from the strictest mark to the loosest (pitfall REW-02: no mark counts just because it occurs somewhere):

1. inside the last `<answer>...</answer>` if there is one, by the rules below;
2. the last `\\boxed{...}` or `\\fbox{...}` with balanced braces;
3. `#### ...` if it begins the last line that is not empty (GSM8K);
4. what follows the last "answer is" or "answer:" up to the end of its line;
5. the last line that is not empty.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PHRASE = re.compile(r"\banswer\s*(?:\bis\b\s*:?|:|=)\s*(?P<answer>[^\n]*)", re.IGNORECASE)
_DATE_OR_TIME = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}:\d{2}(:\d{2})?")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MATH_CHARACTERS = re.compile(r"[0-9a-zA-Z\s+\-*/^().,{}\[\]\\%$=<>|_!&:;]+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt pi inf max min mod".split())


def normalise(text: str) -> str:
    """Text without outer white space, inner white space as single blanks."""
    return " ".join(text.split())


def without_text_command(text: str) -> str:
    """`Monday` for `\\text{Monday}`."""
    match = _TEXT.fullmatch(text.strip())
    return match.group(1) if match else text


def tagged_answer(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def last_box(text: str) -> str | None:
    """Content of the last box with balanced braces, None without one. Escaped braces do not count.

    One pass: answers are model output of any shape, and this runs outside the killable worker.
    """
    starts = {match.end() for match in _BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    last = (-1, -1)
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start in starts:
                last = max(last, (start, match.start()))
    return text[last[0] : last[1]].strip() if last[0] >= 0 else None


def marked_answer(text: str) -> str | None:
    """The answer that a tag, a box, a final `####` line or an "answer is" marks, None without such a mark (rules 1-4)."""
    tagged = tagged_answer(text)
    if tagged is not None:
        inner = marked_answer(tagged)
        return tagged if inner is None else inner
    box = last_box(text)
    if box is not None:
        return box
    line = _last_line(text)
    if line.startswith("####"):
        return line.lstrip("#").strip()
    phrases = list(_PHRASE.finditer(text))
    return _trim(phrases[-1].group("answer")) if phrases else None


def final_answer(text: str) -> str:
    """The final answer of a completion by the rules above; empty for an empty completion."""
    marked = marked_answer(text)
    return _trim(_last_line(text)) if marked is None else marked


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
    inner = without_text_command(text)
    if inner != text:
        return looks_like_math(inner)
    words = re.findall(r"[a-zA-Z]{2,}", _COMMAND.sub(" ", _TEXT.sub(" ", text)))
    return all(word in _FUNCTIONS for word in words)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _trim(text: str) -> str:
    """Text without emphasis, a full stop and closing LaTeX delimiters whose openers lie before the text."""
    text = text.strip().strip("*").strip().removesuffix(".").strip("*").strip()
    for opener, closer in (("\\[", "\\]"), ("\\(", "\\)")):
        if text.endswith(closer) and opener not in text:
            text = text.removesuffix(closer).strip()
    return text.removesuffix("$").strip() if text.count("$") == 1 and text.endswith("$") else text
