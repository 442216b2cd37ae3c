#!/usr/bin/env python3
"""Renders each folder of deploy/kubernetes/ and checks it by the schemas of Kubernetes, KEDA and the Prometheus operator, and by the program.

    .venv/bin/python tests/kubernetes.py PROGRAM      (needs kubectl, or the kustomize program)

Each container's options are parsed by the program. `gristmill serve` also starts, with the rendered options and files. The last line counts
the folders. Schemas of KEDA and of the Prometheus operator are those of their Go modules, kept in `.services/`.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
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
# The Go modules with definitions of custom resources: version, and how the paths of the definitions in use begin.
MODULES = {
    "github.com/kedacore/keda/v2": ("v2.21.0", "/config/crd/bases/keda.sh_"),
    "github.com/prometheus-operator/prometheus-operator": ("v0.85.0", "/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors"),
}
# These add to workers, so they are rendered with those of `base`.
ADDED = {"gpu": "components", "serve": "resources"}
# A worker or a service that is asked to end takes up to 30 s.
GRACE_SECONDS_MIN = 40
KEY = "a key of the tests"
START_SECONDS_MAX = 60


def render(folder):
    if field := ADDED.get(folder.name):
        with tempfile.TemporaryDirectory() as overlay:
            # Kustomize wants relative paths.
            base, added = (os.path.relpath(one, os.path.realpath(overlay)) for one in (FOLDER / "base", folder))
            kustomization = {"resources": [base]}
            kustomization.setdefault(field, []).append(added)
            (pathlib.Path(overlay) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
            return built(overlay)
    return built(folder)


def built(folder):
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(done.stderr)
            return list(yaml.safe_load_all(done.stdout))
    raise SystemExit("this machine has no kubectl and no kustomize")


def custom_schemas():
    """Schema of each kind of custom resource, by version and kind."""
    schemas = {}
    for module, (version, definitions) in MODULES.items():

        def fetch(folder):
            proxy = os.environ.get("GOPROXY", "https://proxy.golang.org").split(",")[0]
            archive = folder / "module.zip"
            urllib.request.urlretrieve(f"{proxy}/{module}/@v/{version}.zip", archive)
            with zipfile.ZipFile(archive) as packed:
                for name in packed.namelist():
                    if definitions in name:
                        (folder / pathlib.Path(name).name).write_bytes(packed.read(name))
            archive.unlink()

        name = "keda" if "keda" in module else "prometheus-operator"
        for file in kept(f"{name}-crds-{version}", fetch).glob("*.yaml"):
            definition = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
            for one in definition["versions"]:
                key = (f"{definition['group']}/{one['name']}", definition["names"]["kind"])
                schemas[key] = closed(one["schema"]["openAPIV3Schema"])
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


def templates(thing):
    """The pod templates within an object."""
    spec = thing.get("spec", {})
    for template in (spec.get("template"), spec.get("jobTargetRef", {}).get("template")):
        if template:
            yield template


def environment(container, things):
    """The variables that the manifests set, with their values."""
    variables = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            name = source["configMapRef"]["name"]
            assert ("ConfigMap", name) in things, f"no ConfigMap {name}"
            variables.update(things["ConfigMap", name]["data"])
    for one in container.get("env", []):
        if "value" in one:
            variables[one["name"]] = one["value"]
        else:
            reference = one["valueFrom"]["configMapKeyRef"]
            variables[one["name"]] = things["ConfigMap", reference["name"]]["data"][reference["key"]]
    return variables


def check_pod(pod, things, program, documented):
    for container in pod["containers"]:
        variables = environment(container, things)
        args = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], arg) for arg in container["args"]]
        # `--help` at the end is reached only if the options before it are known and their values valid.
        done = subprocess.run([program, *args, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        unknown = {name for name in variables if name.startswith("GRISTMILL_")} - documented
        assert not unknown, f"variables that docs/ does not name: {unknown}"
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], security
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}, mounts
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            assert probe not in container or container[probe]["httpGet"]["port"] in ports, probe
        if args[0] == "worker":
            assert pod["terminationGracePeriodSeconds"] >= GRACE_SECONDS_MIN
            assert "livenessProbe" in container
            port = args[args.index("--liveness-port") + 1].rsplit(":")[-1]
            assert int(port) in ports.values(), port
        if args[0] == "serve":
            assert pod["terminationGracePeriodSeconds"] >= GRACE_SECONDS_MIN
            # Workers read and write a job only where they are told to.
            assert any(variables["STORE"].startswith(place) for place in variables["GRISTMILL_ACCEPT"].split(",")), variables
            check_service(pod, container, args, ports, things, program)
    assert pod["securityContext"]["runAsNonRoot"], pod["securityContext"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in things, volume


def mounted(path, pod, container, things):
    """The text of a mounted ConfigMap's file at `path`; for a Secret's file, `None`."""
    mount = next((mount for mount in container["volumeMounts"] if str(path.parent) == mount["mountPath"]), None)
    assert mount, f"{path} is on no volume"
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    source = volume.get("configMap") or volume["secret"]
    (key,) = (item["key"] for item in source["items"] if item["path"] == path.name)
    return things["ConfigMap", source["name"]]["data"][key] if "name" in source else None


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answer(port, path, **headers):
    """Status and text of the answer; status 0 if nobody listens."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return 0, ""


