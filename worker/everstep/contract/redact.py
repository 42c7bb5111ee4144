"""Keeping credentials out of text that leaves a process. Pure, and in time that grows with the text's length only.

Three ways to know one: by the name before it (`password=`, `X-Goog-Signature=`), by its own shape (`ghp_…`, a JWT, a
PEM block), and, where nothing says what it is, by its looks: 40 characters as an AWS secret key has them, or 64 and
more, in which capitals, small letters and digits are mixed as chance mixes them. Invariant: a credential of a known
shape anywhere in a text never passes. It errs on the side of hiding: a log without a name is a nuisance, a log with a
token is an incident. Shapes are those of the vendors' documents.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

HIDDEN = "[redacted]"
MAX_TEXT = 256 * 1024  # characters that are looked at; what follows is left out
# Of what is shown, when a text is cut: a credential that is cut in the middle has no shape any more.
MARGIN = 4096
CUT = " … "  # in place of the middle of a text

_NAMES = (
    r"secret(?!s=[0-9]{1,9}(?![a-z0-9]))|passw(?:or)?d|passphrase|pwd|api[-_]?key|access[-_]?key(?![-_]?id)|account[-_]?key"
    r"|private[-_]?key|shared[-_]?access[-_]?signature|cookie"
)
_QUOTE = r"""\\{0,3}["']?"""
_VALUE = (
    r"""(?!\[redacted)(?:"(?:[^"\\\n]|\\.){1,4096}"?|'(?:[^'\\\n]|\\.){1,4096}'?"""
    r"""|\\{1,3}"[^"\\\n]{1,4096}|[^\s"'\\,;&<>}\])]{1,4096})"""
)
# What follows a name and a colon in the sentence of an error: "secret: not found", "credentials: MFA token required".
# Such a word is no credential. Where the first one is any word, the second or third has to be one of these.
_SENTENCE = (
    r"(?:not|no|unable|could|couldn't|can|cannot|can't|failed|fails|failure|missing|invalid|required|requires"
    r"|must|may|is|isn't|are|was|wasn't|were|be|been|has|have|had|does|doesn't|did|didn't|the|an?|this|that"
    r"|these|it|its|you|your|we|to|of|for|from|in|on|at|by|with|without|and|or|if|when|while|because|but"
    r"|neither|either|both|expected|unexpected|unknown|unsupported|wrong|bad|access|permission|denied|forbidden"
    r"|unauthorized|refused|rejected|expired|expires|please|use|only|too|error|exception|exceeded|found|empty"
    r"|set|unset|none|null|true|false)(?![\w/+=@$#%^&*-])"
)
_PROSE = r"(?!" + _SENTENCE + r")"
_PROSE_LATER = r"(?![a-z]{1,20}(?::[ \t]|,?[ \t](?:[a-z]{1,20},?[ \t])?" + _SENTENCE + r"))"
# `token=True` in a message about an argument.
_NO_VALUE = r"(?!(?:true|false|none|null)(?![\w/+=@$#%^&*.-]))"
# An exception's name before its message: "NoCredentialsError: …".
_NO_CLASS = r"(?<!(?-i:Error))(?<!(?-i:Exception))(?<!(?-i:Warning))(?<!(?-i:Args))(?<!(?-i:Fault))"
_SEPARATOR = r"(?:\s{0,3}[=>]\s{0,3}" + _NO_VALUE + r"|\s{0,3}:(?!\s)|\s{0,3}:\s{1,3}(?!\s)" + _PROSE + ")"
_OF_WORDS = _SEPARATOR[:-1] + _PROSE_LATER + ")"  # of names that sentences are about
_NUMBER = r"(?![\"']?-?[0-9][0-9.,_e+-]{0,15}(?![A-Za-z0-9/_-]))"

# Each keeps its first group, so that the reader still sees what was hidden. In each, a place in the text is looked at a
# bounded number of times: repetitions are bounded, or cannot be followed by what they repeat.
_SHAPES = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"(-----BEGIN [A-Z0-9 ]{1,40}-----).*?(?:(?=-----END [A-Z0-9 ]{1,40}-----)|\Z)",
        # Authorization: Bearer …, and a scheme anywhere if what follows it is no word
        r"(\bauthorization"
        + _QUOTE
        + r"\s{0,3}[:=]\s{0,3}"
        + _QUOTE
        + r"(?:(?:bearer|basic|token|digest|negotiate|apikey|key|aws4-hmac-sha256)\s{1,3})?)"
        + _PROSE
        + _PROSE_LATER
        + r"(?!\[redacted)[^\s\"',;]{4,}",
        r"(\b(?:bearer|basic|negotiate)\s{1,4})(?=[a-z]{0,60}[0-9._~+/=-]|(?-i:[A-Za-z][a-z]{0,60}[A-Z])|[a-z]{20})"
        r"[a-z0-9._~+/=-]{6,}",
        r"(://[^/\s:@\"']{0,100}:)[^/\s\"']{1,512}(?=@)",  # scheme://user:password@host
        r"(://)[^/\s:@\"']{16,512}(?=@)",  # scheme://token@host
        # signed URLs of S3, Google, Azure, Alibaba and CloudFront, also when they are a parameter of another one
        r"((?:X-(?:Amz|Goog|Oss|Ms)-(?:Signature|Credential|Security-Token))(?:=|%3D))[^&\s\"'<>]+",
        r"((?<![A-Za-z0-9_])(?:sig|signature|AWSAccessKeyId|GoogleAccessId|se?curity-token)(?:=|%3D))[^&\s\"'<>,;]{6,}",
        r"((?:"
        + _NAMES
        + r")[a-z0-9]{0,8}(?:[-_][a-z0-9]{1,12}){0,2}"
        + _NO_CLASS
        + _QUOTE
        + _SEPARATOR
        + r")(?!//)"
        + _VALUE,
        r"(credentials?[a-z0-9]{0,8}(?:[-_][a-z0-9]{1,12}){0,2}" + _NO_CLASS + _QUOTE + _OF_WORDS + r")(?!//)" + _VALUE,
        r"(token(?:[-_][a-z0-9]{1,12}){0,2}" + _QUOTE + _OF_WORDS + ")" + _NUMBER + _VALUE,
        r"((?<![a-z-])--?[a-z0-9_-]{0,30}(?:token|credentials?|"
        + _NAMES
        + r")[0-9]{0,3}\s{1,3}(?!\s))(?!-)"
        + _PROSE
        + _NUMBER
        + r"[^\s\"']{4,}",
    )
)
_PREFIXES = re.compile(
    r"()(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|gl(?:pat|dt|rt|ptt|cbt|ft|imt|agent|soat|oas)-[A-Za-z0-9_.-]{16,}|glrt[rt]?-[A-Za-z0-9_.-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{20,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{16,}|dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}"
    r"|dop_v1_[a-f0-9]{32,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|GOOG1?[A-Z0-9]{20,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}(?![0-9A-Z])"
    r"|[A-Za-z0-9_~.-]{3}[78]Q~[A-Za-z0-9_~.-]{31,34}"  # of an Entra application
    r")"
)
# A JWT: of a service account, of an identity provider. Its parts are one run, which is looked at once.
_RUN = re.compile(r"[A-Za-z0-9+/_.=~-]{20,}")
_JWT = re.compile(r"eyJ[A-Za-z0-9_=-]{4,}\.[A-Za-z0-9_=-]{4,}\.")
_DENSE = re.compile(r"[A-Za-z0-9+/]{40,}")
_DENSE_URL = re.compile(r"[A-Za-z0-9_-]{64,}")


