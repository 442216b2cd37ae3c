"""Job files whose queue would load native code, read files, or have the environment's password sent to a stranger.

Servers of these cases listen on this machine and write down all that they are sent.
"""

import json
import socket
import struct
import subprocess
import threading

from case import FAILURE, Case, Step, job, rows

PASSWORD = "hunter2-of-the-operator"
SECRET = {"GRISTMILL_QUEUE_PASSWORD": PASSWORD}
# As `{:?}` shows it, where it is shown as bytes.
AS_BYTES = ", ".join(str(byte) for byte in PASSWORD.encode())

# Writes a file as soon as it is loaded, whoever loads it, and is a plugin of librdkafka besides.
LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) { FILE *f = fopen(MARK, "w"); if (f) fclose(f); }
int conf_init(void *conf, void **opaque, char *error, unsigned long size) { return 0; }
"""


class Server:
    """Listens until the process ends. `heard` is all that came; `answer(connection, server)` speaks the protocol."""

    def __init__(self, answer=None):
        self.heard, self.connections, self.answer = b"", 0, answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.settimeout(5)
                try:
                    while self.answer and self.answer(connection, self):
                        pass
                except (OSError, struct.error):
                    pass

    def read(self, connection, size):
        found = b""
        while len(found) < size:
            piece = connection.recv(size - len(found))
            if not piece:
                raise OSError("closed")
            self.heard += piece
            found += piece
        return found


def kafka(connection, server):
    """A broker that takes any password by PLAIN, as far as the password."""
    size, = struct.unpack(">i", server.read(connection, 4))
    request = server.read(connection, size)
    if len(request) < 8:
        return False
    key, version, number = struct.unpack(">hhi", request[:8])
    if key == 18:
        apis = [(18, 0, 0), (17, 0, 0), (3, 0, 1), (0, 0, 3)]
        body = struct.pack(">hi", 35 if version > 0 else 0, len(apis)) + b"".join(struct.pack(">hhh", *api) for api in apis)
    elif key == 17:
        body = struct.pack(">hi", 0, 1) + struct.pack(">h", 5) + b"PLAIN"
    else:
        return False
    connection.sendall(struct.pack(">ii", 4 + len(body), number) + body)
    return True


def rabbitmq(connection, server):
    """A broker that asks for a password, and is gone once it has it."""
    server.read(connection, 8)
    text = lambda value: struct.pack(">I", len(value)) + value  # noqa: E731
    method = struct.pack(">HHBB", 10, 10, 0, 9) + text(b"") + text(b"PLAIN AMQPLAIN") + text(b"en_US")
    connection.sendall(struct.pack(">BHI", 1, 0, len(method)) + method + b"\xce")
    _, _, size = struct.unpack(">BHI", server.read(connection, 7))
    server.read(connection, size + 1)
    return False


def library(folder):
    (folder / "evil.c").write_text(LIBRARY)
    mark = f'-DMARK="{folder / "loaded"}"'
    subprocess.run(["cc", "-shared", "-fPIC", mark, "-o", "evil.so", "evil.c"], cwd=folder, check=True)
    return str(folder / "evil.so")


def prepared(folder, queue):
    job(folder, queue=queue)
    rows(folder, [{"text": f"ticket {number}"} for number in range(3)])


def never_loaded(folder):
    assert not (folder / "loaded").exists(), "the library was loaded"
    assert not (folder / "out").exists(), "something was written"


def code(name, properties, commands, says=("job.yaml", "loads native code")):
    """A job file that has a library loaded; `properties(library)` are its queue's."""
    def make(folder):
        prepared(folder, {"url": "kafka://127.0.0.1:1/t", "kafka": properties(library(folder))})
    return Case(name, make, [Step(command, says=says) for command in commands], never_loaded)


SUBMIT = ["submit", "job.yaml"]
ELSEWHERE = [*SUBMIT, "--queue", "kafka://localhost:1/other"]


