# The agent alone: no torch, no CUDA. Build from the repository's root:
#     docker build -f deploy/kubernetes/agent.Dockerfile -t example.com/sdcwatch-agent:0.1.0 .
FROM python:3.11.11-slim-bookworm

COPY exporter /src/exporter
RUN pip install --no-cache-dir /src/exporter

USER 1000:1000
ENTRYPOINT ["sdcwatch"]
CMD ["agent"]