# What a variable or field is called that holds a credential. Broad: hiding a value too many costs little.
_SECRET_NAME = re.compile(r"token|secret|passw|passphrase|credential|auth|cookie|private|key", re.IGNORECASE)


def secret_name(name: str) -> bool:
    """Whether a variable or field of this name holds something that must not be shown."""
    return _SECRET_NAME.search(name) is not None


def text(value: str) -> str:
    """The text with every credential of a known shape hidden."""
    value = value[:MAX_TEXT]
    for shape in _SHAPES:
        value = shape.sub(rf"\1{HIDDEN}", value)
    value = _PREFIXES.sub(HIDDEN, value)
    return _RUN.sub(_run, value)


def short(value: str, limit: int) -> str:
    """The first `limit` characters of `text(value)`."""
    return text(value[: limit + MARGIN])[:limit]


def ends(value: str, limit: int) -> str:
    """`text(value)` in at most `limit` characters: of a longer one the beginning, which names what is wrong, and the
    end, which says what to do."""
    hidden = text(value)
    if len(hidden) <= limit:
        return hidden
    end = (limit - len(CUT)) * 3 // 5
    return f"{hidden[: limit - len(CUT) - end]}{CUT}{hidden[-end:]}"


def sentence(value: str, limit: int) -> str:
    """`text(value)` in at most `limit` characters; what is cut ends with a whole word and " …"."""
    hidden = short(value, limit + 1)
    if len(hidden) <= limit:
        return hidden
    kept = hidden[: limit - 1]
    return (kept[: kept.rfind(" ")] if " " in kept else kept[:-1]) + " …"


def lines(values: Iterable[str]) -> list[str]:
    """As many lines, hidden together: a PEM block has many."""
    values = [value.replace("\n", " ") for value in values]
    hidden = text("\n".join(values)).split("\n")
    # What was hidden over some lines is one; the others of it are left out in its place, so that no line moves.
    return hidden if len(hidden) <= len(values) else hidden[: len(values)]


def _run(match: re.Match[str]) -> str:
    """A word of 20 characters and more without spaces."""
    run = match[0]
    at = run.find("eyJ")
    while at >= 0:
        token = _JWT.match(run, at)
        if token is not None:
            return _dense(run[:at]) + HIDDEN
        # No other start in this part can be followed by its dots if this one is not.
        dot = run.find(".", at)
        at = run.find("eyJ", dot) if dot >= 0 else -1
    return _dense(run)


def _dense(run: str) -> str:
    run = _DENSE.sub(lambda match: HIDDEN if _random(match[0]) else match[0], run)
    return _DENSE_URL.sub(lambda match: HIDDEN if _random(match[0]) else match[0], run)


def _random(run: str) -> bool:
    """Whether chance seems to have chosen these characters: an AWS secret key, a session token, an account key."""
    if len(run) != 40 and len(run) < 64:
        return False
    counts = Counter(run)
    kinds = (
        sum(n for c, n in counts.items() if c.isdigit()),
        sum(n for c, n in counts.items() if "A" <= c <= "Z"),
        sum(n for c, n in counts.items() if "a" <= c <= "z"),
    )
    # A name in camel case has few capitals and digits, a path many slashes, a checksum in hex no capitals.
    if kinds[0] < 1 or kinds[1] < len(run) // 8 or kinds[2] < len(run) // 8:
        return False
    entropy = -sum(n / len(run) * math.log2(n / len(run)) for n in counts.values())
    return entropy >= (4.2 if len(run) < 64 else 4.5)
