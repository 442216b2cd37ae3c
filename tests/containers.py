#!/usr/bin/env python3
"""Checks deploy/Dockerfile and deploy/compose.yaml without Docker.

    .venv/bin/python tests/containers.py PROGRAM

The Dockerfile is linted, not built. PROGRAM runs in a folder made of the Debian packages that the runtime image has: read-only, without
a shell, and in a mount namespace of its own. With brokers and a store in the environment (`services.py env`), the services `serve` and
`worker` of compose.yaml run there with their own commands, files and variables, and answer a batch.

The last line counts the cases; a case that this machine cannot run is named before it. Downloads are kept in `.services/`.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import uuid
import zipfile

import httpx2 as httpx
import jsonschema
import openai
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/services"))
sys.path.insert(0, str(ROOT / "tests/serve"))
import run as serving  # noqa: E402
from install import kept  # noqa: E402

DOCKERFILE = ROOT / "deploy/Dockerfile"
COMPOSE = ROOT / "deploy/compose.yaml"
# The Go module that reads compose files for Docker, and has their schema.
COMPOSE_GO = "v2.16.2"
DEBIAN = "trixie"
# The packages of gcr.io/distroless/cc-debian13.
RUNTIME = {
    "base-files", "ca-certificates", "gcc-14-base", "libc6", "libgcc-s1", "libgomp1", "libssl3t64", "libstdc++6", "libzstd1", "media-types",
    "netbase", "tzdata", "zlib1g",
}
KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")
IMAGE_MB_MAX = 150
REQUESTS = 12


class Skipped(Exception):
    """This machine lacks what the case needs."""


def instructions():
    """The Dockerfile's instructions: name and argument, without comments and line breaks."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def stages():
    """Image of each stage, by its name."""
    return {found[2]: found[1] for name, argument in instructions() if name == "FROM" and (found := re.match(r"(\S+) AS (\S+)$", argument))}


def build_packages():
    return re.search(r"--no-install-recommends ([^&]+)", DOCKERFILE.read_text())[1].replace("\\", " ").split()


def dockerfile(program):
    """The Dockerfile passes the linter, its versions are the project's, and Cargo finds what it needs in the copied files."""
    linter = next(filter(os.path.exists, [str(pathlib.Path(sys.executable).parent / "hadolint"), shutil.which("hadolint") or ""]), None)
    assert linter, "hadolint is missing: tests/requirements.txt has it"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    images = stages()
    assert images["build"] == f"rust:{manifest['package']['rust-version']}-slim-{DEBIAN}", images["build"]
    assert images["runtime"] == "gcr.io/distroless/cc-debian13:nonroot" and list(images)[-1] == "cpu", images
    users = {argument for name, argument in instructions() if name == "USER"}
    pods = (ROOT / "deploy/kubernetes").rglob("*.yaml")
    in_pods = {f"{user}:{user}" for pod in pods for user in re.findall(r"runAsUser: (\d+)", pod.read_text())}
    assert users == in_pods and "0:0" not in users, (users, in_pods)
    for package in build_packages():
        assert package in (ROOT / "README.md").read_text(), f"README.md does not name {package}"
    with tempfile.TemporaryDirectory() as folder:
        copied = set()
        for name, argument in instructions():
            if name == "COPY" and not argument.startswith("--from"):
                *sources, target = argument.split()
                for source in sources:
                    copied.add(source)
                    place = pathlib.Path(folder) / target / (pathlib.Path(source).name if target.endswith("/") else "")
                    place.parent.mkdir(exist_ok=True)
                    place.symlink_to((ROOT / source).resolve(strict=True))
        # Cargo checks the manifest as for a build, and ends: there is no such program.
        command = ["cargo", "build", "--offline", "--locked", "--bin", "none"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert "no bin target named `none`" in done.stderr, done.stderr
    for source in (ROOT / "src").rglob("*.rs"):
        for path in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', source.read_text().split("#[cfg(test)]")[0]):
            top = (source.parent / path).resolve(strict=True).relative_to(ROOT).parts[0]
            assert top in copied, f"{source} includes {path}, which the Dockerfile does not copy"


def debian_root():
    """The folder with the unpacked packages of the runtime image."""
    if not KEYRING.exists() or not shutil.which("apt-get"):
        raise Skipped("Debian's packages: no apt-get, or no keyring of Debian")
    packages = RUNTIME | set(build_packages())

    def fetch(folder):
        with tempfile.TemporaryDirectory() as state:
            place = pathlib.Path(state)
            for name in ("lists/partial", "archives/partial", "debs"):
                (place / name).mkdir(parents=True)
            (place / "status").touch()
            (place / "sources").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {DEBIAN} main\n")
            settings = {
                "Dir::State": place, "Dir::State::status": place / "status", "Dir::Cache": place, "Dir::Etc::sourcelist": place / "sources",
                "Dir::Etc::sourceparts": "/dev/null", "Acquire::Languages": "none", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
                "APT::Sandbox::User": "",
            }
            options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]

            def apt(*command, **more):
                done = subprocess.run([command[0], *options, *command[1:]], capture_output=True, text=True, **more)
                assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

            apt("apt-get", "update")
            apt("apt-cache", "show", *sorted(packages))
            apt("apt-get", "download", *sorted(RUNTIME), cwd=place / "debs")
            for package in (place / "debs").glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
            # An installation makes this bundle by the package's script, and the image has it, too.
            certificates = sorted((folder / "usr/share/ca-certificates").rglob("*.crt"))
            (folder / "etc/ssl/certs/ca-certificates.crt").write_bytes(b"".join(one.read_bytes() for one in certificates))

    name = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:8]
    return kept(f"debian-{DEBIAN}-{name}", fetch)


