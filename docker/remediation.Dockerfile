# The service side: sdcwatch-remediation with its HyperPod simulator. No torch in here.
# Build from the repository's root: docker build -f docker/remediation.Dockerfile .
FROM python:3.11.11-slim-bookworm

COPY remediation /src/remediation
RUN pip install --no-cache-dir '/src/remediation[postgres,eks]'

USER 65534:65534
WORKDIR /state
