# `tpl serve` as a container: docs/deploy.md. The model is a volume, nothing else is written but /tmp.
FROM python:3.12-slim AS build
# A further package index, for instance one with CPU builds of torch: much smaller than the default on x86-64.
ARG TORCH_INDEX=""
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src ./src
RUN python -m venv /opt/tpl \
    && /opt/tpl/bin/pip install --no-cache-dir --constraint constraints.txt \
       ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[serve]'

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin tpl \
    && install --directory --owner tpl --group tpl /model
COPY --from=build /opt/tpl /opt/tpl
ENV PATH=/opt/tpl/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/tmp/cache HF_HOME=/tmp/cache/huggingface MPLCONFIGDIR=/tmp/cache/matplotlib
USER 10001:10001
WORKDIR /tmp
VOLUME /model
EXPOSE 8000
# Every request to an open server needs the token, this one too.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request as u; token = os.environ.get('TPL_TOKEN') or open('/run/secrets/tpl_token').read().strip(); u.urlopen(u.Request('http://127.0.0.1:8000/health', headers={'Authorization': 'Bearer ' + token}), timeout=4)"]
ENTRYPOINT ["tpl", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--token-file", "/run/secrets/tpl_token"]
