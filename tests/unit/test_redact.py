"""What must never be read in a log or status, what must stay readable, and that no text takes long."""

from __future__ import annotations

import base64
import json
import random
import string
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.contract import redact
from everstep.contract.redact import HIDDEN, MAX_TEXT

ALNUM = string.ascii_letters + string.digits
BASE64 = ALNUM + "+/"
URL64 = ALNUM + "-_"


def of(rng: random.Random, letters: str, count: int) -> str:
    return "".join(rng.choice(letters) for _ in range(count))


def jwt(rng: random.Random) -> str:
    head, body = (base64.urlsafe_b64encode(json.dumps({"a": of(rng, ALNUM, n)}).encode()).decode() for n in (8, 60))
    return f"{head.rstrip('=')}.{body.rstrip('=')}.{of(rng, URL64, 86)}"


def pem(rng: random.Random, kind: str = "RSA PRIVATE KEY") -> str:
    body = "\n".join(of(rng, BASE64, 64) for _ in range(10)) + "\n" + of(rng, BASE64, 30) + "=="
    return f"-----BEGIN {kind}-----\n{body}\n-----END {kind}-----"


# What has a shape of its own: hidden wherever it is.
SHAPES: dict[str, Callable[[random.Random], str]] = {
    "github classic": lambda r: r.choice(["ghp_", "gho_", "ghu_", "ghs_", "ghr_"]) + of(r, ALNUM, 36),
    "github fine-grained": lambda r: f"github_pat_{of(r, ALNUM, 22)}_{of(r, ALNUM, 59)}",
    "gitlab": lambda r: r.choice(["glpat-", "gldt-", "glrt-", "glptt-", "glcbt-", "glft-"]) + of(r, URL64, 20),
    "hugging face": lambda r: "hf_" + of(r, ALNUM, 34),
    "AWS access key": lambda r: r.choice(["AKIA", "ASIA"]) + of(r, string.ascii_uppercase + "234567", 16),
    "AWS secret key": lambda r: of(r, BASE64, 38) + "a1",
    "STS session token": lambda r: "IQoJb3JpZ2luX2Vj" + of(r, BASE64, 300) + "==",
    "Azure account key": lambda r: base64.b64encode(r.randbytes(64)).decode(),
    "JWT": jwt,
    "Google API key": lambda r: "AIza" + of(r, URL64, 35),
    "Google access token": lambda r: "ya29." + of(r, URL64, 100),
    "PEM": pem,
    "PEM in JSON": lambda r: json.dumps(pem(r, "PRIVATE KEY"))[1:-1],
    "slack": lambda r: f"xoxb-{of(r, string.digits, 11)}-{of(r, ALNUM, 24)}",
    "npm": lambda r: "npm_" + of(r, ALNUM, 36),
    "OpenAI": lambda r: "sk-" + of(r, ALNUM, 40),
    "Entra secret": lambda r: of(r, ALNUM, 3) + "8Q~" + of(r, ALNUM, 34),
}
# What surrounds it. The last ones are places where a secret is put together with other text.
PLACES = [
    "{}", "refused: {}", "key={} was refused", '{{"a": "{}"}}', "ValueError('{}')", "https://host/a?b={}&c=d",
    "<a>{}</a>",
    "line\n{}\nline", "\t{}\t", "({})", "[{}]", "`{}`", "a:{}", "x-{} ", "--flag {}", "--flag={}",
]  # fmt: skip
# What is known by the name before it.
NAMED = [
    "password={}", "PASSWORD: {}", '"password": "{}"', "'db_password': '{}'", "passwd={}", "pwd={};", "secret={}",
    "AWS_SECRET_ACCESS_KEY={}", "aws_session_token = {}", '"SessionToken": "{}"',
    "<SecretAccessKey>{}</SecretAccessKey>",
    "<SessionToken>{}</SessionToken>", "client_secret={}", "api_key={}", "apiKey: {}", "X-Api-Key: {}",
    "Authorization: Bearer {}", "authorization: {}", '"Authorization": "token {}"', "AccountKey={};EndpointSuffix=a",
    "SharedAccessSignature=sv=1&sig={}", "https://a.blob.core.windows.net/c/b?sv=2022-11-02&sp=r&sig={}",
    "https://a.blob.core.windows.net/c/b?sig={}&se=2027",
    "https://storage.googleapis.com/b/o?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential=a&X-Goog-Signature={}",
    "https://storage.googleapis.com/b/o?GoogleAccessId=a@b&Expires=1&Signature={}",
    "https://b.s3.amazonaws.com/o?X-Amz-Security-Token={}&X-Amz-Signature=ab", "https://b.s3/o?X-Amz-Signature={}",
    "https://x/?next=https%3A%2F%2Fb.s3%2Fo%3FX-Amz-Signature%3D{}", "postgres://user:{}@host/db", "redis://:{}@host:1",
    "--password {} --verbose", "--token {}", "--hf-token={}", "HF_TOKEN={}", "WANDB_API_KEY={}", "private_key={}",
    "--hf_token {}", "--s3_api_key2 {}",
    "Set-Cookie: {}", '{{\\"password\\": \\"{}\\"}}', "MYSQL_PASSWORD='{}'", "credentials={}", "passphrase: {}",
]  # fmt: skip


def parts_of(secret: str) -> list[str]:
    """What of a secret must not be readable: each of its lines and words but for the markers of a PEM block."""
    words = secret.replace("\\n", "\n").split("\n")
    return [word for word in words if word and not word.startswith("-----")]


