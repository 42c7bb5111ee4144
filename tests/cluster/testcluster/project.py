"""The project's own images, as thin layers on the bases that the nodes already have."""

from testcluster import cache, docker, pybases
from testcluster.proc import run

OPERATOR = "everstep/operator:dev"
DIGITS = "everstep/digits:dev"
EXAMPLES = "everstep/examples:dev"
DEEPSPEED = "everstep/deepspeed:dev"
SOURCES = (
    "operator",
    "worker",
    "horovod",
    "sources",
    "examples",
    "requirements",
    "LICENSE",
    "Dockerfile",
    ".dockerignore",
)
OFFLINE = "--no-deps --no-build-isolation --no-index"  # all that the project needs is in the base


def _build(name: str, tag: str, target: str, bases: tuple[str, ...]) -> str:
    arguments = [part for base in bases for part in ("--build-arg", base)]
    arguments += ["--build-arg", f"PIP_OPTIONS={OFFLINE}", "--build-arg", "LOCKED=", "--target", target]
    sources = tuple(cache.CHECKOUT / source for source in SOURCES if (cache.CHECKOUT / source).exists())
    made = docker.image(
        f"project/{name}", (*arguments, *sources), lambda made: docker.build(cache.CHECKOUT, made, *arguments)
    )
    run("docker", "tag", made, tag)
    return tag


def _bases(worker: str) -> tuple[str, str]:
    return f"OPERATOR_BASE={pybases.operator()}", f"WORKER_BASE={worker}"


def build() -> list[str]:
    """Tags of the operator's image, of the digits example's (the worker's with the example in it), of all examples'."""
    bases = _bases(pybases.worker())
    return [
        _build("operator", OPERATOR, "operator", bases),
        _build("digits", DIGITS, "example", bases),
        _build("examples", EXAMPLES, "examples", bases),
    ]


def deepspeed() -> str:
    """The tag of the image of examples/deepspeed, which one long test needs."""
    return _build("deepspeed", DEEPSPEED, "deepspeed", _bases(pybases.deepspeed()))
