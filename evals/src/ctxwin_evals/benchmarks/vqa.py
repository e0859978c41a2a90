"""Answer normalisation of the VQA evaluation, in the variant that MM-NIAH and MileBench score with.

Source: ``utils/tools.py`` of MM-NIAH (commit 2fd03dd) and ``evaluate.py`` of MileBench (9583e1f). Odd rules
are kept: scores must be theirs.
"""

import re

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {word: str(i) for i, word in enumerate(_SMALL.split())}
_NUMBERS |= {word: str(10 * i) for i, word in enumerate(_TENS.split(), 2)}
_ARTICLES = ("a", "an", "the")

# Written without their apostrophe, these get it back.
_WHOLE = (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's isn't "
    "it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've shouldn't "
    "somebody'll somebody's someone'd someone'll someone's something'd something'll that's there'd there're there's "
    "they'd they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's "
    "where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've"
)
# Two apostrophes, written with one of them.
_DOUBLE = (
    "couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've someone'd've something'd've there'd've "
    "they'd've we'd've who'd've wouldn't've y'all'd've you'd've"
)
# "somebody'd" loses its apostrophe: kept from the source.
_IRREGULAR = {
    "ow's'at": "'ow's'at",
    "'ows'at": "'ow's'at",
    "'ow'sat": "'ow's'at",
    "somebody'd": "somebodyd",
    "somebodyd've": "somebody'd've",
    "somebody'dve": "somebody'd've",
    "y'allll": "y'all'll",
    "yall'll": "y'all'll",
}


CONTRACTIONS = {word.replace("'", ""): word for word in _WHOLE.split()} | _IRREGULAR
CONTRACTIONS |= {w[:i] + w[i + 1 :]: w for w in _DOUBLE.split() for i, letter in enumerate(w) if letter == "'"}


def strip_punctuation(text: str) -> str:
    """Punctuation removed, or turned into a space.

    A mark is removed everywhere if it touches a space anywhere or a comma stands between digits anywhere, else it becomes
    a space everywhere. Of full stops that no digit follows the first 32 go.
    """
    has_decimal_comma = re.search(r"\d,\d", text) is not None
    out = text
    for mark in _PUNCTUATION:
        out = out.replace(mark, "" if has_decimal_comma or mark + " " in text or " " + mark in text else " ")
    # The source passes a flag where re.sub takes a count; the flag's value is 32.
    return re.sub(r"\.(?!\d)", "", out, count=32)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, number words as digits, contractions with their apostrophes."""
    words = strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip()).lower().split()
    words = [_NUMBERS.get(word, word) for word in words]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)