@pytest.mark.parametrize("kind", SHAPES)
@given(st.integers(0, 2**32), st.sampled_from(PLACES), st.text(max_size=50), st.text(max_size=50))
def test_what_has_a_shape_is_hidden_wherever_it_is(kind: str, seed: int, place: str, before: str, after: str) -> None:
    secret = SHAPES[kind](random.Random(seed))
    shown = redact.text(f"{before} {place.format(secret)} {after}")
    for part in parts_of(secret):
        assert part not in shown
        assert part[4 : 4 + len(part) // 2] not in shown


@given(
    st.sampled_from(NAMED),
    st.text(string.ascii_letters + string.digits + "!$%*+.^_~-", min_size=8, max_size=40),
    st.text(string.ascii_lowercase + " ", max_size=50),
)
def test_what_has_a_name_is_hidden_whatever_it_looks_like(place: str, value: str, before: str) -> None:
    secret = "Zq7" + value.strip("-") + "Xk9"
    shown = redact.text(f"{before} {place.format(secret)} after it")
    assert secret not in shown
    assert secret[:8] not in shown
    assert HIDDEN in shown


@given(st.integers(0, 2**32), st.integers(0, 400), st.sampled_from(sorted(SHAPES)))
def test_cutting_a_text_leaves_no_half_of_a_secret(seed: int, limit: int, kind: str) -> None:
    secret = SHAPES[kind](random.Random(seed))
    shown = redact.short(f"it said: {secret} and more", limit)
    assert len(shown) <= limit
    for part in parts_of(secret):
        assert part[: len(part) // 2] not in shown


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_key_over_many_lines_is_hidden_in_each_of_them(seed: int, around: int) -> None:
    secret = pem(random.Random(seed))
    found = redact.lines([*["before"] * around, *secret.split("\n"), *["after"] * around])
    assert found[:around] == ["before"] * around
    assert found[-around:] == ["after"] * around
    for part in parts_of(secret):
        assert not any(part in line for line in found)


ORDINARY = [
    "worker digits-w1-0 lost: NodeLost",
    "http://10.0.0.1:8080/v1/report",
    "step 12 of 600",
    "Training resumed with 2 workers 0.3 s after losing worker 1; no steps repeated.",
    'File "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1593, in forward',
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity)",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970",
    "commit 3f2504e04f8941d39a0c0305e82c3301 of 6b4c9ed0d2f1a7c35b8e9f0a1b2c3d4e5f607182",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "pod 3f2504e0-4f89-41d3-9a0c-0305e82c3301 in namespace team-a",
    "s3://bucket/runs/digits/log/00000000000000000012.json",
    "tokens_per_second=1234.5 max_tokens: 2048",
    "token 17 of the vocabulary; tokens: 512",
    "the bearer token is not valid for this operator, or its pod is gone",
    "Basic block of the model; basic training",
    "ModuleNotFoundError: No module named 'everstep_secrets'",
    "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint {key: value}.",
    'Failed to pull image "registry.example.com/team/train:v1.2.3": rpc error: code = NotFound',
    "TransformerEncoderLayerWithRelativePositionalEncodingAndDropoutForSequenceClassification",
    "shape [4096, 4096], dtype bfloat16, grad_norm=0.1234567890123456",
    "git+https://github.com/example/project@main",
    "ssh://git@github.com/example/project.git",
    "",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact.text(text) == text
    assert redact.lines(text.split("\n")) == text.split("\n")


WORDS = "the worker of round was lost after step and began again in a pod"


@given(st.lists(st.sampled_from(WORDS.split(" ")), max_size=60))
def test_ordinary_words_are_unchanged(words: list[str]) -> None:
    assert redact.text(" ".join(words)) == " ".join(words)


@given(st.integers(0, 2**32), st.sampled_from(sorted(SHAPES)))
def test_hiding_twice_changes_nothing_more(seed: int, kind: str) -> None:
    once = redact.text(f"a password=x1y2z3 and {SHAPES[kind](random.Random(seed))} b")
    assert redact.text(once) == once


PIECES = [
    "eyJ", "eyJ-", "eyJabcd.", "-----BEGIN A-----", "bearer ", "password", "password= ", "password=\"", "://", "://a:",
    "://a:b@", "--", "--a-", "token-a", "token ", "secret_a", "sig=", "aB1", "8Q~", "X-Amz-Signature=",
    "authorization:",
    "glpat-", "github_pat_", "hf_", "sk-", "\\", '"', "'", " ", "=", "a", "aB", "\n", "[redacted]", "AKIA",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("start", ["", 'password="'])
def test_time_grows_with_the_length_only(start: str, piece: str) -> None:
    """Of processor time, four times the text may take four times as long; something quadratic takes sixteen times."""

    def took(size: int) -> float:
        text = (start + piece * (size // len(piece) + 1))[:size]
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            redact.text(text)
            best = min(best, time.process_time() - began)
        return best

    assert took(16_000) <= 11 * took(4_000) + 0.01


def test_more_than_can_be_looked_at_is_left_out() -> None:
    assert len(redact.text("a " * MAX_TEXT)) <= MAX_TEXT


@given(text=st.text(alphabet="ab ", max_size=60), limit=st.integers(4, 40))
def test_sentence_that_is_cut_ends_with_a_whole_word_and_says_so(text: str, limit: int) -> None:
    found = redact.sentence(text, limit)
    assert len(found) <= limit
    assert redact.sentence(found, limit) == found
    if len(text) <= limit:
        assert found == text
    else:
        kept = found.removesuffix(" …")
        assert found.endswith(" …")
        assert text.startswith(kept)
        assert " " not in text[: limit - 1] or text[len(kept)] == " "
