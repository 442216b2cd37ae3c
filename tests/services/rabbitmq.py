"""RabbitMQ, one node of Debian's package: its own name, ports, epmd and folders, AMQP and AMQPS."""

import os
import secrets
import struct
import subprocess

import install
from processes import Unavailable, alive, ask, end, free_port, spawn, wait_ready

CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{plain}
listeners.ssl.1 = 127.0.0.1:{tls}
ssl_options.cacertfile = {certificates}/ca.pem
ssl_options.certfile = {certificates}/server.pem
ssl_options.keyfile = {certificates}/server.key
ssl_options.verify = verify_none
ssl_options.fail_if_no_peer_cert = false
default_user = {user}
default_pass = {password}
loopback_users = none
log.console = false
log.file = {folder}/rabbitmq.log
log.file.level = info
# Small logs on disk, and a free disk that a test machine has.
raft.wal_max_size_bytes = 16777216
disk_free_limit.absolute = 100MB
"""

# Deliveries are checked against `consumer_timeout` every second, so that a test with a short one need not wait a minute.
ADVANCED = "[{rabbit, [{channel_tick_interval, 1000}]}].\n"


def prepare():
    install.rabbitmq_scripts()


def create(folder, certificates):
    """A new node: settings, cookie, password."""
    port = {name: free_port(folder.parent) for name in ("plain", "tls", "distribution", "epmd")}
    user, password = "gristmill", secrets.token_hex(12)
    configuration = CONFIGURATION.format(
        **port, folder=folder, certificates=certificates, user=user, password=password
    )
    (folder / "rabbitmq.conf").write_text(configuration)
    (folder / "advanced.config").write_text(ADVANCED)
    (folder / "enabled_plugins").write_text("[].\n")
    cookie = folder / ".erlang.cookie"
    cookie.write_text(secrets.token_hex(16))
    cookie.chmod(0o400)
    return {
        "address": f"amqp://{user}:{password}@127.0.0.1:{port['plain']}",
        "tls_address": f"amqps://{user}:{password}@localhost:{port['tls']}",
        "node": f"gristmill-{secrets.token_hex(4)}@localhost",
        "port": port["plain"],
        "distribution_port": port["distribution"],
        "epmd_port": port["epmd"],
    }


def environment(folder, entry):
    """What the broker and its tools read: nothing of the system's own RabbitMQ."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
    env.update(
        HOME=str(folder),
        LC_ALL="C.UTF-8",
        ERL_EPMD_PORT=str(entry["epmd_port"]),
        ERL_EPMD_ADDRESS="127.0.0.1",
        RABBITMQ_NODENAME=entry["node"],
        RABBITMQ_DIST_PORT=str(entry["distribution_port"]),
        RABBITMQ_CONF_ENV_FILE=str(folder / "no-rabbitmq-env.conf"),
        RABBITMQ_CONFIG_FILE=str(folder / "rabbitmq.conf"),
        RABBITMQ_ADVANCED_CONFIG_FILE=str(folder / "advanced.config"),
        RABBITMQ_ENABLED_PLUGINS_FILE=str(folder / "enabled_plugins"),
        RABBITMQ_BASE=str(folder),
        RABBITMQ_MNESIA_BASE=str(folder / "data"),
        RABBITMQ_LOG_BASE=str(folder),
        RABBITMQ_PID_FILE=str(folder / "rabbitmq.pid"),
        RABBITMQ_GENERATED_CONFIG_DIR=str(folder / "generated"),
        # No busy waiting: the cores belong to the tests.
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
    )
    return env


def start(folder, entry):
    """Starts the node and, where it is not there yet, the port mapper."""
    env = environment(folder, entry)
    if not alive(entry.get("epmd")):
        command = ["epmd", "-address", "127.0.0.1", "-port", str(entry["epmd_port"])]
        entry["epmd"] = spawn(command, folder / "epmd.log", env=env, cwd=folder)
        # `ask` would be told names; that it answers at all is enough.
        names = struct.pack(">Hc", 1, b"n")
        wait_ready("epmd", entry["epmd"], folder / "epmd.log", lambda: ask(entry["epmd_port"], names, 4))
    scripts = install.rabbitmq_scripts()
    entry["process"] = spawn([str(scripts / "rabbitmq-server")], folder / "start.log", env=env, cwd=folder)


def wait(folder, entry):
    """Waits until the node speaks AMQP."""

    def ready():
        # The answer is a method frame on channel 0: Connection.Start.
        return ask(entry["port"], b"AMQP\0\0\x09\x01", 3) == b"\x01\0\0"

    wait_ready("rabbitmq", entry["process"], folder / "start.log", ready)


def finish(folder, entry):
    """Nothing: the first start makes the user."""


def stop_helpers(entry):
    """Ends what outlives the node."""
    end(entry.get("epmd"))


def control(folder, entry, arguments):
    """Runs `rabbitmqctl` on the node; its exit status."""
    if not alive(entry.get("process")):
        raise Unavailable("rabbitmq does not run")
    tool = str(install.rabbitmq_scripts() / "rabbitmqctl")
    return subprocess.run([tool, *arguments], env=environment(folder, entry), cwd=folder).returncode


def exports(entry):
    return {"GRISTMILL_TEST_RABBITMQ": entry["address"], "GRISTMILL_TEST_RABBITMQ_TLS": entry["tls_address"]}
