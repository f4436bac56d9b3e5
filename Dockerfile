# Convoy in two stages: the first one compiles, the second one holds what a program needs to run.
#
#   docker build -t convoy .
#   docker run --rm convoy convoy doctor
#
# To compile a program of your own, start its first stage from ours (find_package(convoy) works there):
#   docker build --target build -t convoy-build .
FROM debian:12 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --no-install-recommends --yes ca-certificates git make python3 && \
    rm -rf /var/lib/apt/lists/*
COPY . /src/convoy
WORKDIR /src/convoy
# `make` installs compiler, CMake and libtorch by itself.
RUN make install PREFIX=/opt/convoy && \
    torch=$(.venv/bin/python -c 'import torch; print(torch.__path__[0])') && \
    mv "$torch" /opt/torch && ln -s /opt/torch "$torch"
ENV CMAKE_PREFIX_PATH=/opt/convoy

FROM debian:12-slim
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --no-install-recommends --yes libgomp1 libssl3 libstdc++6 && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 1000 convoy
COPY --from=build /opt/convoy /opt/convoy
COPY --from=build /opt/torch/lib /opt/torch/lib
ENV PATH=/opt/convoy/bin:$PATH \
    LD_LIBRARY_PATH=/opt/convoy/lib:/opt/torch/lib
USER 1000
CMD ["convoy", "doctor"]