def check_service(pod, container, args, ports, things, program):
    """The service starts with the rendered options and files. The store is a folder, and the service works by itself, with the demo model."""
    options = dict(arg.removeprefix("--").split("=", 1) for arg in args[1:])
    with contextlib.ExitStack() as ends:
        folder = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory()))
        models = yaml.safe_load(mounted(pathlib.Path(options["models"]), pod, container, things))
        for model in models["models"]:
            assert any(model["model"].startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"]), model
            model["model"] = str(ROOT / "jobs/demo/model")
        (folder / "models.yaml").write_text(yaml.safe_dump(models))
        assert mounted(pathlib.Path(options["keys"]), pod, container, things) is None, "keys belong into a Secret"
        keys = [{"tenant": "research", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
        options.update({"store": folder / "store", "models": folder / "models.yaml", "keys": folder / "keys.yaml", "device": "cpu"})
        assert options.pop("queue")
        here = {}
        for option in ("listen", "metrics-port"):
            address, port = options[option].rsplit(":", 1)
            assert int(port) in ports.values(), (option, port)
            here[int(port)] = free_port()
            options[option] = f"{address}:{here[int(port)]}"
        http = here[ports["http"]]
        command = [program, "serve", "--work", *(f"--{name}={value}" for name, value in options.items())]
        service = ends.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        ends.callback(service.kill)
        end = time.monotonic() + START_SECONDS_MAX
        path = container["readinessProbe"]["httpGet"]["path"]
        assert container["livenessProbe"]["httpGet"]["path"] == path
        while answer(http, path)[0] != 200:
            assert service.poll() is None, service.stderr.read()
            assert time.monotonic() < end, f"no answer at {path}"
            time.sleep(0.05)
        assert answer(http, "/v1/models")[0] == 401
        status, text = answer(http, "/v1/models", Authorization=f"Bearer {KEY}")
        assert status == 200 and {one["id"] for one in json.loads(text)["data"]} == {model["name"] for model in models["models"]}, text
        status, text = answer(here[ports["metrics"]], "/metrics")
        assert status == 200 and "gristmill_serve_open_batches 0" in text, text
        service.send_signal(signal.SIGTERM)
        assert service.wait(GRACE_SECONDS_MIN) == 6, service.returncode


def check(things, schemas, program, documented):
    by_name = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    for thing in things:
        where = f"{thing['kind']} {thing['metadata']['name']}"
        try:
            if schema := schemas.get((thing["apiVersion"], thing["kind"])):
                jsonschema.validate(thing, schema)
            else:
                kubernetes_validate.validate(thing, KUBERNETES, strict=True)
            for template in templates(thing):
                check_pod(template["spec"], by_name, program, documented)
                (command,) = {container["args"][0] for container in template["spec"]["containers"]}
                labels = {"app.kubernetes.io/name": "gristmill", "app.kubernetes.io/component": command}
                assert command == "submit" or labels.items() <= template["metadata"]["labels"].items(), template["metadata"]
            for trigger in thing.get("spec", {}).get("triggers", []):
                check_trigger(trigger, by_name)
            if thing["kind"] in ("PodMonitor", "Service", "PodDisruptionBudget"):
                check_selector(thing, things)
        except (AssertionError, KeyError, jsonschema.ValidationError, kubernetes_validate.ValidationError) as why:
            raise AssertionError(f"{where}: {type(why).__name__}: {str(why)[:2000]}") from why


def check_selector(thing, things):
    """An object that selects pods finds those that it is for, and the ports that it names are theirs."""
    selector = thing["spec"]["selector"]
    labels = selector.get("matchLabels", selector).items()
    owners = {one["metadata"]["name"]: template for one in things for template in templates(one) if one["kind"] != "Job"}
    found = {name: template["spec"] for name, template in owners.items() if labels <= template["metadata"]["labels"].items()}
    ports = {name: {port["name"] for container in pod["containers"] for port in container["ports"]} for name, pod in found.items()}
    if thing["kind"] == "PodMonitor":
        watched = {endpoint["port"] for endpoint in thing["spec"]["podMetricsEndpoints"]}
        assert found.keys() == owners.keys() and all(watched & names for names in ports.values()), (watched, ports)
    else:
        assert list(found) == [thing["metadata"]["name"]], list(found)
        wanted = {port["targetPort"] for port in thing["spec"].get("ports", [])}
        assert all(wanted <= names for names in ports.values()), (wanted, ports)


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
    schemas = custom_schemas()
    folders = sorted(folder for folder in FOLDER.iterdir() if folder.is_dir())
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
