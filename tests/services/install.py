"""What the services need on a bare Debian machine: packages, jars, binaries. Downloads and builds are kept in the cache."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

from processes import Unavailable, locked

KAFKA_VERSION = "4.1.1"
# A module version of github.com/minio/minio: its releases have no tags that Go understands.
MINIO_VERSION = "v0.0.0-20260212201848-7aac2a2c5b7c"
GO_MIN = (1, 24)
# Fetched where the machine's Go is older (Debian 12 has 1.19), as the module that Go itself would take.
GO_VERSION = "1.24.8"
GO_SHA256 = {
    "amd64": "6e1961728670e727d7dfa4bf03474b4d797fa81a269263cb77b30b2f6323f062",
    "arm64": "4d31d22f75fed99025f7b082319eabeb74106d11e343fc203b336ba2afdeb3a1",
}

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>gristmill</groupId><artifactId>services</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""


def cache():
    """The folder that keeps downloads and builds."""
    default = Path(__file__).resolve().parents[2] / ".services"
    folder = Path(os.environ.get("GRISTMILL_SERVICES_CACHE", default)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(what, command, **options):
    """Runs a tool; its output only counts when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        last = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise Unavailable(f"{what} failed: {last}")
    return done.stdout


def package(present, *names):
    """Installs Debian packages, unless `present` says that what they bring is there."""
    if present():
        return
    with locked(cache() / "apt.lock"):
        if present():
            return
        if shutil.which("apt-get") is None:
            raise Unavailable(f"{' '.join(names)} missing, and this is no Debian")
        sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
        if sudo and shutil.which("sudo") is None:
            raise Unavailable(f"{' '.join(names)} missing, and no right to install packages")
        print(f"installing {' '.join(names)}", file=sys.stderr)
        # Starting the system's own broker is none of our business: services of the set run by themselves.
        env = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]
        run("apt-get update", [*env, "apt-get", "update", "-qq"])
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
        run(f"installing {' '.join(names)}", [*env, *install])


def java():
    """A Java 17 or later; its path."""

    def version():
        found = shutil.which("java")
        if found is None:
            return 0
        text = subprocess.run([found, "-version"], stderr=subprocess.PIPE, text=True).stderr
        return int(re.search(r'version "(\d+)', text).group(1))

    package(lambda: version() >= 17, "openjdk-17-jre-headless")
    if version() < 17:
        raise Unavailable("`java` is older than 17")
    return shutil.which("java")


def kept(name, make):
    """The cached folder `name`, made once by `make(folder)`: complete or absent, also with several makers."""
    folder = cache() / name
    with locked(cache() / f"{name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache(), prefix=f"{name}.") as staged:
                made = Path(staged) / "made"
                made.mkdir()
                make(made)
                made.rename(folder)
    return folder


def kafka_jars():
    """The folder with Apache Kafka's jars."""

    def make(folder):
        package(lambda: shutil.which("mvn"), "maven")
        print(f"fetching Apache Kafka {KAFKA_VERSION}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as project:
            (Path(project) / "pom.xml").write_text(POM)
            goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}"]
            run("fetching Kafka by Maven", ["mvn", "-B", "-q", *goal], cwd=project)

    return kept(f"kafka-{KAFKA_VERSION}", make)


def rabbitmq_scripts():
    """The folder with `rabbitmq-server` and `rabbitmqctl` that run as whoever calls them."""
    scripts = Path("/usr/lib/rabbitmq/bin")
    package((scripts / "rabbitmq-server").exists, "rabbitmq-server")
    return scripts


def go():
    """A Go that can build MinIO; its path."""
    for found in filter(None, [shutil.which("go"), "/usr/local/go/bin/go"]):
        if not os.access(found, os.X_OK):
            continue
        version = re.search(r"go(\d+)\.(\d+)", run("go version", [found, "version"]))
        if version and (int(version[1]), int(version[2])) >= GO_MIN:
            return found
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine)
    if architecture is None:
        raise Unavailable(f"no Go {GO_VERSION} for {os.uname().machine}")
    toolchain = f"v0.0.1-go{GO_VERSION}.linux-{architecture}"

    def make(folder):
        print(f"fetching Go {GO_VERSION}", file=sys.stderr)
        proxy = os.environ.get("GOPROXY", "https://proxy.golang.org").split(",")[0]
        archive = folder / "go.zip"
        try:
            urllib.request.urlretrieve(f"{proxy}/golang.org/toolchain/@v/{toolchain}.zip", archive)
        except OSError as error:
            raise Unavailable(f"fetching Go {GO_VERSION}: {error}") from error
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != GO_SHA256[architecture]:
            raise Unavailable(f"the archive of Go {GO_VERSION} has sha256 {found}, not the expected one")
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        archive.unlink()
        (folder / f"golang.org/toolchain@{toolchain}").rename(folder / "go")
        # As Go itself does: an archive of a module cannot hold a second `go.mod`.
        for hidden in (folder / "go").rglob("_go.mod"):
            hidden.rename(hidden.with_name("go.mod"))
        for tool in [*(folder / "go/bin").iterdir(), *(folder / "go/pkg/tool").glob("*/*")]:
            tool.chmod(0o755)

    return str(kept(f"go-{GO_VERSION}", make) / "go/bin/go")


def minio_binary():
    """MinIO's server, built from source: two to three minutes on two cores, once."""

    def make(folder):
        compiler = go()
        print(f"building MinIO {MINIO_VERSION} (minutes, once)", file=sys.stderr)
        # What the build fetches and makes on its way, 2 GB, goes with the staging folder.
        staged = {"GOBIN": folder, "GOPATH": folder.parent / "path", "GOCACHE": folder.parent / "build"}
        env = dict(os.environ, CGO_ENABLED="0", GOTOOLCHAIN="local", GOFLAGS="-buildvcs=false -modcacherw")
        env.update((name, str(place)) for name, place in staged.items())
        target = f"github.com/minio/minio@{MINIO_VERSION}"
        # Not optimized: that takes half of the time, and the tests are as fast.
        flags = ["-trimpath", "-gcflags=all=-N -l", "-ldflags=-s -w"]
        run("building MinIO", [compiler, "install", *flags, target], env=env)

    return kept(f"minio-{MINIO_VERSION}", make) / "minio"
