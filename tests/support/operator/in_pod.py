"""The operator as in a pod: `in_pod.py FOLDER [ARGUMENT ...]`, where a kubelet would have mounted FOLDER.

The variables KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT name the API server. When the operator has stopped,
the names of all modules that it had loaded are printed to standard output, one a line.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from everstep_operator import arguments, main
from everstep_operator.kube.credentials import find_source

folder, *given = sys.argv[1:]
arguments.find_source = partial(find_source, service_account=Path(folder))  # type: ignore[attr-defined]
code = main.main(given)
print(*sorted(sys.modules), sep="\n")
sys.exit(code)
