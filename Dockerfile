# One worker, or several on one machine: docker run isthmus launch run.yaml --workers 4
FROM python:3.11-slim

WORKDIR /isthmus
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt .

RUN useradd --create-home isthmus
USER isthmus
WORKDIR /home/isthmus
ENTRYPOINT ["isthmus"]
CMD ["--help"]
