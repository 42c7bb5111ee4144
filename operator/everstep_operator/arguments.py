"""The command line of `everstep-operator`. All arguments are checked here, before anything is contacted.

Every setting of the environment is a flag too. Outside of a pod the cluster and the namespace of the Lease have to be
named. Two operators with Leases in two namespaces do not know of each other: no namespace may be watched by both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.contract import redact
from everstep.version import __version__
from everstep_operator.kube.credentials import Cluster, InCluster, find_source, look_up, own_namespace
from everstep_operator.settings import NAMESPACE, VARIABLES, OperatorSettings, SettingsError


@dataclass(frozen=True, slots=True)
class Invocation:
    """The parsed command line: the cluster and the settings."""

    settings: OperatorSettings
    cluster: Cluster


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of the flags. `environ` is used only to show present values in the help text."""
    p = argparse.ArgumentParser(
        prog="everstep-operator",
        description="Runs TrainingJobs of one Kubernetes cluster, or of some of its namespaces, until it is stopped. "
        "In a pod it uses the pod's service account; elsewhere give --kubeconfig or --context, and --namespace.",
        epilog="Each setting can be given as the variable in brackets, too; a flag wins.",
        allow_abbrev=False,  # a flag that is added later must not change the meaning of a shortened one
    )
    p.add_argument("--version", action="version", version=f"everstep-operator {__version__}")
    p.add_argument(
        "--kubeconfig", metavar="FILE", help="kubeconfig of the cluster (default with --context: $KUBECONFIG)"
    )
    p.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    for variable in VARIABLES:
        now = environ.get(variable.name)
        shown = f"here: {redact.text(now)}" if now else f"default: {variable.default}" if variable.default else ""
        p.add_argument(
            variable.flag,
            dest=variable.name,
            metavar=variable.name.rpartition("_")[2],
            help=f"{variable.text}{f'; {shown}' if shown else ''} [{variable.name}]".replace("%", "%%"),
        )
    return p


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Parse and check the arguments. Raises SettingsError or CredentialsError; ends Python for --help, --version and an
    unknown argument."""
    parsed = parser(environ).parse_args(list(argv))
    flags = {v.name: value for v in VARIABLES if (value := getattr(parsed, v.name)) is not None}
    OperatorSettings.from_env(environ, flags)
    cluster = look_up(find_source(environ, parsed.kubeconfig, parsed.context))
    if not (flags.get(NAMESPACE.name) or environ.get(NAMESPACE.name)):
        if not isinstance(cluster.source, InCluster):
            raise SettingsError(
                f"{NAMESPACE.flag}: needed outside of a pod: the {NAMESPACE.text}; give the one in which the operators "
                f"of this cluster run ({cluster})"
            )
        flags[NAMESPACE.name] = own_namespace(cluster.source)
    return Invocation(OperatorSettings.from_env(environ, flags), cluster)
