# isthmus on NVIDIA GPUs (torch's wheels bring CUDA, the runtime the driver), on CPUs, on AMD GPUs:
#   docker build --tag isthmus:0.1.0 .
#   docker build --tag isthmus:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker build --tag isthmus:0.1.0-rocm --build-arg TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2 \
#     --build-arg BASE=rocm/dev-ubuntu-24.04:7.2 --build-arg PACKAGES="g++ python3-dev python3-venv tini" .
# Several workers on one machine: docker run --volume runs:/data isthmus:0.1.0 launch run.yaml --workers 4
ARG BASE=python:3.11-slim
FROM ${BASE}

# A compiler, as Triton and the codecs' kernels are compiled where they run.
ARG PACKAGES="g++ tini"
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ${PACKAGES} \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /usr/local/lib/isthmus \
 && groupadd --non-unique --gid 1000 isthmus \
 && useradd --non-unique --uid 1000 --gid 1000 --create-home isthmus \
 && install --directory --owner 1000 --group 1000 /app /data
ENV PATH=/usr/local/lib/isthmus/bin:${PATH} HOME=/home/isthmus PYTHONUNBUFFERED=1

# What isthmus depends on, with an empty isthmus: a layer that stays as long as these two files do.
# Other packages' own tests go: they are a tenth of it.
WORKDIR /usr/src/isthmus
COPY pyproject.toml constraints.txt ./
ARG EXTRAS=elastic,p2p,track,datasets,vision,speech,etcd
ARG TORCH_INDEX=
RUN touch README.md LICENSE \
 && mkdir -p src/isthmus \
 && echo '__version__ = "0"' > src/isthmus/version.py \
 && pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} ".[${EXTRAS}]" \
 && find /usr/local/lib/isthmus -type d '(' -name tests -o -path '*/torch/test' ')' -prune -exec rm -r {} + \
 && find /usr/local/lib/isthmus -path '*/torch/bin/test_*' -delete

COPY README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps .
COPY deploy/exalsius/start_training.py /app/diloco_training/training/

ARG VERSION=0.1.0 REVISION=
LABEL org.opencontainers.image.title="isthmus" \
      org.opencontainers.image.description="Train one PyTorch model on clusters joined by slow, unreliable links" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# By number, so that Kubernetes can see that it is not root. Only /data, /tmp and the home need to be writable.
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["tini", "--", "isthmus"]
CMD ["--help"]
