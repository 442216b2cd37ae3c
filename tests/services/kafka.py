"""Apache Kafka, one node in KRaft mode: a plain listener, and SASL_SSL with SCRAM-SHA-512."""

import base64
import secrets
import socket
import struct

import install
from processes import free_port, spawn, tail, wait_ready

# What a user of the store's size never needs, and a test waits for: short sessions, no pause before a rebalance.
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{tls},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SASL_SSL://localhost:{tls}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data

sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={certificates}/server-chain.pem
ssl.client.auth=none

authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{user}

delete.topic.enable=true
file.delete.delay.ms=1000
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1

group.min.session.timeout.ms=1000
group.initial.rebalance.delay.ms=0
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000

num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=2
background.threads=2
log.cleaner.dedupe.buffer.size=4194304
log.segment.bytes=67108864
"""

RESOURCE = {"topic": 2, "group": 3}
READ, WRITE, DESCRIBE = 3, 4, 8
LITERAL, ALLOW = 3, 3


def java(*arguments):
    """The command line of one of Kafka's programs."""
    # The simple compiler and the serial collector start fastest and leave both cores to the tests.
    flags = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xms64m", "-Xmx300m", "-XX:-UsePerfData"]
    log = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"]
    return [install.java(), *flags, *log, "-cp", f"{install.kafka_jars()}/*", *arguments]


def prepare():
    install.java()
    install.kafka_jars()


def create(folder, certificates):
    """A new node: settings, users, storage."""
    port = {name: free_port(folder.parent) for name in ("plain", "tls", "controller")}
    user, restricted = "gristmill", "restricted"
    entry = {
        "address": f"127.0.0.1:{port['plain']}",
        "tls_address": f"localhost:{port['tls']}",
        "user": user,
        "password": secrets.token_hex(12),
        "restricted_user": restricted,
        "restricted_password": secrets.token_hex(12),
        "port": port["plain"],
    }
    properties = folder / "server.properties"
    properties.write_text(PROPERTIES.format(**port, folder=folder, certificates=certificates, user=user))
    cluster = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
    users = [(user, entry["password"]), (restricted, entry["restricted_password"])]
    scram = [f"SCRAM-SHA-512=[name={name},password={password}]" for name, password in users]
    # In one word: an id may begin with a dash.
    options = [f"--cluster-id={cluster}", "-c", str(properties), *(part for one in scram for part in ("--add-scram", one))]
    install.run("formatting Kafka's storage", java("kafka.tools.StorageTool", "format", *options))
    return entry


def start(folder, entry):
    """Starts the node, the first time or again."""
    log = folder / "kafka.log"
    entry["process"] = spawn(java("kafka.Kafka", str(folder / "server.properties")), log, cwd=folder)


def wait(folder, entry):
    """Waits until the node answers requests."""

    def ready():
        # ApiVersions 0: answered once the broker has caught up with its metadata.
        return len(call(entry["port"], 18, 0, b"")) > 0

    wait_ready("kafka", entry["process"], folder / "kafka.log", ready)


def finish(folder, entry):
    """What a new node needs once: a user who may read and write every topic and group, but create none."""
    grants = [("topic", READ), ("topic", WRITE), ("topic", DESCRIBE), ("group", READ), ("group", DESCRIBE)]
    body = struct.pack(">i", len(grants))
    for resource, operation in grants:
        body += struct.pack(">b", RESOURCE[resource]) + text("*") + struct.pack(">b", LITERAL)
        body += text(f"User:{entry['restricted_user']}") + text("*") + struct.pack(">bb", operation, ALLOW)
    answer = call(entry["port"], 30, 1, body)
    (count,) = struct.unpack_from(">i", answer, 4)
    place = 8
    for _ in range(count):
        code, length = struct.unpack_from(">hh", answer, place)
        place += 4 + max(length, 0)
        if code != 0:
            raise install.Unavailable(f"kafka refuses a grant with code {code}: {tail(folder / 'kafka.log')}")


def text(value):
    return struct.pack(">h", len(value)) + value.encode()


def call(port, key, version, body):
    """One request of Kafka's protocol; its answer after the correlation id."""
    request = struct.pack(">hhi", key, version, 1) + text("services") + body
    head = struct.pack(">i", len(request))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + request)
        reader = connection.makefile("rb")
        size = reader.read(4)
        if len(size) < 4:
            raise ConnectionError("closed")
        return reader.read(struct.unpack(">i", size)[0])[4:]


def exports(entry):
    return {
        "GRISTMILL_TEST_KAFKA": entry["address"],
        "GRISTMILL_TEST_KAFKA_TLS": entry["tls_address"],
        "GRISTMILL_TEST_SASL_USER": entry["user"],
        "GRISTMILL_TEST_SASL_PASSWORD": entry["password"],
        "GRISTMILL_TEST_SASL_RESTRICTED_USER": entry["restricted_user"],
        "GRISTMILL_TEST_SASL_RESTRICTED_PASSWORD": entry["restricted_password"],
    }
