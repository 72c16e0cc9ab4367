# The stepwrap command with PyTorch's CPU build: docs/commands.md#in-a-container
FROM python:3.11-slim

# PyTorch's CUDA builds, such as https://download.pytorch.org/whl/cu130, include CUDA's libraries, so
# that this image can remain the base for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=examples,plots

# torch.compile needs a C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# A layer of its own, which remains when the source changes.
COPY constraints.txt /opt/stepwrap/
RUN pip install --no-cache-dir -c /opt/stepwrap/constraints.txt --extra-index-url "${TORCH_INDEX}" torch

COPY . /opt/stepwrap/
RUN pip install --no-cache-dir -c /opt/stepwrap/constraints.txt "/opt/stepwrap[${EXTRAS}]"

# With docker's --user there may be neither a home nor a user name, which caches need.
ENV HOME=/tmp USER=stepwrap PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["stepwrap"]
CMD ["--help"]