def codes():
    yield code("plugin", lambda so: {"plugin.library.paths": so}, [["plan", "job.yaml"], SUBMIT, ["run", "job.yaml"]],
               ("job.yaml", "`queue.kafka.plugin.library.paths`", "GRISTMILL_KAFKA_PLUGIN_LIBRARY_PATHS", "--kafka"))
    yield code("plugin-of-another-queue", lambda so: {"plugin.library.paths": so}, [ELSEWHERE])
    yield code("plugin-not-enqueued", lambda so: {"plugin.library.paths": so}, [[*SUBMIT, "--no-enqueue"]])
    yield code("plugin-without-its-ending", lambda so: {"plugin.library.paths": so.removesuffix(".so")}, [SUBMIT])
    yield code("plugin-among-others", lambda so: {"linger.ms": 5, "plugin.library.paths": f"/nowhere.so;{so}", "batch.size": 9}, [SUBMIT])
    yield code("openssl-engine", lambda so: {"security.protocol": "ssl", "ssl.engine.location": so, "ssl.engine.id": "evil"}, [SUBMIT],
               ("job.yaml", "queue.kafka.s"))
    yield code("openssl-engine-alone", lambda so: {"ssl.engine.location": so}, [SUBMIT, ELSEWHERE])
    yield code("openssl-provider", lambda so: {"ssl.providers": so}, [SUBMIT])
    yield code("interceptors", lambda so: {"interceptors": so}, [SUBMIT])
    yield code("a-name-in-capitals", lambda so: {"Plugin.Library.Paths": so}, [SUBMIT], ("job.yaml", "is not one of the properties"))
    yield code("a-name-with-a-space", lambda so: {"plugin.library.paths ": so}, [SUBMIT], ("job.yaml", "none of librdkafka's"))
    yield code("a-name-with-a-zero", lambda so: {"plugin.library.paths\0": so}, [SUBMIT], ("job.yaml",))
    yield code("kerberos-command", lambda so: {"sasl.kerberos.kinit.cmd": "touch loaded"}, [SUBMIT], ("job.yaml", "how the broker is trusted"))

    def merged(folder):
        so = library(folder)
        prepared(folder, None)
        fields = json.loads((folder / "job.yaml").read_text())
        lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
        lines += ["queue:", "  url: kafka://127.0.0.1:1/t", "  kafka:", f"    <<: {{plugin.library.paths: '{so}'}}"]
        (folder / "job.yaml").write_text("\n".join(lines) + "\n")
    yield Case("plugin-by-a-merge-key", merged, [Step(SUBMIT, says=("job.yaml",))], never_loaded)


def properties():
    """What reads files, trusts anybody, or holds `submit` for ever."""
    for name, value, says in [
        ("ssl.ca.location", "/etc/shadow", "how the broker is trusted"),
        ("ssl.key.location", "/etc/ssl/private/key.pem", "how the broker is trusted"),
        ("enable.ssl.certificate.verification", False, "how the broker is trusted"),
        ("ssl.endpoint.identification.algorithm", "none", "how the broker is trusted"),
        ("enable.sasl.oauthbearer.unsecure.jwt", True, "how the broker is trusted"),
        ("https.ca.location", "/etc/shadow", "how the broker is trusted"),
        ("sasl.username", "root", "how the broker is trusted"),
        ("offset.store.path", "/tmp", "is not one of the properties"),
        ("delivery.report.only.error", True, "is not one of the properties"),
        ("delivery.timeout.ms", 0, "is not one of the properties"),
        ("receive.message.max.bytes", 2147483647, "is not one of the properties"),
        ("debug", "all", "is not one of the properties"),
        ("acks", 0, "cannot be set"),
        ("bootstrap.servers", "203.0.113.9:9092", "cannot be set"),
        ("\x1b[2J\x1b]0;owned\x07", 1, "none of librdkafka's"),
        ("x" * 900, 1, "none of librdkafka's"),
    ]:
        def make(folder, name=name, value=value):
            prepared(folder, {"url": "kafka://127.0.0.1:1/t", "kafka": {name: value}})
        called = name.replace(".", "-") if name.isprintable() and len(name) < 99 else ("control-characters" if len(name) < 99 else "a-long-name")
        yield Case(f"property-{called}", make, [Step(SUBMIT, says=("job.yaml", says), silent=("\x1b", "x" * 99), seconds=15.0)], never_loaded)

    def many(folder):
        prepared(folder, {"url": "kafka://127.0.0.1:1/t", "kafka": {f"linger.ms{number}": 1 for number in range(100_000)}})
    yield Case("a-hundred-thousand-properties", many, [Step(SUBMIT, says=("100000 properties",))], never_loaded)