class Image:
    """The runtime image's files with the program, as a folder that processes have as their root."""

    def __init__(self, folder, program):
        done = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"user namespaces: {done.stderr.strip()}")
        self.root = folder / "root"
        shutil.copytree(debian_root(), self.root, symlinks=True)
        subprocess.run(["strip", "-o", self.root / "usr/bin/gristmill", program], check=True)
        self.entry_point = json.loads(next(argument for name, argument in instructions() if name == "ENTRYPOINT"))

    def start(self, command, mounts, env=None, **options):
        """Starts the entry point with the arguments `command`; `mounts` has the source of each path."""
        lines = ["set -e", f"mount --rbind {self.root} {self.root}"]
        for target, (source, writable) in mounts.items():
            place = self.root / target.lstrip("/")
            if pathlib.Path(source).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            lines.append(f"mount --bind {source} {place}")
            if not writable:
                lines.append(f"mount -o remount,bind,ro {place}")
        lines += [f"mount -o remount,bind,ro {self.root}", f"exec chroot {self.root} {shlex.join([*self.entry_point, *command])}"]
        namespace = ["unshare", "--map-root-user", "--mount", "bash", "-c", "\n".join(lines)]
        # `unshare` and `chroot` need PATH. A container has nothing else of this machine's environment.
        env = {"PATH": os.environ["PATH"], "HOME": "/home/nonroot", **(env or {})}
        return subprocess.Popen(namespace, stderr=subprocess.STDOUT, env=env, text=True, **options)


