# Agent-R1 in a box. `./speedrun.sh` builds and starts it; by hand:
#
#   docker build -t agent-r1:gpu .                          for NVIDIA GPUs: torch, verl, vLLM
#   docker build -t agent-r1:cpu --build-arg STACK=cpu .    for a machine without one: discover, pocket
#
# Rare changes come first, so a change of the source rebuilds only the last layers. The build needs and stores no key:
# keys are passed to `docker run` by name (speedrun.sh).
#
# The bases are pinned by tag, as verl's own images are. A tag can be moved; to pin the bytes, append the digest,
# `FROM nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:...`, as printed by
# `docker buildx imagetools inspect nvidia/cuda:13.0.2-devel-ubuntu24.04`.
ARG STACK=gpu

# CUDA 13.0, which torch 2.13.0 and vLLM 0.27.1 are built for. -devel, because FlashInfer compiles kernels with nvcc
# when it first needs them. Python 3.12 is Ubuntu's own, and the one for which the pins are resolved. Triton needs
# compiler and headers for a launcher of each kernel, and W&B needs the certificates. No versions: the archive keeps
# the newest patch only, so a pin (DL3008) would break the build within weeks.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS gpu
ENV AGENT_R1_STACK=gpu REQUIREMENTS=requirements/verl-gpu.txt
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential ca-certificates python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv

# Python 3.11 is Debian's own. Nothing here is compiled. `make long PART=image` builds this stage without a Docker engine.
FROM debian:bookworm-slim AS cpu
ENV AGENT_R1_STACK=cpu REQUIREMENTS=requirements/cpu.txt
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

# Everything below is the same for both.
# hadolint ignore=DL3006
FROM ${STACK}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Any user may run it (speedrun.sh passes the caller's id), so run-time folders are open to all, like /tmp. USER and
# HOME are set because such a user is in no passwd, where PyTorch would look them up. An init that signals the whole
# process group (docker run --init) lets Ctrl-C reach the trainer below the shell.
#
# Kernels compiled by Triton, PyTorch, vLLM and FlashInfer go to /cache/kernels, which speedrun.sh mounts. Otherwise a
# container would compile for minutes at each start.
ENV HOME=/home/agent USER=agent HF_HOME=/cache/huggingface PATH=/opt/venv/bin:$PATH AGENT_R1_VENV=/opt/venv \
    TRITON_CACHE_DIR=/cache/kernels/triton TORCHINDUCTOR_CACHE_DIR=/cache/kernels/inductor \
    VLLM_CACHE_ROOT=/cache/kernels/vllm FLASHINFER_WORKSPACE_BASE=/cache/kernels \
    PYTHONUNBUFFERED=1 TINI_KILL_PROCESS_GROUP=1
RUN useradd --uid 10001 --no-create-home --home-dir /home/agent agent \
    && install --directory --mode 1777 /home/agent /cache/huggingface /cache/kernels

# verl, torch, vllm, transformers, faiss-cpu, datasets, rich, huggingface_hub, wandb and what they need, pinned.
WORKDIR /opt/agent-r1
COPY requirements/cpu.txt requirements/constraints.txt requirements/pocket.txt requirements/verl-gpu.txt requirements/hashes.txt requirements/packages.sh \
     requirements/
# Another package index, such as one with PyTorch's CPU wheels for STACK=cpu. It stays in the image's history: no password.
ARG PIP_EXTRA_INDEX_URL
# First the packages with a known hash, and no file with another one.
RUN { . requirements/packages.sh; PIP_NO_CACHE_DIR=1 verify pip "$REQUIREMENTS"; } \
    && pip install --no-cache-dir --disable-pip-version-check -r "$REQUIREMENTS" && pip check
# The preset pocket runs in the CPU image, whose user may not install anything.
RUN if [ "$AGENT_R1_STACK" = cpu ]; then \
        pip install --no-cache-dir --disable-pip-version-check -r requirements/pocket.txt && pip check; \
    fi
COPY pyproject.toml setup.py README.md LICENSE speedrun-nodocker.sh inference.sh ./
COPY requirements/environment.sh requirements/inference.sh requirements/
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation -e . && chmod -R a+rX .

USER 10001
# Cheap on purpose: it runs while GPUs work. `agent-r1 doctor`, which imports PyTorch, is the first stage of a run.
HEALTHCHECK --interval=5m --timeout=1m --start-period=2m CMD ["agent-r1", "--version"]
CMD ["bash", "speedrun-nodocker.sh", "--help"]