def leak(name, answer, queue, env, says, more=()):
    """A job file that leads the environment's password to a server of a stranger's. `queue` and `env` take the server."""
    server = []

    def make(folder):
        server.append(Server(answer))
        (folder / "password").write_text(PASSWORD)
        prepared(folder, queue(server[0]))
        steps[:] = [Step([*SUBMIT, *more], says=says, silent=(PASSWORD, AS_BYTES), env=env(server[0]))]

    def check(folder):
        assert server[0].connections == 0, f"the stranger was called: {server[0].heard!r}"
        assert not (folder / "out").exists(), "something was written"
    steps = []
    return Case(name, make, steps, check)


def leaks():
    told = ("the job file's `queue.url` names the server", "--queue", "GRISTMILL_QUEUE_HOST")
    plain = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "api.version.request": False,
             "broker.version.fallback": "0.10.0"}
    in_clear = {"GRISTMILL_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "GRISTMILL_KAFKA_SASL_MECHANISM": "PLAIN"}
    amqp = lambda server: {"url": f"amqp://{server.address}/q"}  # noqa: E731
    bare = lambda server: {"url": f"kafka://{server.address}/t"}  # noqa: E731
    yield leak("kafka-plain", kafka, lambda server: {"url": f"kafka://u@{server.address}/t", "kafka": plain}, lambda _: SECRET,
               ("job.yaml", "how the broker is trusted"))
    yield leak("kafka-plain-by-the-other-name", kafka,
               lambda server: {"url": f"kafka://u@{server.address}/t", "kafka": {"sasl.mechanisms": "PLAIN"}},
               lambda _: SECRET, ("job.yaml", "how the broker is trusted"))
    yield leak("kafka-oauth-token-endpoint", None,
               lambda server: {"url": "kafka://127.0.0.1:1/t", "kafka": {
                   "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.token.endpoint.url": f"http://{server.address}/token"}},
               lambda _: {"GRISTMILL_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET": PASSWORD}, ("job.yaml", "how the broker is trusted"))
    user = SECRET | in_clear | {"GRISTMILL_QUEUE_USER": "u"}
    yield leak("kafka-where-clear-text-is-asked-for-elsewhere", kafka, bare, lambda _: user, told)
    yield leak("kafka-the-second-of-two-brokers", kafka, lambda server: {"url": f"kafka://localhost:1,{server.address}/t"},
               lambda _: user | {"GRISTMILL_QUEUE_HOST": "localhost:1"}, told)
    yield leak("kafka-a-password-of-librdkafka", kafka, bare,
               lambda _: in_clear | {"GRISTMILL_KAFKA_SASL_USERNAME": "u", "GRISTMILL_KAFKA_SASL_PASSWORD": PASSWORD}, told)
    yield leak("kafka-a-mechanism-on-the-command-line", kafka, bare, lambda _: SECRET | {"GRISTMILL_QUEUE_USER": "u"}, told,
               ("--kafka", "security.protocol=SASL_PLAINTEXT", "--kafka", "sasl.mechanism=PLAIN"))
    yield leak("rabbitmq", rabbitmq, amqp, lambda _: SECRET, told)
    yield leak("rabbitmq-with-a-user", rabbitmq, lambda server: {"url": f"amqp://admin@{server.address}/%2f/q"}, lambda _: SECRET, told)
    yield leak("rabbitmq-a-password-file", rabbitmq, amqp, lambda _: {"GRISTMILL_QUEUE_PASSWORD_FILE": "password"}, told)
    yield leak("rabbitmq-another-port", rabbitmq, amqp, lambda server: SECRET | {"GRISTMILL_QUEUE_HOST": f"127.0.0.1:{server.port % 60000 + 1}"},
               told)
    yield leak("rabbitmq-another-queue-of-the-operator", rabbitmq, amqp, lambda _: SECRET | {"GRISTMILL_QUEUE": "amqp://u@localhost:1/q"}, told)
    yield leak("rabbitmq-a-user-that-looks-like-the-host", rabbitmq, lambda server: {"url": f"amqp://broker.internal@{server.address}/q"},
               lambda _: SECRET | {"GRISTMILL_QUEUE_HOST": "broker.internal"}, told)
    yield leak("rabbitmq-a-list-that-cannot-be-read", rabbitmq, amqp, lambda _: SECRET | {"GRISTMILL_QUEUE_HOST": f"u:{PASSWORD}@127.0.0.1"},
               ("`GRISTMILL_QUEUE_HOST` has an invalid entry",))
    yield leak("rabbitmq-in-clear-text-over-a-network", None, lambda _: {"url": "amqp://192.0.2.1/q"},
               lambda _: SECRET | {"GRISTMILL_QUEUE_HOST": "192.0.2.1"}, ("in clear text", "`amqps://`", "amqp://192.0.2.1:5672"))


def meant(name, answer, queue, env, argv, hears, **step):
    """What must go on working, which shows besides that the servers of these cases hear a password where one is sent."""
    server, steps = [], []

    def make(folder):
        server.append(Server(answer))
        prepared(folder, queue(server[0]))
        found = [word.format(address=server[0].address) for word in argv]
        steps[:] = [Step(found, (FAILURE,), silent=(PASSWORD, AS_BYTES), env=env(server[0]), **step)]

    def check(_):
        assert server[0].connections > 0, "nobody called"
        assert (PASSWORD.encode() in server[0].heard) == hears, f"heard {server[0].heard!r}"
    return Case(name, make, steps, check)


def meants():
    amqp = lambda server: {"url": f"amqp://{server.address}/q"}  # noqa: E731
    yield meant("meant-no-password-no-question", rabbitmq, amqp, lambda _: {}, SUBMIT, False)
    yield meant("meant-a-host-that-is-listed", rabbitmq, amqp, lambda _: SECRET | {"GRISTMILL_QUEUE_HOST": "broker, 127.0.0.1"}, SUBMIT, True)
    yield meant("meant-the-operators-own-queue", rabbitmq, amqp, lambda server: SECRET | {"GRISTMILL_QUEUE": f"amqp://{server.address}/other"},
                SUBMIT, True)
    given = [*SUBMIT, "--queue", "amqp://u@{address}/q"]
    yield meant("meant-an-address-on-the-command-line", rabbitmq, lambda _: None, lambda _: SECRET, given, True)
    for level in ("trace", "lapin=trace,amq_protocol_tcp=trace,async_rs=trace", "lapin::io_loop=trace,lapin::channels=debug,info"):
        yield meant(f"a-log-of-everything-{level.count('=')}", rabbitmq, lambda _: None, lambda _, level=level: SECRET | {"RUST_LOG": level},
                    given, True)
    plain = {"GRISTMILL_QUEUE_USER": "u", "GRISTMILL_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "GRISTMILL_KAFKA_SASL_MECHANISM": "PLAIN"}
    yield meant("meant-kafka-in-clear-text-asked-for", kafka, lambda _: None, lambda _: SECRET | plain,
                [*SUBMIT, "--queue", "kafka://{address}/t"], True)


def cases():
    yield from codes()
    yield from properties()
    yield from leaks()
    yield from meants()