def runtime(program):
    """The program has all that it needs in the runtime image: it runs a job there."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        image = Image(folder, program)
        size = sum(path.lstat().st_size for path in image.root.rglob("*") if not path.is_dir()) / 1e6
        (folder / "work/out").mkdir(parents=True)
        mounts = {"/work/jobs": (ROOT / "jobs", False), "/work/out": (folder / "work/out", True)}
        process = image.start(["run", "/work/jobs/label-tickets.yaml", "--limit", "20"], mounts, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "20 of 20 succeeded" in output, output
        assert size < IMAGE_MB_MAX, f"{size:.0f} MB"
        return f"{size:.0f} MB"


def compose():
    return yaml.safe_load(COMPOSE.read_text())


def compose_file(program):
    """The compose file fits the schema, its files exist, the program knows its options, and brokers need no service of the profile."""

    def fetch(folder):
        proxy = os.environ.get("GOPROXY", "https://proxy.golang.org").split(",")[0]
        archive = folder / "module.zip"
        urllib.request.urlretrieve(f"{proxy}/github.com/compose-spec/compose-go/v2/@v/{COMPOSE_GO}.zip", archive)
        with zipfile.ZipFile(archive) as packed:
            (name,) = (name for name in packed.namelist() if name.endswith("/schema/compose-spec.json"))
            (folder / "compose-spec.json").write_bytes(packed.read(name))
        archive.unlink()

    file = compose()
    schema = json.loads((kept(f"compose-spec-{COMPOSE_GO}", fetch) / "compose-spec.json").read_text())
    jsonschema.validate(file, schema)
    documented = set(re.findall(r"(?:GRISTMILL|AWS)_[A-Z_]+", "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))))
    always = {name for name, service in file["services"].items() if "profiles" not in service}
    assert always == {"kafka", "rabbitmq", "minio"}, always
    for name, service in file["services"].items():
        assert "build" in service or re.search(r":\S*\d", service["image"]), f"{name}: an image without a version"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), f"{name}: a port for everybody"
        needed = set(service.get("depends_on", {}))
        assert needed <= always, f"{name} needs {needed - always}"
        for one, wait in service.get("depends_on", {}).items():
            assert wait["condition"] != "service_healthy" or "healthcheck" in file["services"][one], one
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")}
        assert named <= set(file["volumes"]), named
        if "build" not in service:
            continue
        build = service["build"]
        context = (COMPOSE.parent / build["context"]).resolve()
        assert context / build["dockerfile"] == DOCKERFILE and build["target"] in stages(), build
        done = subprocess.run([program, *service["command"], "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert set(service["environment"]) <= documented, set(service["environment"]) - documented
        mounts = mounts_of(file, service)
        assert all(pathlib.Path(source).exists() for source, _ in mounts.values()), mounts
        for option in ("models", "keys"):
            for path in re.findall(rf"--{option}=(\S+)", " ".join(service["command"])):
                assert path in mounts, path


def mounts_of(file, service):
    """Source of each file and folder that the container has, and whether it may write there."""
    mounts = {}
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        mounts[target] = ((COMPOSE.parent / source).resolve(), mode != ["ro"])
    for config in service.get("configs", []):
        mounts[config["target"]] = (COMPOSE.parent / file["configs"][config["source"]]["file"], False)
    return mounts


def compose_batch(program):
    """The services of the profile answer a batch: serve and workers, as the compose file starts them."""
    wanted = ("GRISTMILL_TEST_RABBITMQ", "GRISTMILL_TEST_S3")
    if missing := [name for name in wanted if name not in os.environ]:
        raise Skipped(f"services: {', '.join(missing)}")
    file, test = compose(), os.environ
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        folder = pathlib.Path(folder)
        image = Image(folder, program)
        (queue,) = {arg for service in file["services"].values() for arg in service.get("command", []) if arg.startswith("--queue=")}
        broker = httpx.URL(test["GRISTMILL_TEST_RABBITMQ"])
        name, http = uuid.uuid4().hex[:8], serving.free_port()
        # Containers have addresses of their own. Here all share this machine's, and the services of the tests have other ports.
        substitutions = {
            queue: f"{queue.replace('rabbitmq', f'{broker.host}:{broker.port}')}-{name}",
            "--store=s3://gristmill/batches": f"--store=s3://{test['GRISTMILL_TEST_S3_BUCKET']}/batches-{name}",
            "--listen=0.0.0.0:8000": f"--listen=0.0.0.0:{http}",
        }
        variables = {
            "GRISTMILL_QUEUE_USER": broker.username, "GRISTMILL_QUEUE_PASSWORD": broker.password,
            "AWS_ENDPOINT_URL": test["GRISTMILL_TEST_S3"],
            "AWS_ACCESS_KEY_ID": test["GRISTMILL_TEST_S3_KEY"], "AWS_SECRET_ACCESS_KEY": test["GRISTMILL_TEST_S3_SECRET"],
        }
        processes = {}
        for service_name, service in file["services"].items():
            for number in range(service.get("deploy", {}).get("replicas", 1) if "build" in service else 0):
                command = []
                for arg in service["command"]:
                    arg = re.sub(r"^(--(?:metrics|liveness)-port=\S+:)\d+$", lambda found: f"{found[1]}{serving.free_port()}", arg)
                    command.append(substitutions.get(arg, arg))
                log = ends.enter_context(open(folder / f"{service_name}-{number}.log", "w+"))
                process = image.start(command, mounts_of(file, service), service["environment"] | variables, stdout=log)
                ends.callback(process.kill)
                processes[service_name, number] = process, log
        assert len(processes) == 3, list(processes)

        def alive():
            for process, log in processes.values():
                assert process.poll() is None, (log.seek(0), log.read())[1]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{http}/healthz").status_code == 200

        serving.until("the service answers", alive, 60)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="gristmill", max_retries=0)
        lines = [serving.request(custom_id, text) for custom_id, text, _ in serving.tickets(REQUESTS)]
        batch = serving.wait(client, serving.submit(client, lines), 120)
        answers, errors = serving.check_answers(client, batch, lines)
        assert batch.status == "completed" and len(answers) == REQUESTS and not errors, (batch, errors)
        with contextlib.suppress(openai.AuthenticationError):
            openai.OpenAI(base_url=client.base_url, api_key="another").models.list()
            raise AssertionError("a wrong key is accepted")
        for process, _ in processes.values():
            process.terminate()
        codes = [process.wait(60) for process, _ in processes.values()]
        assert codes == [6, 6, 6], codes


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve(strict=True)
    cases = [dockerfile, runtime, compose_file, compose_batch]
    failed = skipped = 0
    for case in cases:
        try:
            print(f"{case.__name__}: right{', ' + seen if (seen := case(program)) else ''}", flush=True)
        except Skipped as why:
            skipped += 1
            print(f"{case.__name__}: skipped for want of {why}", flush=True)
        except Exception as why:
            failed += 1
            print(f"{case.__name__}: WRONG: {type(why).__name__}: {str(why)[:3000]}", flush=True)
    print(f"{len(cases) - failed - skipped} of {len(cases) - skipped} cases right")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
