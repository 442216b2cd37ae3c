"""Servers and options that would lead a process to what it was not told to touch.

What messages and records lead a worker to needs a broker: tests/worker_access.rs. Here a web server that a job file names redirects to
addresses that give out a machine's credentials, and prefixes for queued jobs mean something else than they say."""

import http.server
import shutil
import subprocess
import threading

from case import REFUSED, Case, NotShown, Step, job, rows

# Forms of 169.254.169.254 and of other metadata services, as a redirect may write them.
LINK_LOCAL = {
    "plain": "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "decimal": "http://2852039166/latest/",
    "hexadecimal": "http://0xa9fea9fe/latest/",
    "octal": "http://0251.0376.0251.0376/latest/",
    "short": "http://169.254.43518/latest/",
    "trailing-dot": "http://169.254.169.254./latest/",
    "mapped": "http://[::ffff:169.254.169.254]/latest/",
    "nat64": "http://[64:ff9b::a9fe:a9fe]/latest/",
    "link-local-6": "http://[fe80::1]/",
    "amazon-6": "http://[fd00:ec2::254]/latest/",
    "google": "http://metadata.google.internal/computeMetadata/v1/",
    "google-upper": "http://METADATA.GOOGLE.INTERNAL./computeMetadata/v1/",
    "alibaba": "http://100.100.100.200/latest/",
    "azure-wire": "http://168.63.129.16/machine",
    "credentials-before-host": "http://example.com@169.254.169.254/latest/",
    "other-port": "http://169.254.170.2:80/v2/credentials/",
    "https": "https://169.254.169.254/latest/",
}


# What a stranger's name server says of its names.
NAMES = {
    "sneaky.example": "169.254.169.254",
    "sneaky6.example": "fd00:ec2::254",
    "wire.example": "168.63.129.16",
    "rows.example": "127.0.0.1",
}
# In a namespace of its own the program sees a file of ours at /etc/hosts.
WITH_NAMES = ("unshare", "--mount", "sh", "-c", 'mount --bind hosts /etc/hosts && exec "$0" "$@"')


def server(answer):
    """A web server that redirects each path to `answer(path)`, on a thread that ends with the process; its address."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", answer(self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{served.server_port}"


def redirects(name, answer, says, command="plan"):
    def make(folder):
        job(folder, input={"uri": f"{server(answer)}/rows.jsonl"})
    return Case(name, make, [Step([command, "job.yaml"], (REFUSED,), says)])


def resolves(name, host, says):
    """A server that the job names, which redirects to a name of which a name server says what `NAMES` says."""
    def make(folder):
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {known}\n" for known, ip in NAMES.items()))
        knows = [*WITH_NAMES, "getent", "hosts", host]
        if not shutil.which("unshare") or subprocess.run(knows, cwd=folder, capture_output=True).returncode:
            raise NotShown("names cannot be given addresses: it needs `unshare`, and the right to mount")
        to = f"http://{host}/rows.jsonl"
        address = server(lambda path: to)
        job(folder, input={"uri": address.replace("127.0.0.1", "rows.example") + "/rows.jsonl"})
    return Case(name, make, [Step(["plan", "job.yaml"], (REFUSED,), says, env={"NO_PROXY": "*"}, through=WITH_NAMES)])


def place(name, argv, fields, *says):
    def make(folder):
        job(folder, **fields)
        rows(folder, [{"text": "ticket"}])
    return Case(name, make, [Step(argv, (REFUSED,), says)])


def prefix(name, option, text, *says):
    # The broker is never asked: what cannot be a prefix is said first.
    argv = ["worker", "--queue", "amqp://127.0.0.1:1/q", "--once", option, text]
    return Case(name, lambda folder: None, [Step(argv, (REFUSED,), (option, *says))])


def cases():
    for name, to in LINK_LOCAL.items():
        yield redirects(f"redirect-{name}", lambda path, to=to: to, ("redirects to", "not followed"))
    yield redirects("redirect-second", lambda path: "/next" if path == "/rows.jsonl" else LINK_LOCAL["plain"],
                    ("redirects to", "not followed"))
    yield redirects("redirect-run", lambda path: LINK_LOCAL["plain"], ("redirects to", "not followed"), "run")
    for name, ip in NAMES.items():
        if name != "rows.example":
            yield resolves(f"name-{name.split('.')[0]}", name, (f"`{name}` resolves to {ip}, a link-local address",))
    yield redirects("redirect-for-ever", lambda path: path + "x", ("redirects more than",))
    yield prefix("prefix-glob", "--accept", "s3://bucket/*", "wildcard")
    yield prefix("prefix-no-host", "--accept-inputs", "https://", "names no host")
    yield prefix("prefix-bucket-above", "--accept", "s3://../private/", "names no bucket")
    for name, uri in (("above", "s3://../x"), ("dot", "gs://./x"), ("encoded", "s3://%2e%2e/x"), ("none", "az:///x")):
        yield place(f"input-bucket-{name}", ["plan", "job.yaml"], {"input": {"uri": f"{uri}/rows.jsonl"}}, uri, "names no bucket")
        yield place(f"output-bucket-{name}", ["run", "job.yaml"], {"output": {"uri": uri}}, uri, "names no bucket")
        yield place(f"status-bucket-{name}", ["status", uri], {}, uri, "names no bucket")
    yield prefix("prefix-encoded-slash", "--accept", "s3://bucket/a%2f..%2fb", "no name")
    yield prefix("prefix-password", "--accept-inputs", "https://me:hush@host/", "password")
    yield prefix("prefix-empty", "--accept-models", "", "empty")
