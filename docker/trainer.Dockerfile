# The training side: sdcwatch, a CPU build of torch, and the demo's training script. Also runs the node agents.
# Build from the repository's root: docker build -f docker/trainer.Dockerfile .
FROM python:3.11.11-slim-bookworm

ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}"

COPY exporter /src/exporter
RUN pip install --no-cache-dir /src/exporter numpy
COPY demo /opt/demo
COPY docker/node.py docker/pager.py /opt/docker/

# The user that Prometheus's and Alertmanager's own images run as: one owner for spool, tokens and checkpoints.
USER 65534:65534
WORKDIR /opt/demo
