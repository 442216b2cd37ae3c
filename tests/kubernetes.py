#!/usr/bin/env python3
"""Renders each folder of deploy/kubernetes/ and holds it against the schemas of Kubernetes and KEDA, and against the program's options.

    .venv/bin/python tests/kubernetes.py PROGRAM      (needs kubectl, or the kustomize program)

The last line counts the folders. KEDA's schemas are those of its Go module, kept in `.services/`.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/services"))
from install import kept  # noqa: E402

FOLDER = ROOT / "deploy/kubernetes"
KUBERNETES = "1.37"
KEDA = "v2.21.0"
# A component is rendered by what includes it.
COMPONENTS = {"gpu"}
# A worker that is asked to end takes up to 30 s.
GRACE_SECONDS_MIN = 40


def render(folder):
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(done.stderr)
            return list(yaml.safe_load_all(done.stdout))
    raise SystemExit("this machine has no kubectl and no kustomize")


def keda_schemas():
    """Schema of each kind of KEDA's, by kind and version."""

    def fetch(folder):
        proxy = os.environ.get("GOPROXY", "https://proxy.golang.org").split(",")[0]
        archive = folder / "keda.zip"
        urllib.request.urlretrieve(f"{proxy}/github.com/kedacore/keda/v2/@v/{KEDA}.zip", archive)
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                if "/config/crd/bases/keda.sh_" in name:
                    (folder / pathlib.Path(name).name).write_bytes(packed.read(name))
        archive.unlink()

    schemas = {}
    for file in kept(f"keda-crds-{KEDA}", fetch).glob("*.yaml"):
        definition = yaml.safe_load(file.read_text())["spec"]
        for version in definition["versions"]:
            key = (f"{definition['group']}/{version['name']}", definition["names"]["kind"])
            schemas[key] = closed(version["schema"]["openAPIV3Schema"])
    return schemas


def closed(schema):
    """The schema with unknown fields refused, as an API server warns of them."""
    if isinstance(schema, dict):
        schema = {name: closed(value) for name, value in schema.items()}
        if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
            if not schema.get("x-kubernetes-preserve-unknown-fields") and set(schema["properties"]) - {"apiVersion", "kind", "metadata"}:
                schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema = {"type": ["integer", "string"]}
    elif isinstance(schema, list):
        schema = [closed(value) for value in schema]
    return schema


def pods(thing):
    """The pod templates within an object."""
    spec = thing.get("spec", {})
    for template in (spec.get("template"), spec.get("jobTargetRef", {}).get("template")):
        if template:
            yield template["spec"]


def check_pod(pod, things, program, documented):
    for container in pod["containers"]:
        # `--help` at the end is reached only if the options before it are known and their values valid.
        done = subprocess.run([program, *container["args"], "--help"], capture_output=True, text=True)
        assert done.returncode == 0, f"{container['args']}: {done.stderr}"
        variables = {one["name"] for one in container.get("env", [])}
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                name = source["configMapRef"]["name"]
                assert ("ConfigMap", name) in things, f"no ConfigMap {name}"
                variables |= set(things["ConfigMap", name]["data"])
        unknown = {name for name in variables if name.startswith("GRISTMILL_")} - documented
        assert not unknown, f"variables that docs/ does not name: {unknown}"
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], security
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}, mounts
        if container["args"][0] == "worker":
            assert pod["terminationGracePeriodSeconds"] >= GRACE_SECONDS_MIN
            assert container["livenessProbe"]["httpGet"]["port"] in {port["name"] for port in container["ports"]}
            port = container["args"][container["args"].index("--liveness-port") + 1].rsplit(":")[-1]
            assert int(port) in {port["containerPort"] for port in container["ports"]}, port
    assert pod["securityContext"]["runAsNonRoot"], pod["securityContext"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in things, volume


def check(things, schemas, program, documented):
    by_name = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    for thing in things:
        where = f"{thing['kind']} {thing['metadata']['name']}"
        try:
            if schema := schemas.get((thing["apiVersion"], thing["kind"])):
                jsonschema.validate(thing, schema)
            else:
                kubernetes_validate.validate(thing, KUBERNETES, strict=True)
            for pod in pods(thing):
                check_pod(pod, by_name, program, documented)
            for trigger in thing.get("spec", {}).get("triggers", []):
                check_trigger(trigger, by_name)
        except (AssertionError, KeyError, jsonschema.ValidationError, kubernetes_validate.ValidationError) as why:
            raise AssertionError(f"{where}: {type(why).__name__}: {str(why)[:2000]}") from why


def check_trigger(trigger, by_name):
    """A scaler watches the queue that its workers read."""
    if reference := trigger.get("authenticationRef"):
        assert ("TriggerAuthentication", reference["name"]) in by_name, reference
    (queue,) = (thing["data"]["GRISTMILL_QUEUE"] for (kind, _), thing in by_name.items() if kind == "ConfigMap" and "GRISTMILL_QUEUE" in thing["data"])
    metadata = trigger["metadata"]
    if trigger["type"] == "kafka":
        assert queue == f"kafka://{metadata['bootstrapServers']}/{metadata['topic']}", (queue, metadata)
        assert metadata["consumerGroup"] == f"gristmill-{metadata['topic']}", metadata
    else:
        assert queue.startswith("amqp") and queue.endswith(f"/{metadata['queueName']}"), (queue, metadata)


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve(strict=True)
    documented = set(re.findall(r"GRISTMILL_[A-Z_]+", "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))))
    schemas = keda_schemas()
    folders = sorted(folder for folder in FOLDER.iterdir() if folder.is_dir() and folder.name not in COMPONENTS)
    failed = 0
    for folder in folders:
        try:
            things = render(folder)
            check(things, schemas, program, documented)
            print(f"{folder.name}: right, {len(things)} objects")
        except AssertionError as why:
            failed += 1
            print(f"{folder.name}: WRONG: {why}")
    print(f"{len(folders) - failed} of {len(folders)} folders right")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
