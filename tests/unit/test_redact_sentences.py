"""Real error texts pass unharmed: "Unable to locate credentials" after "NoCredentialsError:" is no credential.

One half are texts as kubectl, the stores' services and torch print them. The other half are read from the source of the
libraries that the stores use: what each of their `raise` statements says.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import string
from collections.abc import Iterator
from pathlib import Path

import botocore.exceptions
import pytest

from everstep.contract import redact
from everstep.contract.redact import HIDDEN

PRINTED = [
    # boto and the services behind it
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "NoCredentialsError: Unable to locate credentials. You can configure credentials by running \"aws configure\".",
    "botocore.exceptions.PartialCredentialsError: Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY",
    "CredentialRetrievalError: Error when retrieving credentials from custom-process: exit status 1",
    "Error when retrieving credentials from sso: Token has expired and refresh failed",
    "UnauthorizedSSOTokenError: The SSO session associated with this profile has expired or is otherwise invalid.",
    "TokenRetrievalError: Error when retrieving token from sso: Token has expired and refresh failed",
    "An error occurred (ExpiredToken) when calling the PutObject operation: The provided token has expired.",
    "An error occurred (InvalidAccessKeyId) when calling the ListObjectsV2 operation: The AWS "
    "Access Key Id you provided "
    "does not exist in our records.",
    "An error occurred (SignatureDoesNotMatch) when calling the PutObject operation: The request "
    "signature we calculated "
    "does not match the signature you provided. Check your key and signing method.",
    "An error occurred (AccessDenied) when calling the GetObject operation: Access Denied",
    "ExpiredToken: The provided token has expired.",
    "InvalidToken: The provided token is malformed or otherwise not valid",
    "InvalidClientTokenId: The security token included in the request is invalid.",
    "EndpointConnectionError: Could not connect to the endpoint URL: \"https://everstep.s3.amazonaws.com/digits\"",
    "ProfileNotFound: The config profile (training) could not be found",
    "secret: not found",
    "token: missing",
    "credentials: none found",
    "password: is required",
    "api_key: must be set",
    "Secret: access denied",
    "AWS_SECRET_ACCESS_KEY: not set",
    "AWS_SESSION_TOKEN: expired",
    # Google
    "google.auth.exceptions.DefaultCredentialsError: Your default credentials were not found.",
    "DefaultCredentialsError: Your default credentials were not found. To set up Application "
    "Default Credentials, see ...",
    "DefaultCredentialsError: File /var/run/key.json was not found.",
    "google.auth.exceptions.RefreshError: Reauthentication is needed. Please run `gcloud auth "
    "login` to reauthenticate.",
    "RefreshError: ('invalid_grant: Bad Request', {'error': 'invalid_grant', 'error_description': 'Bad Request'})",
    "HttpError: Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object., 401",
    "HttpError: Invalid Credentials, 401",
    "gcsfs.retry.HttpError: The specified bucket does not exist., 404",
    "OSError: Forbidden: https://storage.googleapis.com/storage/v1/b/everstep/o",
    # Azure
    "azure.core.exceptions.ClientAuthenticationError: Server failed to authenticate the request. "
    "Make sure the value of "
    "Authorization header is formed correctly including the signature.",
    "ClientAuthenticationError: Authentication failed: AADSTS7000215: Invalid client secret provided.",
    "CredentialUnavailableError: EnvironmentCredential authentication unavailable. Environment variables are not fully "
    "configured.",
    "DefaultAzureCredential failed to retrieve a token from the included credentials.",
    "ManagedIdentityCredential authentication unavailable, no response from the IMDS endpoint.",
    "ValueError: Must provide either a connection_string or account_name with credentials!!",
    "ResourceNotFoundError: The specified container does not exist.",
    "AuthenticationFailed: Server failed to authenticate the request. Please refer to the information in the www-"
    "authenticate header.",
    "Authorization: header is missing",
    "InvalidAuthenticationInfo: Authorization header is not in the correct format",
    # kubectl, the API server and the kubelet
    "error: You must be logged in to the server (Unauthorized)",
    "error: You must be logged in to the server (the server has asked for the client to provide credentials)",
    'Error from server (NotFound): secrets "s3-credentials" not found',
    'Error from server (Forbidden): secrets is forbidden: User "jane" cannot list resource '
    '"secrets" in API group "" in '
    'the namespace "team-a"',
    'Error from server (AlreadyExists): secrets "s3-credentials" already exists',
    'Error: secret "s3-credentials" not found',
    'CreateContainerConfigError: secret "s3-credentials" not found',
    'CreateContainerConfigError: couldn\'t find key AWS_SECRET_ACCESS_KEY in Secret team-a/s3-credentials',
    'MountVolume.SetUp failed for volume "creds" : secret "s3-credentials" not found',
    'MountVolume.SetUp failed for volume "creds" : references non-existent secret key: access-key',
    'MountVolume.SetUp failed for volume "kube-api-access-x7x2p" : failed to sync configmap cache: '
    'timed out waiting for '
    "the condition",
    'Unable to retrieve some image pull secrets (regcred); attempting to pull the image may not succeed.',
    'Failed to pull image "registry/team/train:1": failed to authorize: failed to fetch anonymous token: unexpected '
    "status: 401 Unauthorized",
    'Failed to pull image "train:1": no basic auth credentials',
    "pull access denied for train, repository does not exist or may require 'docker login': denied",
    "error: unable to load root certificates: unable to parse bytes as PEM block",
    'error validating data: ValidationError(Secret.data): invalid type for '
    'io.k8s.api.core.v1.Secret.data: got "string"',
    'The Secret "a" is invalid: data[token]: Invalid value: "<secret contents redacted>": must be base64',
    "error: no matching resources found for secret: wrong namespace",
    "Unable to connect to the server: getting credentials: exec: executable aws-iam-authenticator not found",
    "Unable to connect to the server: x509: certificate signed by unknown authority",
    "couldn't get current server API group list: the server has asked for the client to provide credentials",
    "serviceaccounts \"trainer\" is forbidden: error looking up service account team-a/trainer: not found",
    "Error: failed to create secret: exceeded quota: compute, requested: secrets=1, used: "
    "secrets=10, limited: secrets=10",
    "token: must have at least one audience",
    "invalid bearer token, token lookup failed",
    "service account token has expired",
    # torch, gloo, NCCL and the hubs
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)",
    'KeyError: "attribute \'password\' already exists"',
    "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: \"token_embedding.weight\".",
    'RuntimeError: Error(s) in loading state_dict for GPT:\n\tUnexpected key(s) in state_dict: "lm_head.weight".',
    "size mismatch for token_embedding.weight: copying a param with shape torch.Size([50257, 768]) from checkpoint",
    "IndexError: index out of range in self, token 50300 of 50257",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistNetworkError: The client socket has failed to connect to any network "
    "address of (digits, 29500)",
    "[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed "
    "by peer [10.0.0.2]:4",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "ValueError: Tokenizer class LlamaTokenizer does not exist or is not currently imported.",
    "OSError: You are trying to access a gated repo. Make sure to have access to it and pass a token",
    "huggingface_hub.errors.LocalTokenNotFoundError: Token is required (`token=True`), but no token found.",
    "ValueError: pad_token: None is not allowed",
    "Asking to pad but the tokenizer does not have a padding token.",
    "UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
    "wandb: ERROR Error while calling W&B API: user is not logged in",
    "ValueError: password: expected str, not NoneType",
    "TypeError: connect() got an unexpected keyword argument 'token'",
    "KeyError: 'HF_TOKEN'",
    "keyring.errors.PasswordDeleteError: No such password!",
    "paramiko.ssh_exception.PasswordRequiredException: private key file is encrypted",
    "paramiko.ssh_exception.AuthenticationException: Authentication failed.",
    "paramiko.ssh_exception.BadAuthenticationType: Bad authentication type; allowed types: ['publickey']",
    "psycopg2.OperationalError: FATAL:  password authentication failed for user \"mlflow\"",
    "error: cookie: missing",
    "usage: train.py [-h] [--token is required]",
]  # fmt: skip


@pytest.mark.parametrize("text", PRINTED)
def test_error_as_it_is_printed_is_unchanged(text: str) -> None:
    assert redact.text(text) == text


# What stands in a library's text for a value that only the program knows. It may be a credential, so it may be hidden.
VALUE = "Zq7valueXk9"


class _Values(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return VALUE


def test_every_text_of_boto_is_unchanged() -> None:
    classes = {n: c for n, c in vars(botocore.exceptions).items() if isinstance(getattr(c, "fmt", None), str)}
    assert len(classes) > 80
    for name, kind in classes.items():
        said = f"botocore.exceptions.{name}: " + string.Formatter().vformat(kind.fmt, (), _Values())
        assert redact.text(said).replace(HIDDEN, VALUE) == said


@pytest.mark.parametrize("package", ["gcsfs", "adlfs", "azure.storage.blob", "google.auth", "google.api_core"])
def test_every_text_that_a_library_raises_is_unchanged(package: str) -> None:
    texts = set(_raised(package))
    assert len(texts) > 10
    for said in texts:
        assert redact.text(said).replace(HIDDEN, VALUE) == said


def _raised(package: str) -> Iterator[str]:
    found = importlib.util.find_spec(package)
    assert found is not None
    for folder in found.submodule_search_locations or ():
        for path in Path(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    name = ast.unparse(node.exc.func)
                    yield from (f"{name}: {said}" for a in node.exc.args if (said := _literal(a)) is not None)


def _literal(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _literal(left), _literal(right)
            return None if first is None or second is None else first + second
        case ast.BinOp(left=left, op=ast.Mod()):
            said = _literal(left)
            return None if said is None else re.sub(r"%[srd]", VALUE, said)
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            said = _literal(value)
            return None if said is None else re.sub(r"\{[^{}]*\}", VALUE, said)
        case _:
            return None


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2", "password: swordfish", "passphrase: correct horse battery staple",
        "secret: s3cr3t is used",
        "password:not found", "password=not found", 'password: "not found"', "token: nothing-1 is set", "pwd: no+way",
        "PasswordError: password: swordfish", "credentials: alice:wonder", "token = unable1", "--password required1",
        "api_key: the_key",
    ],
)  # fmt: skip
def test_credential_that_begins_like_a_sentence_is_hidden(text: str) -> None:
    assert HIDDEN in redact.text(text)
