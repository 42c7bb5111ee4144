"""Exit codes with a meaning of their own. All other non-zero codes are the user's program failing."""

OK = 0
# The process was fenced: a newer open record (or round) owns the training state. Never charged to the budget.
FENCED = 84
# The checkpoint store cannot be used (403, missing bucket, no conditional create). Repeating it cannot help.
STORE_UNUSABLE = 85
# The process was asked to stop (SIGTERM) and did, after a commit if there was time, or because the others train on.
# Never charged as a fault.
PREEMPTED = 86
# The process lost its peers and cannot go on from what it holds: a new process takes its place. Never charged.
NOT_RECOVERED = 87
