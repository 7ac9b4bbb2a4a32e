# The server on a CPU:
#   docker build --tag transduce .
#   docker run --publish 127.0.0.1:8000:8000 --env TRANSDUCE_API_KEY=... transduce
# PyTorch's wheels for CPUs alone are much smaller than its default ones: name the index that has
# them with --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libsndfile1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /tmp/wheels
# warm-up compiles the CPU kernels, which any user of the image can then read.
RUN wheel="$(ls /tmp/wheels/*.whl)" \
    && pip install --no-cache-dir "$wheel[serve]" \
    && rm -rf /tmp/wheels \
    && transduce warm-up
USER 65534
EXPOSE 8000
# docker stop sends SIGTERM, and the server answers what is in progress; give it the time to.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
ENTRYPOINT ["transduce", "serve", "--host", "0.0.0.0", "--port", "8000"]
