# Three targets: `operator`, `worker` (torchrun and the everstep library) and `example` (worker with the digits example).
#
#   docker build --target operator -t everstep/operator .
#
# Both bases default to python:3.11-slim. The test cluster gives bases that hold the dependencies already, and
# PIP_OPTIONS that let pip install nothing else. Written for BuildKit and for the builder of Docker 20.10 alike.
ARG BASE=python:3.11-slim
ARG OPERATOR_BASE=${BASE}
ARG WORKER_BASE=${BASE}

FROM ${OPERATOR_BASE} AS operator
ARG PIP_OPTIONS=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY . /src
RUN pip install ${PIP_OPTIONS} '/src[operator]' && everstep-operator --help >/dev/null
USER 65532:65532
ENTRYPOINT ["everstep-operator"]

FROM ${WORKER_BASE} AS worker
ARG PIP_OPTIONS=""
# HOME must be writable for a user that has none: torch and fsspec keep caches there.
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HOME=/tmp
COPY . /src
RUN pip install ${PIP_OPTIONS} '/src[worker,s3]' && torchrun --help >/dev/null && python -c 'import everstep'
WORKDIR /workspace
USER 65532:65532

FROM worker AS example
USER 0
ARG PIP_OPTIONS=""
RUN pip install ${PIP_OPTIONS} 'scikit-learn>=1.7'
COPY examples/digits/ /workspace/
USER 65532:65532
