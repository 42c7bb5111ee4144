"""Names of the API group, labels, annotations and ports that appear on Kubernetes objects."""

GROUP = "everstep.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"

# On every pod, service and event of a job.
JOB = f"{GROUP}/job"
JOB_UID = f"{GROUP}/job-uid"
WORKER_INDEX = f"{GROUP}/worker-index"
INCARNATION = f"{GROUP}/incarnation"
ROUND = f"{GROUP}/round"
# Of the spec from which a worker's pod was made.
SPEC_HASH = f"{GROUP}/spec-hash"

# An annotation of a job: the names of pods, separated by commas, that a person wants on another node.
MIGRATE = f"{GROUP}/migrate"
CANNOT_MOVE = "cannot be moved: "  # in the message of Ready, before the reason
# A taint or an annotation of a node: its workers are to leave. The value says why.
LEAVE = f"{GROUP}/leave"

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "everstep"

# The container that trains; others in the pod are the user's side-cars.
WORKER_CONTAINER = "worker"

# The audience that a worker's projected service-account token is bound to.
TOKEN_AUDIENCE = "everstep.dev/operator"

# torchrun's rendezvous on worker 0.
RENDEZVOUS_PORT = 29400
