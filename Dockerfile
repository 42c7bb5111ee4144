# Five targets: `operator`, `worker` (torchrun and the everstep library), `example` (worker with the digits example),
# `examples` (worker with all of examples/, a folder each, and what they import) and `deepspeed` (examples with DeepSpeed,
# which Accelerate and Trainer would import in each process where it is installed).
#
#   docker build --target operator -t everstep/operator .
#
# Both bases default to one release of python:3.11-slim, by its digest. `docker buildx imagetools inspect` prints that of a
# newer one. The test cluster gives bases that hold the dependencies already, and PIP_OPTIONS that let pip install nothing
# else. It also gives LOCKED="", as one may whose base holds other versions than the locked ones and is to keep them.
# Written for BuildKit and for the builder of Docker 20.10 alike.
#
# requirements/ has the exact versions and hashes of all that is installed but torch, which has a build for each kind of
# GPU, and what torch needs: TORCH is its version. `make lock` renews them.
ARG BASE=python:3.11.15-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba
ARG OPERATOR_BASE=${BASE}
ARG WORKER_BASE=${BASE}

FROM ${OPERATOR_BASE} AS wheel
ARG PIP_OPTIONS=""
ARG LOCKED=yes
# The time in the wheels. With that of the commit they are those of the release, to the bit.
ARG SOURCE_DATE_EPOCH
COPY requirements/build.txt /requirements/
RUN test -z "${LOCKED}" || pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes -r /requirements/build.txt
COPY LICENSE /src/
COPY horovod /src/horovod
COPY operator /src/operator
COPY sources /src/sources
COPY worker /src/worker
RUN pip wheel --no-deps --no-build-isolation ${PIP_OPTIONS} -w /wheels /src/worker /src/operator /src/horovod /src/sources

FROM ${OPERATOR_BASE} AS operator
ARG PIP_OPTIONS=""
ARG LOCKED=yes
# The compiled frozenlist alone loads libstdc++: 1.2 MiB of the operator's memory (ADR 0057).
ENV PYTHONUNBUFFERED=1 FROZENLIST_NO_EXTENSIONS=1
COPY requirements/operator.txt /requirements/
# Half of the image would be bytecode that is never loaded. What the operator loads is compiled below, as it is imported.
RUN test -z "${LOCKED}" || \
    pip install --no-cache-dir --no-compile ${PIP_OPTIONS} --require-hashes -r /requirements/operator.txt
COPY --from=wheel /wheels/everstep-*.whl /wheels/everstep_operator-*.whl /wheels/
# Nothing but these: what they need is what was locked, and `pip check` says if it is not. It has no official client of
# Kubernetes, which only a kubeconfig needs (ADR 0057).
RUN pip install --no-cache-dir --no-compile --no-deps ${PIP_OPTIONS} /wheels/*.whl && \
    { test -z "${LOCKED}" || pip check; } && python -c 'import everstep_operator.main, jwt'
USER 65532:65532
ENTRYPOINT ["everstep-operator"]

FROM ${WORKER_BASE} AS worker
ARG PIP_OPTIONS=""
ARG LOCKED=yes
ARG TORCH=torch==2.13.0
# A user without a home: libraries that keep caches under HOME need one that is writable.
ENV PYTHONUNBUFFERED=1 HOME=/tmp
COPY requirements/worker.txt /requirements/
RUN test -z "${LOCKED}" || pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes -r /requirements/worker.txt
COPY --from=wheel /wheels/everstep-*.whl /wheels/
RUN test -z "${LOCKED}" || pip install --no-cache-dir ${PIP_OPTIONS} "${TORCH}"
RUN pip install --no-cache-dir --no-deps ${PIP_OPTIONS} /wheels/everstep-*.whl && \
    { test -z "${LOCKED}" || pip check; } && torchrun --help >/dev/null && python -c 'import everstep'
WORKDIR /workspace
USER 65532:65532

FROM worker AS example
ARG PIP_OPTIONS=""
USER 0
RUN pip install --no-cache-dir ${PIP_OPTIONS} 'scikit-learn>=1.7'
COPY examples/digits/ /workspace/
USER 65532:65532

FROM worker AS examples
ARG PIP_OPTIONS=""
USER 0
RUN pip install --no-cache-dir ${PIP_OPTIONS} 'scikit-learn>=1.7' 'transformers>=5.20' 'accelerate>=1.12' \
    'lightning>=2.6' 'peft>=0.21' 'tensorboard>=2.20' 'webdataset>=1.0'
COPY --from=wheel /wheels/everstep_horovod-*.whl /wheels/everstep_sources-*.whl /wheels/
RUN pip install --no-cache-dir --no-deps ${PIP_OPTIONS} /wheels/everstep_horovod-*.whl /wheels/everstep_sources-*.whl
COPY examples/ /workspace/
USER 65532:65532

FROM examples AS deepspeed
ARG PIP_OPTIONS=""
USER 0
RUN DS_BUILD_OPS=0 pip install --no-cache-dir ${PIP_OPTIONS} 'deepspeed>=0.19.8'
USER 65532:65532
