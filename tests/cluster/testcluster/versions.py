"""The versions of everything the test cluster is made of, in one place."""

KUBERNETES = "1.34.4"
# The oldest and the newest that Everstep is for. Of these only the API server is built, by night.
RANGE = OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.30.14", "1.37.2"
ETCD = "3.6.5"
COREDNS = "1.12.1"
PAUSE = "3.10.1"
KIND = "0.30.0"
HELM = "4.3.1"
VERSITYGW = "1.8.0"
FAKE_GCS_SERVER = "1.56.1"
KUBE_ROUTER = "2.1.0"
PROMETHEUS = "3.13.5"
PROMETHEUS_OPERATOR = "0.85.0"
KUEUE = "0.17.0"
AZURITE = "3.37.0"
S3RVER = "3.7.1"
DEBIAN = "bookworm"
PYTHON = "3.11"

# Where images can be pulled: the node image that kind 0.30 was released with.
KIND_NODE_IMAGE = "kindest/node:v1.34.0"
PYTHON_IMAGE = "python:3.11-slim"

# Programs of the machine are used from these versions on; where there are none, a wheel of the second.
GO_LEAST, GO = (1, 24), "1.26.6"
NODE_LEAST, NODE = (20, 0), "22.20.0"
